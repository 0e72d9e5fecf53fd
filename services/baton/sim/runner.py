"""The runner of simulated nodes: executes plans with the model of `sim.model`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from baton.engine.plan import Logprobs, PlanRow, RowResult, SlotInit, StepPlan, StepResult
from baton.kvcache import NO_PAGE
from baton.layers.cache_spec import State
from baton.sim.grammar import SimGrammar, SimMatcher
from baton.sim.images import SimEncoder
from baton.sim.model import (
    ENTRY_BYTES,
    ONE,
    POISONS,
    SILENT_POISON,
    STATE,
    VOCAB,
    SimPool,
    Windows,
    entries,
    logprob,
    sample,
)
from baton.sim.world import Violation
from baton.worker.ranks.channel import CollectiveError

GUESSES = range(2**31)
"""What only the device knows: entry n is token n."""


def salted(head: int, entries: bytes) -> bytes:
    """Entries as a KV head's piece of a page holds them, which is another one for each head; and back."""
    if not head:
        return entries
    salt = bytes((0, 0, 0, 0, head, head, head, head)) * (len(entries) // ENTRY_BYTES)
    size = len(entries)
    return (int.from_bytes(entries, "big") ^ int.from_bytes(salt, "big")).to_bytes(size, "big")


View = tuple[tuple[bytes, ...], tuple[bytes, ...]]
"""What a row's tokens see in the heads of a rank, those that are sampled from and those whose logits are
wanted."""


def combined(views: Sequence[bytes]) -> bytes:
    """What a token sees through all heads, or on all ranks: one value, or one that it should not see."""
    return views[0] if all(view == views[0] for view in views) else b"".join(views)


class Escaped(BaseException):
    """An error that escapes the core."""


class Killed(Escaped):
    """A signal that ends the process at once."""


class StepError(Exception):
    """A step that the device could not run."""


@dataclass(slots=True, eq=False)
class SimLaunchedStep:
    """A launched step. Its writes and reads happen when the device executes it, not at the launch."""

    plan: StepPlan
    done_at: float = 0.0
    result: StepResult | None = None
    error: str = ""
    seen: Sequence[tuple[int, ...] | None] = ()
    """All tokens, as the model sees them, of each row that has tokens of images. Empty: none has."""
    lost: str = ""
    """Why the ranks do not go on together."""
    poison: int = 0
    """A seed of POISONS in it."""
    ended: Callable[[], None] | None = None
    """To be called once it is done: of a worker of several ranks nobody knows when."""


class SimRunner:
    """Implements engine.plan.Runner, and executes plans as one rank. `submit` puts a step on the device.

    `check_write` is told of every page before it is written. `heads`: first and number of the KV heads that
    it holds. Not thread-safe.
    """

    vocab_size = VOCAB

    def __init__(
        self,
        pool: SimPool,
        max_slots: int,
        submit: Callable[[SimLaunchedStep], None],
        check_write: Callable[[StepPlan, int], None],
        windows: Windows = ONE,
        heads: tuple[int, int] = (0, 1),
        encoder: SimEncoder | None = None,
    ) -> None:
        self.max_slots = max_slots
        self.pool = pool
        self._heads = range(heads[0], heads[0] + heads[1])
        self.plans = 0
        self.fail_next_launch = False
        self._submit = submit
        self._check_write = check_write
        self._windows = windows
        self._encoder = encoder
        self._last = [0] * max_slots
        self._right: dict[int, int] = {}
        """How many drafts of each slot's last row were right."""
        self._seeds = [0] * max_slots
        self._penalized: list[list[int] | None] = [None] * max_slots
        """Prompt and output, as far as sampled; None: without penalties."""
        self._matchers: list[SimMatcher | None] = [None] * max_slots
        self._passed: dict[tuple[int, int, int, int], bytes] = {}
        """States that the last step has passed in a row whose logits are all wanted, or that has drafts: by
        slot, group, head and position."""
        self._drafted: dict[tuple[int, int, int], list[bytes]] = {}
        """By slot, group and head: the state that a row with drafts has left, and those behind each draft."""

    def move_to(
        self, submit: Callable[[SimLaunchedStep], None], check_write: Callable[[StepPlan, int], None]
    ) -> None:
        """Another node has the engine now."""
        self._submit, self._check_write = submit, check_write

    def launch(self, plan: StepPlan) -> SimLaunchedStep:
        if self.fail_next_launch:
            self.fail_next_launch = False
            raise StepError("no memory left on the device")
        self.plans += 1
        step = SimLaunchedStep(
            plan, seen=self._encoder.tokens(plan.rows) if self._encoder is not None else ()
        )
        self._submit(step)
        return step

    def done(self, step: SimLaunchedStep) -> bool:
        return step.result is not None or bool(step.error or step.lost)

    def read(self, step: SimLaunchedStep) -> StepResult:
        if step.lost:
            raise CollectiveError(step.lost)
        if step.error:
            raise StepError(step.error)
        if step.poison:
            raise Killed("poison") if step.poison == SILENT_POISON else Escaped("poison")
        assert step.result is not None, "a step was read before the device had run it"
        return step.result

    def execute(self, step: SimLaunchedStep) -> None:
        """Copies, slot inits, all writes, then all reads: the order that engine.plan promises. Nothing at all
        for a step that is to fail. For a worker of one rank."""
        if step.error:
            return
        self.copy(step.plan)
        self.begin(step)
        self.write(step.plan, step.seen)
        self.end(step, self.views(step.plan))

    def copy(self, plan: StepPlan) -> None:
        pool = self.pool
        for source, target in plan.copies:
            self._check_write(plan, target)
            for head in self._heads:
                offset = head * pool.head_bytes
                pool.write(target, offset, pool.read(source, offset, pool.head_bytes))

    def begin(self, step: SimLaunchedStep) -> None:
        plan = step.plan
        rows = tuple(row.settled(self._right.get(row.slot, 0), GUESSES) for row in plan.rows)
        step.plan = replace(plan, rows=rows)
        for init in plan.inits:
            self._seeds[init.slot] = init.seed
            self._penalized[init.slot] = [*init.prompt, *init.output] if init.params.penalized else None
            self._matchers[init.slot] = _matcher(init)
            if init.last_token is not None:
                self._last[init.slot] = init.last_token

    def write(self, plan: StepPlan, seen: Sequence[tuple[int, ...] | None] = ()) -> None:
        """`seen`: as SimLaunchedStep.seen."""
        self._passed.clear()
        inputs = [row.tokens or (self._last[row.slot], *row.drafts) for row in plan.rows]
        inputs = [tokens or given for given, tokens in zip_longest(inputs, seen)]
        for row, tokens in zip(plan.rows, inputs, strict=True):
            self._write(plan, row, tokens)

    def views(self, plan: StepPlan) -> list[View]:
        return [
            (
                tuple(self._seen(row, row.start + row.count - i) for i in _sampled(row)),
                tuple(self._seen(row, row.start + i + 1) for i in range(len(row.prompt_logprobs or ()))),
            )
            for row in plan.rows
        ]

    def end(self, step: SimLaunchedStep, views: Sequence[View]) -> None:
        """Samples, from what all heads see."""
        plan = step.plan
        rows = tuple(
            RowResult(
                self._sample(row, seen),
                tuple(
                    Logprobs(token, logprob([each]))
                    for token, each in zip(row.prompt_logprobs or (), expected, strict=True)
                ),
            )
            for row, (seen, expected) in zip(plan.rows, views, strict=True)
        )
        seeds = (self._seeds[slot] for row in plan.rows for slot in row.sample)
        step.poison = next((seed for seed in seeds if seed in POISONS), 0)
        step.result = StepResult(plan.number, rows)

    def accept(self, plan: StepPlan, tokens: Sequence[tuple[int, int]]) -> None:
        """A follower learns what rank 0 has sampled last for each slot, and how many drafts were right."""
        slots = [slot for row in plan.rows for slot in row.sample]
        for slot, (token, right) in zip(slots, tokens, strict=True):
            self._last[slot], self._right[slot] = token, right

    def _write(self, plan: StepPlan, row: PlanRow, tokens: Sequence[int]) -> None:
        size = self.pool.page_size
        known = row.start + len(tokens) - len(row.drafts)
        stops = State.stops(row.start, known, size)
        states: dict[tuple[int, int], bytes] = {}
        for position, token in enumerate(tokens, row.start):
            if position == row.start or position % size == 0:
                for table, window in zip(row.tables, self._windows, strict=True):
                    if window != STATE:
                        self._check_write(plan, table[position // size])
            for head in self._heads:
                before = [
                    states.get((group, head), b"") or self._state_before(row, group, head)
                    if window == STATE
                    else self._read(head, table, position + 1 - (window or 2), position)
                    for group, (table, window) in enumerate(zip(row.tables, self._windows, strict=True))
                ]
                offset = head * self.pool.head_bytes + position % size * ENTRY_BYTES
                written = entries(token, before, self._windows)
                for group, (table, window) in enumerate(zip(row.tables, self._windows, strict=True)):
                    if window != STATE:
                        self.pool.write(table[position // size], offset, salted(head, written[group]))
                        continue
                    states[group, head] = written[group]
                    if row.prompt_logprobs or row.drafts:
                        self._passed[row.slot, group, head, position] = written[group]
                    if row.drafts:
                        key = row.slot, group, head
                        kept = self._drafted[key] if position > row.start else []
                        self._drafted[key] = [*kept, written[group]]
                    if position + 1 in stops:
                        self._write_state(plan, head, table, position, written[group])

    def _write_state(
        self, plan: StepPlan, head: int, table: Sequence[int], position: int, state: bytes
    ) -> None:
        """The state behind the token at `position`."""
        page = table[position // self.pool.page_size]
        if page == NO_PAGE:
            raise Violation(f"state: there is no page for the state behind position {position}")
        self._check_write(plan, page)
        self.pool.write(page, head * self.pool.head_bytes, salted(head, state))

    def _state_before(self, row: PlanRow, group: int, head: int) -> bytes:
        """The state before a row's tokens: the pages', or what the drafts that were right make of it."""
        state = self._read_state(head, row.tables[group], row.start - row.replay)
        if not row.replay:
            return state
        before, *behind = self._drafted[row.slot, group, head]
        return behind[row.replay - 1] if state == before else bytes(ENTRY_BYTES)

    def _read_state(self, head: int, table: Sequence[int], position: int) -> bytes:
        """The state before the token at `position`; empty at a sequence's beginning."""
        if not position:
            return b""
        page = table[(position - 1) // self.pool.page_size]
        if page == NO_PAGE:
            raise Violation(f"state: the state before position {position} is gone")
        return salted(head, self.pool.read(page, head * self.pool.head_bytes, ENTRY_BYTES))

    def _read(self, head: int, table: Sequence[int], first: int, behind: int) -> bytes:
        """A head's entries of the positions from `first`, or 0, to `behind`."""
        pool, first = self.pool, max(0, first)
        pages = table[first // pool.page_size : -(-behind // pool.page_size)] if first < behind else ()
        if NO_PAGE in pages:
            raise Violation(f"window: position {behind - 1} sees a page that its sequence has given up")
        whole = b"".join(pool.read(page, head * pool.head_bytes, pool.head_bytes) for page in pages)
        begin = first % pool.page_size * ENTRY_BYTES
        return salted(head, whole[begin : begin + (behind - first) * ENTRY_BYTES])

    def _seen(self, row: PlanRow, end: int) -> bytes:
        """What the token at `end` - 1 sees, in all groups."""
        return combined([b"".join(self._seen_by(row, head, end)) for head in self._heads])

    def _seen_by(self, row: PlanRow, head: int, end: int) -> Iterable[bytes]:
        for group, (table, window) in enumerate(zip(row.tables, self._windows, strict=True)):
            if window != STATE:
                yield self._read(head, table, 0 if window is None else end - window, end)
            elif (passed := self._passed.get((row.slot, group, head, end - 1))) is not None:
                yield passed
            else:
                yield self._read_state(head, table, end)

    def _sample(self, row: PlanRow, seen: Sequence[bytes]) -> tuple[int, ...]:
        if not row.drafts:
            return tuple(self._sample_one(slot, seen[0]) for slot in row.sample)
        samples = [self._sample_one(row.slot, seen[0])]
        for draft, behind in zip(row.drafts, seen[1:], strict=True):
            if samples[-1] != draft:
                break
            samples.append(self._sample_one(row.slot, behind))
        self._right[row.slot] = len(samples) - 1
        return tuple(samples)

    def _sample_one(self, slot: int, seen: bytes) -> int:
        penalized = self._penalized[slot]
        token, matcher = sample(seen, self._seeds[slot], penalized or ()), self._matchers[slot]
        token = self._last[slot] = matcher.choose(token) if matcher is not None else token
        if penalized is not None:
            penalized.append(token)
        return token


def _sampled(row: PlanRow) -> range:
    """The tokens that a row samples from, counted from its end."""
    return range(len(row.drafts), -1, -1) if row.sample else range(0)


def _matcher(init: SlotInit) -> SimMatcher | None:
    if init.grammar is None:
        return None
    assert isinstance(init.grammar, SimGrammar)
    matcher = init.grammar.matcher()
    matcher.accept(init.output)
    return matcher
