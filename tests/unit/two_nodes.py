"""A prefill and a decode node in virtual time: how long requests take under a policy of splitting.

What the real ones do, as far as it takes time: steps under one token budget, prompts in order, a decode node
that hears of everything between two steps, pulls after the first token. The gateway's part is the real one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from baton.gateway.cache_view import PromptPages
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.routing import RequestRouting, Router
from baton.gateway.split_decision import Split
from baton.handoff.pull_cost import PullCost
from baton.step_cost import StepCost, StepLoad, chunk_pairs
from baton.v1 import cache_pb2, decode_pb2, node_pb2

BUDGET = 2048
HOP = 3e-4
"""Seconds of a message."""


@dataclass(eq=False)
class Job:
    at: float
    prompt: int
    output: int
    left: int = 0
    """Prompt tokens to compute."""
    made: int = 0
    first: float = 0.0
    """When its first token came."""
    way: RequestRouting | None = None
    local: bool = False


class Node:
    """Takes steps while it has something to do; hears of what has come between them."""

    def __init__(self, world: World, computed: Callable[[Job], None]) -> None:
        self.world, self.computed = world, computed
        self.inbox: list[Callable[[], None]] = []
        self.prompts: list[Job] = []
        self.rows: list[Job] = []
        self.busy = False

    def call(self, what: Callable[[], None]) -> None:
        self.inbox.append(what)
        if not self.busy:
            self.turn()

    def turn(self) -> None:
        self.busy = True
        while self.inbox:
            self.inbox.pop(0)()
        budget, chunks, rows = BUDGET - len(self.rows), [], list(self.rows)
        for job in self.prompts:
            if count := min(budget, job.left):
                chunks.append((job, count))
                budget -= count
        self.busy = bool(rows or chunks)
        if not self.busy:
            return
        load = StepLoad(
            decode_sequences=len(rows),
            context_tokens=sum(job.prompt + job.made for job in rows),
            prefill_tokens=sum(count for _, count in chunks),
            attention_pairs=sum(chunk_pairs(job.prompt - job.left, count) for job, count in chunks),
        )
        self.world.after(self.world.cost.seconds(load), lambda: self.end(rows, chunks))

    def end(self, rows: list[Job], chunks: list[tuple[Job, int]]) -> None:
        for job in rows:
            self.world.token(job)
        for job, count in chunks:
            job.left -= count
            if not job.left:
                self.prompts.remove(job)
                self.computed(job)
        self.turn()


@dataclass
class World:
    """`run` returns how long each request took, from its arrival to its last token."""

    mode: str
    cost: StepCost
    pull: PullCost
    hop: float = HOP
    now: float = 0.0
    taken: list[float] = field(default_factory=list)
    handed_off: int = 0

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.decode, self.prefill = Node(self, self.joined), Node(self, self.sampled)
        self.split = Split(self.mode, GatewayMetrics(), lambda: self.now)
        self.router = Router("cache", lambda: self.now)

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), what))

    def run(self, jobs: list[Job]) -> list[float]:
        for job in jobs:
            self.after(job.at, lambda job=job: self.arrive(job))
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
        assert len(self.taken) == len(jobs)
        return self.taken

    def tell(self) -> None:
        """The nodes say what they have to do, as a stream of theirs does."""
        for address, node in (("p", self.prefill), ("d", self.decode)):
            load = node_pb2.Load(
                step_cost=node_pb2.StepCost(**asdict(self.cost)),
                pull_cost=node_pb2.PullCost(**asdict(self.pull)),
                step_tokens=BUDGET,
                queued_tokens=sum(job.left for job in node.prompts),
                running=len(node.rows),
                rows=len(node.rows),
                keys=sum(job.prompt + job.made for job in node.rows),
            )
            update = cache_pb2.CacheUpdate(incarnation=1, snapshot=True, page_size=16, load=load)
            self.router.update(address, update)

    def arrive(self, job: Job) -> None:
        self.tell()
        job.left = job.prompt
        job.way = RequestRouting(self.router, next(self._numbers), PromptPages(range(job.prompt), ""))
        limit = job.way.decide(self.split, job.way.pick_decode(["d"]), job.way.order_prefill(["p"]))
        job.way.sent("d", ["p"])
        assert limit is not None
        job.local = job.prompt <= limit
        self.handed_off += not job.local
        self.decode.call(lambda: self.admitted(job))

    def admitted(self, job: Job) -> None:
        if job.local:
            self.decode.prompts.append(job)
        else:
            self.after(self.hop, lambda: self.prefill.call(lambda: self.prefill.prompts.append(job)))

    def sampled(self, job: Job) -> None:
        """By the prefill node."""
        self.after(self.hop, lambda: self.decode.call(lambda: self.heard(job)))

    def heard(self, job: Job) -> None:
        self.token(job)
        if job.made < job.output:
            seconds = self.pull.seconds(min(job.prompt, BUDGET))
            self.after(seconds, lambda: self.decode.call(lambda: self.decode.rows.append(job)))

    def joined(self, job: Job) -> None:
        """Computed by the decode node."""
        self.token(job)
        if job.made < job.output:
            self.decode.rows.append(job)

    def token(self, job: Job) -> None:
        assert job.way is not None
        job.made += 1
        if job.made == 1:
            job.first = self.now
            job.way.computed()
        if job.made == job.output:
            address = "" if job.local else "p"
            stats = decode_pb2.RequestStats(prefill_address=address, output_tokens=job.made)
            job.way.learn(self.split, stats, job.first)
            job.way.ended()
            self.taken.append(self.now - job.at)
            if job in self.decode.rows:
                self.decode.rows.remove(job)
