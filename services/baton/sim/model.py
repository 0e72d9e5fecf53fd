"""A pool of real bytes, and a "model" whose next token is a hash of the bytes that it attends to.

The KV entry of a token is 8 bytes: its id, and a checksum of the entry before it, found in the pages, and
the id. So an entry stands for everything before it, and one page that is stale, foreign, torn or not
written changes what is sampled.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.engine.plan import Logprobs, PlanRow, RowResult, StepPlan, StepResult

VOCAB = 997
ENTRY_BYTES = 8
_ENTRY = struct.Struct("<II")
_ID = struct.Struct("<I")
_SEED = struct.Struct("<Q")
_UNWRITTEN = 0xEE


def entry(token: int, before: int) -> tuple[bytes, int]:
    """The KV entry of a token after the checksum `before`, and its own checksum."""
    checksum = zlib.crc32(_ID.pack(token), before)
    return _ENTRY.pack(token, checksum), checksum


def sample(seen: bytes | bytearray, seed: int, penalized: Sequence[int] = ()) -> int:
    """`penalized`: the tokens that penalties are for, which the device keeps; empty without penalties."""
    state = zlib.crc32(array("I", penalized).tobytes(), zlib.crc32(seen))
    return zlib.crc32(_SEED.pack(seed % 2**64), state) % VOCAB


def reference(
    prompt: Sequence[int],
    seed: int,
    count: int,
    stop: frozenset[int] = frozenset(),
    penalized: bool = False,
) -> tuple[int, ...]:
    """The output tokens, computed without pages."""
    seen, checksum = bytearray(), 0
    output: list[int] = []
    for token in prompt:
        written, checksum = entry(token, checksum)
        seen += written
    for _ in range(count):
        token = sample(seen, seed, (*prompt, *output) if penalized else ())
        output.append(token)
        if token in stop:
            break
        written, checksum = entry(token, checksum)
        seen += written
    return tuple(output)


def prompt_logprobs(prompt: Sequence[int]) -> tuple[Logprobs, ...]:
    """Those of a prompt's own tokens but the first, computed without pages."""
    seen, checksum, found = 0, 0, []
    for token, following in pairwise(prompt):
        written, checksum = entry(token, checksum)
        seen = zlib.crc32(written, seen)
        found.append(Logprobs(following, _logprob(seen)))
    return tuple(found)


def _logprob(seen: int) -> float:
    """A number that a message holds exactly, in 32 bits."""
    return -float(seen >> 8)


class SimPool:
    """Page bytes, the pages' generations and the last retired step, as receivers see them. Outlives its
    process, like shared memory."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_bytes = page_size * ENTRY_BYTES
        self.data = bytearray([_UNWRITTEN]) * (num_pages * self.page_bytes)
        self.generations = array("Q", bytes(8 * num_pages))
        self.retired = 0

    def retire(self, step: int) -> None:
        self.retired = step

    def write(self, page: int, offset: int, data: bytes | bytearray) -> None:
        start = page * self.page_bytes + offset
        self.data[start : start + len(data)] = data

    def read(self, page: int, offset: int, size: int) -> bytes:
        start = page * self.page_bytes + offset
        return bytes(self.data[start : start + size])


POISON = 2**63 + 1
"""The seed of a request whose steps end their process."""


class Escaped(BaseException):
    """An error that escapes the core."""


class StepError(Exception):
    """A step that the device could not run."""


@dataclass(slots=True, eq=False)
class Flight:
    """A launched step. Its writes and reads happen when the device executes it, not at the launch."""

    plan: StepPlan
    done_at: float = 0.0
    result: StepResult | None = None
    error: str = ""
    poisoned: bool = False


class SimRunner:
    """Implements engine.plan.Runner. `submit` puts a flight on the device, which calls `execute` in order.

    `check_write` is told of every page before it is written. Not thread-safe.
    """

    vocab_size = VOCAB

    def __init__(
        self,
        pool: SimPool,
        max_slots: int,
        submit: Callable[[Flight], None],
        check_write: Callable[[StepPlan, int], None],
    ) -> None:
        self.max_slots = max_slots
        self.pool = pool
        self.plans = 0
        self.fail_next_launch = False
        self._submit = submit
        self._check_write = check_write
        self._last = [0] * max_slots
        self._seeds = [0] * max_slots
        self._penalized: list[list[int] | None] = [None] * max_slots
        """Prompt and output, as far as sampled; None: without penalties."""

    def launch(self, plan: StepPlan) -> Flight:
        if self.fail_next_launch:
            self.fail_next_launch = False
            raise StepError("no memory left on the device")
        self.plans += 1
        flight = Flight(plan)
        self._submit(flight)
        return flight

    def done(self, flight: Flight) -> bool:
        return flight.result is not None or bool(flight.error)

    def read(self, flight: Flight) -> StepResult:
        if flight.error:
            raise StepError(flight.error)
        if flight.poisoned:
            raise Escaped("poison")
        assert flight.result is not None, "a step was read before the device had run it"
        return flight.result

    def execute(self, flight: Flight) -> None:
        """Copies, slot inits, all writes, then all reads: the order that engine.plan promises. Nothing at all
        for a step that is to fail."""
        plan, pool = flight.plan, self.pool
        if flight.error:
            return
        for source, target in plan.copies:
            self._check_write(plan, target)
            pool.write(target, 0, pool.read(source, 0, pool.page_bytes))
        for init in plan.inits:
            self._seeds[init.slot] = init.seed
            self._penalized[init.slot] = [*init.prompt, *init.output] if init.params.penalized else None
            if init.last_token is not None:
                self._last[init.slot] = init.last_token
        inputs = [row.tokens if row.tokens is not None else (self._last[row.slot],) for row in plan.rows]
        for row, tokens in zip(plan.rows, inputs, strict=True):
            self._write(plan, row, tokens)
        rows = tuple(RowResult(self._sample(row), self._prompt_logprobs(row)) for row in plan.rows)
        flight.poisoned = any(self._seeds[slot] == POISON for row in plan.rows for slot in row.sample)
        flight.result = StepResult(plan.number, rows)

    def _write(self, plan: StepPlan, row: PlanRow, tokens: Sequence[int]) -> None:
        pool, size = self.pool, self.pool.page_size
        checksum = 0
        if row.start:
            before = row.start - 1
            offset = before % size * ENTRY_BYTES
            checksum = _ENTRY.unpack(pool.read(row.pages[before // size], offset, ENTRY_BYTES))[1]
        checked = -1
        for position, token in enumerate(tokens, row.start):
            page = row.pages[position // size]
            if page != checked:
                self._check_write(plan, page)
                checked = page
            written, checksum = entry(token, checksum)
            pool.write(page, position % size * ENTRY_BYTES, written)

    def _sample(self, row: PlanRow) -> tuple[int, ...]:
        if not row.sample:
            return ()
        pool, end = self.pool, row.start + row.count
        pages = row.pages[: -(-end // pool.page_size)]
        seen = b"".join(pool.read(page, 0, pool.page_bytes) for page in pages)[: end * ENTRY_BYTES]
        samples = []
        for slot in row.sample:
            penalized = self._penalized[slot]
            token = self._last[slot] = sample(seen, self._seeds[slot], penalized or ())
            if penalized is not None:
                penalized.append(token)
            samples.append(token)
        return tuple(samples)

    def _prompt_logprobs(self, row: PlanRow) -> tuple[Logprobs, ...]:
        found, seen, size = [], 0, self.pool.page_size
        for position in range(row.start + len(row.prompt_logprobs or ())):
            written = self.pool.read(row.pages[position // size], position % size * ENTRY_BYTES, ENTRY_BYTES)
            seen = zlib.crc32(written, seen)
            if row.prompt_logprobs and position >= row.start:
                found.append(Logprobs(row.prompt_logprobs[position - row.start], _logprob(seen)))
        return tuple(found)
