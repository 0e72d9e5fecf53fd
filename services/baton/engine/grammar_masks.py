"""Masks of the sampled slots whose output a grammar constrains.

A slot's matcher starts from SlotInit alone: the grammar and the output so far. So whatever binds a sequence
to a slot (a hand-off, a resume, a retraction, a fork) restores it. Where the forward pass keeps the step
thread, costly masks are computed in a thread of their own meanwhile; the library lets go of the interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.plan import SlotInit
from baton.grammar.base import GrammarError, Matcher, Words

CHEAP_SECONDS = 1e-4
"""Masks that take less are computed by the step thread. In another thread each would cost both threads
several turns of the interpreter lock, which take longer."""


@dataclass(slots=True)
class MaskStats:
    """Counters; read by other threads."""

    masks: int = 0
    seconds: float = 0.0
    """That the masks took, all together."""
    waited: float = 0.0
    """Seconds that the step thread computed them, or waited for them."""


@dataclass(slots=True, eq=False)
class ConstrainedOutput:
    """One sequence's output in a slot, and its matcher."""

    init: SlotInit
    matcher: Matcher | None = None
    """None: not made yet."""
    tokens: list[int] = field(default_factory=list)
    """Known, and not yet given to the matcher."""
    unread: int = 0
    """Sampled tokens that are not known yet: its mask cannot be computed."""


@dataclass(slots=True)
class Masks:
    """Grammar masks of one step. `rows`, indices into the sampled slots, ascending."""

    rows: list[int]
    outputs: list[ConstrainedOutput]
    host: torch.Tensor
    """int32 [rows, words], pinned where a device needs it so; all bits set where there is an error."""
    errors: dict[int, str]
    """Why a row has no mask."""

    @property
    def words(self) -> Words:
        return self.host.numpy()

    def apply(self, logits: torch.Tensor, target_rows: Sequence[int]) -> None:
        """Sets the logits of what may not be sampled to -inf. logits: [any, vocab_size], of which
        `target_rows` [rows] have these masks."""
        # Filling where a mask says so takes ten times as long: its branches cannot be predicted.
        limits = torch.from_numpy(_limits(self.words)[:, : logits.shape[1]]).to(logits.device)
        first, last = target_rows[0], target_rows[-1]
        if last - first + 1 == len(target_rows):
            part = logits[first : last + 1]
            torch.minimum(part, limits, out=part)
        else:
            for row, limit in zip(target_rows, limits, strict=True):
                torch.minimum(logits[row], limit, out=logits[row])

    def on(self, device: torch.device) -> torch.Tensor:
        """The words on the device, in the order of its stream."""
        return self.host.to(device, non_blocking=True)

    def row_index(self, count: int) -> npt.NDArray[np.int32]:
        """For each of the `count` sampled slots: its index in `rows`, or -1."""
        row_index = np.full(count, -1, np.int32)
        row_index[self.rows] = np.arange(len(self.rows))
        return row_index

    def launched(self) -> None:
        """A token of each output is being sampled."""
        for output in self.outputs:
            output.unread += 1

    def sampled(self, tokens: Iterable[int]) -> None:
        """Tells the matchers which tokens [rows] were sampled."""
        for output, token in zip(self.outputs, tokens, strict=True):
            output.unread -= 1
            output.tokens.append(token)


_LIMITS_OF_BYTES = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)
"""[256, 8]: by the bits of a byte."""


def _limits(words: Words) -> npt.NDArray[np.float32]:
    """[rows, 32 * words]: inf where a bit is set, else -inf. words: int32 [rows, words]."""
    octets = words.view(np.uint8)
    limits = np.empty((*octets.shape, 8), np.float32)
    np.take(_LIMITS_OF_BYTES, octets, axis=0, out=limits, mode="clip")  # "raise" would take a copy
    return limits.reshape(len(words), -1)


class GrammarMasks:
    """The outputs of all slots. Used by one thread, beside its own."""

    def __init__(self, vocab_size: int, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self.stats = MaskStats()
        self._words = -(-vocab_size // 32)
        self._outputs: dict[int, ConstrainedOutput] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._typical = 0.0
        """Seconds of a mask on a processor, in the last step."""

    def init(self, init: SlotInit) -> None:
        if init.grammar is None:
            self._outputs.pop(init.slot, None)
        else:
            self._outputs[init.slot] = ConstrainedOutput(init, tokens=list(init.output))

    def constrained(self, slots: Iterable[int]) -> list[int]:
        """Indices of the slots that have a grammar."""
        if not self._outputs:
            return []
        return [row for row, slot in enumerate(slots) if slot in self._outputs]

    def ready(self, slots: Sequence[int], rows: Iterable[int]) -> bool:
        """Whether all tokens before the next are known."""
        return not any(self._outputs[slots[row]].unread for row in rows)

    def begin(
        self, slots: Sequence[int], rows: list[int], forbidden: Mapping[int, Sequence[int]]
    ) -> Future[Masks]:
        """Begins what `compute` does, in another thread if that may take long."""
        if self._typical < CHEAP_SECONDS:
            done: Future[Masks] = Future()
            done.set_result(self.compute(slots, rows, forbidden))
            return done
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
        return self._thread.submit(self._compute, slots, rows, forbidden)

    def wait(self, masks: Future[Masks]) -> Masks:
        began = time.perf_counter()
        result = masks.result()
        self.stats.waited += time.perf_counter() - began
        return result

    def compute(self, slots: Sequence[int], rows: list[int], forbidden: Mapping[int, Sequence[int]]) -> Masks:
        """The masks of the slots at `rows`, which are ready. forbidden: by row, tokens that are not allowed
        either, unless the output can go on with nothing else."""
        began = time.perf_counter()
        result = self._compute(slots, rows, forbidden)
        self.stats.waited += time.perf_counter() - began
        return result

    def _compute(
        self, slots: Sequence[int], rows: list[int], forbidden: Mapping[int, Sequence[int]]
    ) -> Masks:
        outputs = [self._outputs[slots[row]] for row in rows]
        began, cpu_began = time.perf_counter(), time.thread_time()
        host = torch.empty(len(rows), self._words, dtype=torch.int32, pin_memory=self._pinned)
        words = host.numpy()
        errors = _fill(outputs, words)
        for index in errors:
            words[index] = -1
        for row, tokens in forbidden.items():
            if (index := rows.index(row)) not in errors:
                _forbid(words[index], tokens)
        self._typical = (time.thread_time() - cpu_began) / len(rows)
        self.stats.masks += len(rows)
        self.stats.seconds += time.perf_counter() - began
        message = "the grammar cannot be followed any further: {}"
        return Masks(
            rows, outputs, host, {rows[index]: message.format(error) for index, error in errors.items()}
        )


def _fill(outputs: Sequence[ConstrainedOutput], words: Words) -> dict[int, GrammarError]:
    """Why rows could not be filled."""
    matchers: list[Matcher] = []
    tokens: list[list[int]] = []
    for output in outputs:
        if output.matcher is None:
            assert output.init.grammar is not None
            output.matcher = output.init.grammar.matcher()
        matchers.append(output.matcher)
        tokens.append(output.tokens)
        output.tokens = []
    # All are of one library.
    return type(matchers[0]).fill_all(matchers, tokens, words)


def _forbid(words: Words, tokens: Sequence[int]) -> None:
    ids = np.array(tokens, np.int64)
    less = words.copy()
    np.bitwise_and.at(less, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)).view(np.int32))
    if less.any():
        words[:] = less
