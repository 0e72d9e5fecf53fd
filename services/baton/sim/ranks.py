"""The ranks of a simulated worker: each executes the same plans at its own pace, and waits for the others in
collectives.

Real are the plans' messages (worker.ranks.plan_codec), what rank 0 does with a plan and with a lost rank
(worker.ranks.runner), and which heads a rank holds and copies (layers.tensor_parallel). The collectives are
in the place of torch.distributed: matched by their number alone, each with a time limit, and failing when a
rank is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from baton.engine.plan import PlanRow, RowResult
from baton.layers.tensor_parallel import Shard
from baton.sim.runner import SimLaunchedStep, SimRunner, View, combined
from baton.sim.world import Actor, World
from baton.worker.ranks.channel import ChannelClosed
from baton.worker.ranks.plan_codec import PlanDecoder

PARENT_SECONDS = 0.1
"""A follower ends so long after rank 0 at most; as in worker.ranks.follower_main."""
RESET_SECONDS = 0.001
"""From the end of a rank until others see that its connections are gone."""

COPIED, EMBEDDED, SUMMED, SAMPLED = "copied", "embedded", "summed", "sampled"
"""Collectives of a step: after copies; before any entry is written; after all; of the tokens, from rank 0."""

CollectiveCall = tuple[str, Any]
RankSteps = Generator[CollectiveCall, Any, None]


@dataclass(slots=True)
class Collective:
    kind: str
    values: dict[int, Any] = field(default_factory=dict)
    waiting: dict[int, Callable[[Any], None]] = field(default_factory=dict)


class SimRanks:
    """The ranks of one worker."""

    def __init__(
        self,
        world: World,
        name: str,
        runners: list[SimRunner],
        actors: list[Actor],
        heads: int,
        step_seconds: float,
        limit: float,
        lost: Callable[[str], None],
    ) -> None:
        """`runners`, `actors`: of each rank. `limit`: of a collective, in seconds. `lost`: called once, with
        why, when they cannot go on together."""
        self.world = world
        self.heads = heads
        self.step_seconds = step_seconds
        self.rng = world.rng(f"ranks {name}")
        self.over = ""
        """Why they do not go on."""
        self._limit = limit
        self._lost = lost
        self._open: dict[int, Collective] = {}
        self.all = [
            Rank(self, Shard(rank, len(runners)), runner, actor)
            for rank, (runner, actor) in enumerate(zip(runners, actors, strict=True))
        ]
        self.channels = [SimChannel(self, rank) for rank in self.all[1:]]

    def enter(self, rank: Rank, kind: str, value: Any, resume: Callable[[Any], None]) -> None:
        """The rank's next collective; `resume` is called with what it gives."""
        number, rank.calls = rank.calls, rank.calls + 1
        found = self._open.setdefault(number, Collective(kind))
        if found.kind != kind:
            self.lose(f"rank {rank.shard.rank} is at another collective than others")
            return
        found.values[rank.shard.rank], found.waiting[rank.shard.rank] = value, resume
        self._go_on(found)
        if len(found.values) == len(self.all):
            del self._open[number]
        if rank.shard.rank in found.waiting:
            self.world.at(self._limit, rank.actor, lambda: self._expire(found, rank.shard.rank))

    def _go_on(self, found: Collective) -> None:
        if self.complete(found):
            value = result(found)
            for resume in found.waiting.values():
                resume(value)
            found.waiting.clear()

    def complete(self, found: Collective) -> bool:
        """Whether those who wait go on. Tokens come from rank 0; for all else each waits for all."""
        return 0 in found.values if found.kind == SAMPLED else len(found.values) == len(self.all)

    def _expire(self, found: Collective, rank: int) -> None:
        if rank in found.waiting:
            self.lose(f"rank {rank} has waited for others for {self._limit:g} s")

    def lose(self, why: str) -> None:
        """A rank is gone, or too late: all others end, rank 0 with an error of its steps."""
        if self.over:
            return
        self.over = why
        for rank in self.all[1:]:
            rank.actor.alive = False
        self.all[0].lose(why)
        self._lost(why)

    def kill(self, rank: int) -> None:
        """SIGKILL of a follower."""
        self.all[rank].actor.alive = False
        self.world.at(RESET_SECONDS, Actor("kernel"), lambda: self.lose(f"rank {rank} has ended"))

    def stall(self, rank: int, seconds: float) -> None:
        self.all[rank].actor.stall(self.world.now + seconds)

    def orphan(self) -> None:
        """Rank 0 has ended."""
        self.over = self.over or "rank 0 has ended"
        for rank in self.all[1:]:
            self.world.at(self.rng.uniform(0.0, PARENT_SECONDS), Actor("kernel"), rank.end)


class Rank:
    """One rank's device: it runs plans one after the other."""

    def __init__(self, ranks: SimRanks, shard: Shard, runner: SimRunner, actor: Actor) -> None:
        self.shard = shard
        self.actor = actor
        self.calls = 0
        """Collectives entered so far."""
        self._ranks = ranks
        self._runner = runner
        self._queue: deque[SimLaunchedStep] = deque()
        self._messages: deque[bytes] = deque()
        """Plans that a follower has not begun."""
        self._decoder = PlanDecoder()
        self._steps: RankSteps | None = None
        self._broken = ""
        """Why all further steps fail."""

    def take(self, step: SimLaunchedStep) -> None:
        self._queue.append(step)
        if self._broken:
            self._break()
        elif self._ranks.over and self.shard.rank == 0:
            self.lose(self._ranks.over)
        elif len(self._queue) == 1:
            self._begin()

    def receive(self, message: bytes) -> None:
        """A follower gets a plan, read when those before it have been executed."""
        self._messages.append(message)
        if not self._queue:
            self._next()

    def _next(self) -> None:
        if self._messages:
            self._queue.append(SimLaunchedStep(self._decoder.decode(self._messages.popleft())))
        if self._queue:
            self._begin()

    def _begin(self) -> None:
        self._steps = self._run(self._queue[0])
        self._after(None)

    def _after(self, result_value: Any) -> None:
        """Goes on after some time, with what a collective has given."""
        rng, plan = self._ranks.rng, self._queue[0].plan
        usual = self._ranks.step_seconds * (1 + plan.num_tokens / 16)
        # Now and then one rank lags far behind.
        delay = usual * rng.uniform(0.02, 0.4) * (10 if rng.random() < 0.03 else 1)
        self._ranks.world.at(delay, self.actor, lambda: self._advance(result_value))

    def _advance(self, result_value: Any) -> None:
        if self._steps is None or (self._ranks.over and self.shard.rank == 0):
            return
        try:
            kind, value = self._steps.send(result_value)
        except StopIteration:
            done = self._queue[0]
            if done.error:
                self._broken = done.error
                self._break()
                return
            self._end()
            self._next()
            return
        self._ranks.enter(self, kind, value, self._after)

    def _run(self, step: SimLaunchedStep) -> RankSteps:
        """Does what engine.model_runner does on each rank."""
        plan, runner = step.plan, self._runner
        if step.error:
            return
        if plan.copies:
            if self.shard.keeps(self._ranks.heads):
                runner.copy(plan)
            yield COPIED, None
        runner.begin(step)
        plan = step.plan
        views: list[View] = []
        if plan.rows:
            yield EMBEDDED, None
            runner.write(plan)
            views = yield SUMMED, runner.views(plan)
        if self.shard.rank == 0:
            runner.end(step, views)
        if not any(row.sample for row in plan.rows):
            return
        if self.shard.rank == 0:
            assert step.result is not None
            rows = zip(plan.rows, step.result.rows, strict=True)
            yield SAMPLED, [sampled for row in rows for sampled in _last_tokens(*row)]
        else:
            runner.accept(plan, (yield SAMPLED, None))

    def _break(self) -> None:
        """Each step fails after one that has."""
        for step in self._queue:
            step.error = self._broken
        while self._queue:
            self._end()

    def _end(self) -> None:
        step = self._queue.popleft()
        if step.ended is not None:
            step.ended()

    def lose(self, why: str) -> None:
        """All its steps that have not ended end with an error."""
        self._steps = None
        for step in self._queue:
            step.lost = why
        while self._queue:
            self._end()

    def end(self) -> None:
        self.actor.alive = False


def result(found: Collective) -> Any:
    """What all ranks get. Of sums: of each row what the heads of all ranks see."""
    if found.kind != SUMMED:
        return found.values.get(0)
    views: list[list[View]] = [found.values[rank] for rank in sorted(found.values)]
    rows = len(views[0])
    others = [each + [((), ())] * (rows - len(each)) for each in views]
    return [
        tuple(
            tuple(
                combined([each[row][kind][i] if i < len(each[row][kind]) else b"?" for each in others])
                for i in range(len(views[0][row][kind]))
            )
            for kind in (0, 1)
        )
        for row in range(rows)
    ]


def _last_tokens(row: PlanRow, result: RowResult) -> list[tuple[int, int]]:
    """The last token of each of the row's slots, and how many drafts were right."""
    if row.drafts:
        return [(result.tokens[-1], len(result.tokens) - 1)]
    return [(token, 0) for token in result.tokens]


class SimChannel:
    """worker.ranks.runner.PlanChannel to a follower: plans arrive in order."""

    def __init__(self, ranks: SimRanks, follower: Rank) -> None:
        self._ranks = ranks
        self._follower = follower
        self._last = 0.0

    def send_plan(self, plan: bytes, threads: int) -> None:
        if not self._follower.actor.alive:
            raise ChannelClosed("it takes no messages: it has ended")
        world, rng = self._ranks.world, self._ranks.rng
        late = 0.02 if rng.random() < 0.05 else 0.0002
        self._last = max(self._last, world.now + late * rng.uniform(0.1, 1.0))
        world.at(self._last - world.now, self._follower.actor, lambda: self._follower.receive(plan))
