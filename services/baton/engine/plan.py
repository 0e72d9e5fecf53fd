"""The scheduler's plan of one step, and the runner's results.

A plan is plain data (integers, tuples, dataclasses): it can be serialized and executed by followers on other
devices. A step is a ragged batch: decode rows (one token) and prompt chunks (many) side by side, in the order
of `rows`. Plans are never changed. Per-row classes are nevertheless not frozen: a frozen dataclass takes
almost a microsecond more to make, several times for each of hundreds of rows.

Batch slots. A *slot* (0 <= slot < max_slots) is an index into the runner's persistent device buffers: the
last token sampled for it, and the state that sampling needs (penalty counts). `SlotInit` prepares a slot;
until then its contents are undefined. A row whose `tokens` is None reads its one input token from its slot,
so that step N+1 can be launched before step N's tokens have been read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from baton.engine.sampling_params import SamplingParams
from baton.grammar.base import CompiledGrammar
from baton.step_cost import StepLoad, chunk_pairs

if TYPE_CHECKING:
    import torch

    from baton.engine.image_spans import ImageSpan

Vector = npt.NDArray[np.float32]


class Pooling(Enum):
    """Which of a prompt's final hidden states its embedding is made of."""

    LAST = auto()
    """The last token's."""
    MEAN = auto()
    """The mean of all."""


@dataclass(frozen=True, slots=True)
class SlotInit:
    """Bind a slot to a sequence, from its token log alone. Executed before the step's rows."""

    slot: int
    params: SamplingParams
    seed: int
    """This choice's own seed, 0 <= seed < 2**64."""
    prompt: tuple[int, ...]
    """Prompt tokens; may be empty when `params.penalized` is false."""
    output: tuple[int, ...]
    """Tokens sampled so far; likewise."""
    last_token: int | None = None
    """The slot's last token, if the next row reads it from the slot."""
    grammar: CompiledGrammar | None = None
    """params.grammar, compiled. The only part that is no plain data: to be serialized as params.grammar."""


@dataclass(slots=True)
class PlanRow:
    """A run of consecutive tokens of one sequence.

    The runner writes the KV of tokens at positions start .. start + count - 1 and attends causally to
    positions 0 .. start + count - 1. In each KV group `table[p // page_size]` holds position p.
    """

    slot: int
    tokens: Sequence[int] | None
    """Input token ids; None: the slot's last token, and `drafts`."""
    start: int
    """Position of the first input token, at least: see `ahead`."""
    tables: tuple[tuple[int, ...], ...]
    """The page table of each KV group, long enough for start + count tokens; may be longer. NO_PAGE (-1)
    stands for pages that this row does not see."""
    sample: tuple[int, ...] = ()
    """Slots that each sample a next token from the last position's logits, with the parameters and seed they
    were initialized with. One for a decode row or a prompt's last chunk, n for n choices, none otherwise.
    The sampled token's position is start + count; it becomes its slot's last token and, for penalties, part
    of its slot's output."""
    prompt_logprobs: tuple[int, ...] | None = None
    """Only in a prompt chunk: the token that follows each of this row's positions (one less where the
    prompt ends). The log-probability of each under its position's logits is wanted."""
    prompt_top: int = 0
    """How many most likely tokens to report beside each prompt token."""
    pooling: Pooling | None = None
    """Only in a prompt chunk of an embedding, which samples nothing: the row's last final hidden state, or
    the sum of all, is wanted."""
    drafts: tuple[int, ...] = ()
    """Only behind the slot's last token: guesses of the tokens that follow it. The row samples at each of its
    positions, and keeps what it samples up to the first token that is not the guess. -1 - n: entry n of what
    a drafter has begun behind the step before, which only the device knows; then so are all of the row's."""
    replay: int = 0
    """Where layers keep states: how many drafts of the slot's row before were right. They are part of `start`
    and not yet of the states, which now take them in."""
    ahead: int = 0
    """Drafts of the slot's row in the step before, if nobody knew yet which of them are right. For each that
    is, the row starts one position later, and its drafts begin one later in `drafts`, which has so many more
    than the row."""
    hidden_layers: tuple[int, ...] = ()
    """Layers whose hidden states of the row are wanted: HiddenTap.layers. Of several ranks only the first
    knows."""
    images: tuple[ImageSpan, ...] = ()
    """All of the sequence's images; their contents are not plain data."""

    @property
    def count(self) -> int:
        if self.tokens is not None:
            return len(self.tokens)
        return 1 + max(0, len(self.drafts) - self.ahead) if self.drafts else 1

    @property
    def longest(self) -> int:
        """Tokens of the sequence up to the row's last one, at most."""
        return self.start + self.ahead + self.count

    def settled(self, right: int, guesses: Sequence[int] = ()) -> PlanRow:
        """The row, once so many drafts of the slot's row before were right. `guesses`: the device's."""
        if self.drafts and self.drafts[0] < 0:
            return replace(self, drafts=tuple(guesses[-1 - draft] for draft in self.drafts))
        if not self.ahead:
            return self
        drafts = self.drafts[right : right + self.count - 1]
        return replace(self, start=self.start + right, drafts=drafts, ahead=0)


def step_load(rows: Iterable[PlanRow]) -> StepLoad:
    """The rows' load, for StepCost.seconds."""
    decode = context = prefill = pairs = 0
    for row in rows:
        if row.tokens is None:
            decode += row.count
            context += row.count * (row.start + 1)
        else:
            prefill += row.count
            pairs += chunk_pairs(row.start, row.count)
    return StepLoad(decode, context, prefill, pairs)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Order of execution: copies, slot inits, then the forward pass over all rows."""

    number: int
    """Counts the steps of one engine, from 1."""
    rows: tuple[PlanRow, ...]
    inits: tuple[SlotInit, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    """(source page, destination page): whole pages copied inside the pool."""

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """At one position: log-probability of a token, and the most likely tokens, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class RowResult:
    """A row's results."""

    tokens: tuple[int, ...] = ()
    """Sampled for the slots in `PlanRow.sample`, in order; with drafts, those kept of the one slot: at least
    one, at most one more than there are drafts."""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    error: str | None = None
    """Why the row has no tokens, or no more, e.g. logits that are not numbers."""
    reason: str = "BAD_LOGITS"
    """The error's machine-readable form."""
    failed_at: int = 0
    """With an error: so many tokens came before it."""
    logprobs: tuple[Logprobs | None, ...] = ()
    """Log-probabilities of each token under the unmodified logits, where params.logprobs is not None;
    empty: of none."""
    pooled: Vector | None = None
    """float32 [hidden], where PlanRow.pooling is set."""
    hidden: torch.Tensor | None = None
    """[tokens, values], of a runner that a drafter reads hidden states from, and of rows with `hidden_layers`
    where the runner can: of each token whose keys and values the row has made final."""

    def sampled(self) -> list[tuple[int, Logprobs | None]]:
        """Each token with its log-probabilities."""
        return list(zip(self.tokens, self.logprobs or (None,) * len(self.tokens), strict=True))


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a plan's rows, in their order."""

    number: int
    rows: tuple[RowResult, ...] = field(default=())
    encode_seconds: float = 0.0
    """In which images of the step were encoded."""


F = TypeVar("F")


class Runner(Protocol[F]):
    """Executes plans in the order of their launch. Used by one thread.

    `launch` enqueues and returns; `read` waits for the step and returns its tokens; `done` says whether
    `read` would return at once. A caller may launch step N+1 before it reads step N. On a CPU `launch` does
    all the work.
    """

    max_slots: int
    vocab_size: int

    def launch(self, plan: StepPlan) -> F:
        """F is the runner's record of a launched step."""
        ...

    def done(self, launched: F) -> bool: ...

    def read(self, launched: F) -> StepResult: ...
