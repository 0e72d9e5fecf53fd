"""Chooses next tokens for all sampled slots of a step at once.

Order, as in Hugging Face transformers and vLLM: repetition, frequency and presence penalties, logit bias,
min_tokens (stop tokens are forbidden) and grammars change the logits; greedy sequences take the maximum of
these; the others divide by the temperature, then top-k, top-p and min-p restrict, then a token is drawn.
Tokens that tie with the last one that top-k or top-p keep are kept too. Log-probabilities are of the
unmodified logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from baton.engine.grammar_masks import GrammarMasks, Masks
from baton.engine.plan import Logprobs, PlanRow, RowResult, SlotInit
from baton.engine.sampler_ops import draw, penalize, row_keys, thresholds
from baton.engine.sampler_state import SlotStates
from baton.layers.async_copy import to_device, to_host

SlotIds = npt.NDArray[np.int64]


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at some positions, on the device."""

    tokens: torch.Tensor
    """int64 [positions]"""
    chosen: torch.Tensor
    """float32 [positions]"""
    top_tokens: torch.Tensor
    """int64 [positions, k]"""
    top: torch.Tensor
    """float32 [positions, k], best first"""

    def to_host(self) -> TokenLogprobs:
        """In pinned memory, valid once all that is enqueued now has run."""
        return TokenLogprobs(*map(to_host, (self.tokens, self.chosen, self.top_tokens, self.top)))

    def read(self, counts: Sequence[int]) -> list[Logprobs]:
        """Copies them to the host; `counts`: how many of the k each position requested."""
        chosen, tokens = self.chosen.tolist(), self.tokens.tolist()
        top_tokens, top = self.top_tokens.tolist(), self.top.tolist()
        return [
            Logprobs(tokens[i], chosen[i], tuple(zip(top_tokens[i][:k], top[i][:k], strict=True)))
            for i, k in enumerate(counts)
        ]


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> TokenLogprobs:
    """Log-probabilities of `tokens` [positions] and of the `top` most likely tokens under float32 logits
    [positions, vocab]. Those of a position do not depend on how many others there are: a row at a time is
    summed, unlike by logsumexp."""
    vocab = logits.shape[1]
    _, indices = logits.topk(min(top, vocab), dim=-1)
    if vocab % 4:  # rows that begin elsewhere in 16 bytes are summed in another order
        logits = functional.pad(logits, (0, -vocab % 4), value=-torch.inf)
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    return TokenLogprobs(tokens, chosen, indices, logprobs.gather(1, indices))


_LOGITS_ROWS = 64
"""Prompt log-probabilities are computed for this many positions at a time, to bound their memory."""


def prompt_logprobs(
    project: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, row: PlanRow, leads: bool = True
) -> list[TokenLogprobs]:
    """Enqueues the row's log-probabilities. `hidden`: its states, [tokens, hidden]; `project` computes
    logits from them; `leads`: on this rank, which is not one that only takes part."""
    assert row.prompt_logprobs is not None
    targets = to_device(np.array(row.prompt_logprobs, np.int64), hidden.device)
    found = []
    for states, counts in zip(
        torch.split(hidden[: len(targets)], _LOGITS_ROWS), torch.split(targets, _LOGITS_ROWS), strict=True
    ):
        logits = project(states)
        if leads:
            found.append(token_logprobs(logits.float(), counts, row.prompt_top).to_host())
    return found


@dataclass(slots=True)
class Samples:
    """Results of the sampled slots, in their order, on the device."""

    tokens: torch.Tensor
    """int64 [slots]"""
    peaks: torch.Tensor
    """float32 [slots]: the largest logit; not finite where the logits were garbage."""
    logprob_rows: list[int] = field(default_factory=list)
    """Indices of the slots that want log-probabilities."""
    logprobs: TokenLogprobs | None = None
    logprob_counts: tuple[int, ...] = ()
    errors: dict[int, str] = field(default_factory=dict)
    """Slots whose grammar could not be followed, and why; their tokens mean nothing."""

    def read(self) -> tuple[list[int], list[bool]]:
        """Tokens, and whether their logits were finite."""
        return self.tokens.tolist(), self.peaks.isfinite().tolist()


@dataclass(slots=True)
class KernelSamples:
    """Samples that kernels make; read once a step by a host that the next one waits for."""

    result: torch.Tensor
    """int32 [slots, 2]: the token, and the bits of the largest logit."""
    logprob_rows: Sequence[int] = ()
    logprobs: TokenLogprobs | None = None
    logprob_counts: tuple[int, ...] = ()
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def tokens(self) -> torch.Tensor:
        return self.result[:, 0]

    @property
    def peaks(self) -> torch.Tensor:
        return self.result[:, 1].view(torch.float32)

    def to_host(self) -> KernelSamples:
        """In pinned memory, valid once all that is enqueued now has run."""
        self.result = to_host(self.result)
        if self.logprobs is not None:
            self.logprobs = self.logprobs.to_host()
        return self

    def read(self) -> tuple[list[int], list[bool]]:
        """What `Samples.read` gives, once it is on the host."""
        result = self.result.numpy()
        return result[:, 0].tolist(), np.isfinite(result[:, 1].view(np.float32)).tolist()


class Sampler:
    """Parameters and state of every batch slot. Used by one thread."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._states = SlotStates(max_slots, vocab_size, device)
        self.grammars = GrammarMasks(vocab_size)

    def init(self, init: SlotInit) -> None:
        self._states.init(init)
        self.grammars.init(init)

    def begin_masks(self, slots: Sequence[int]) -> Future[Masks] | None:
        """Begins to compute the masks for `sample` of the same slots; None: no slot has a grammar."""
        rows = self.grammars.constrained(slots)
        if not rows:
            return None
        return self.grammars.begin(slots, rows, forbidden_ends(self._states, slots, rows))

    def sample(
        self,
        logits: torch.Tensor,
        slots: SlotIds,
        positions: npt.NDArray[np.int64],
        pending: Future[Masks] | None = None,
    ) -> Samples:
        """Chooses a token for each slot.

        logits: float32 [slots, vocab], which this modifies; positions [slots]: that of the token being
        sampled; pending: of `begin_masks`.
        """
        states = self._states
        masks = self.grammars.wait(pending) if pending is not None else None
        if (states.temperature[slots] > 0).all():
            # Much faster than with the maxima's indices, which nobody needs here.
            peaks, tokens = logits.amax(-1), torch.empty(len(slots), dtype=torch.int64, device=self._device)
        else:
            peaks, tokens = logits.max(-1)
        waiting = states.output_length[slots] < states.min_tokens[slots]
        special = (~states.plain[slots] | waiting).nonzero()[0]
        result = Samples(tokens, peaks)
        if special.size:
            self._special(logits, slots, positions, special, result, masks)
        states.advance(slots, result.tokens)
        if masks is not None:
            result.errors = masks.errors
            masks.launched()
            masks.sampled(result.tokens[self._to_device(np.array(masks.rows))].tolist())
        return result

    def _special(
        self,
        logits: torch.Tensor,
        slots: SlotIds,
        positions: SlotIds,
        special: SlotIds,
        result: Samples,
        masks: Masks | None,
    ) -> None:
        """Samples the entries `special` of `slots`, which are not plain greedy."""
        states = self._states
        every = special.size == slots.size
        where = self._to_device(special)
        changed = logits if every else logits[where]
        special_slots = slots[special]
        logprob_at = (states.logprobs[special_slots] >= 0).nonzero()[0]
        unmodified = changed[self._to_device(logprob_at)]
        masked = np.searchsorted(special, masks.rows) if masks is not None else np.zeros(0, np.int64)
        modified = self._modify(changed, special_slots, masked)
        if masks is not None:
            masks.apply(changed, masked.tolist())
        drawn = states.temperature[special_slots] > 0
        random, greedy = drawn.nonzero()[0], (~drawn).nonzero()[0]
        tokens = result.tokens if every else result.tokens[where]
        if (modified or masked.size) and greedy.size:
            rows = self._to_device(greedy)
            tokens = tokens.index_copy(0, rows, changed[rows].argmax(-1))
        if random.size:
            rows = self._to_device(random)
            chosen_from = changed if random.size == special_slots.size else changed[rows]
            tokens = tokens.index_copy(
                0, rows, self._draw(chosen_from, special_slots[random], positions[special][random])
            )
        result.tokens = tokens if every else result.tokens.index_copy(0, where, tokens)
        if logprob_at.size:
            rows = self._to_device(logprob_at)
            result.logprob_counts = tuple(states.logprobs[special_slots[logprob_at]].tolist())
            result.logprob_rows = special[logprob_at].tolist()
            result.logprobs = token_logprobs(unmodified, tokens[rows], max(result.logprob_counts))

    def _modify(self, logits: torch.Tensor, slots: SlotIds, masked: SlotIds) -> bool:
        """Applies penalties, bias and min_tokens, in place; says whether there were any. In the rows `masked`
        masks say what min_tokens forbids."""
        states = self._states
        waiting = states.output_length[slots] < states.min_tokens[slots]
        waiting[masked] = False
        penalized = states.penalized[slots].nonzero()[0]
        biased = states.biased[slots].nonzero()[0]
        if penalized.size:
            rows, penalized_slots = self._to_device(penalized), slots[penalized]
            part = logits[rows]
            at = self._to_device(penalized_slots)
            penalize(
                part,
                states.counts[at],
                states.prompt[at],
                self._to_device(states.repetition[penalized_slots]),
                self._to_device(states.presence[penalized_slots]),
                self._to_device(states.frequency[penalized_slots]),
            )
            logits.index_copy_(0, rows, part)
        for row in biased.tolist():
            ids, values = states.bias[slots[row]]
            at = self._to_device(np.array(ids))
            logits[row, at] += self._to_device(np.array(values, np.float32))
        for row in waiting.nonzero()[0].tolist():
            logits[row].index_fill_(0, self._to_device(np.array(states.stop_tokens[slots[row]])), -torch.inf)
        return bool(waiting.any() or penalized.size or biased.size)

    def _draw(self, logits: torch.Tensor, slots: SlotIds, positions: SlotIds) -> torch.Tensor:
        states = self._states
        # Avoids 0 / 0: a temperature so small that float32 cannot hold the quotient counts as greedy.
        logits = logits - logits.amax(-1, keepdim=True)
        logits = logits / self._to_device(states.temperature[slots])[:, None]
        top_k, top_p, min_p = states.top_k[slots], states.top_p[slots], states.min_p[slots]
        restricted = ((top_k > 0) | (top_p < 1)).nonzero()[0]
        # Relative to the most likely token, whose logit is 0 here.
        floor = self._to_device(min_p).log() if restricted.size or min_p.any() else None
        if floor is not None and restricted.size:
            rows = self._to_device(restricted)
            k, p = top_k[restricted], top_p[restricted]
            on_host = self._device.type == "cpu"
            bounded = bool((k > 0).all()) and (on_host or not (p < 1).any())
            kept = thresholds(
                logits[rows], self._to_device(k), self._to_device(p), int(k.max()) if bounded else 0
            )
            floor[rows] = torch.maximum(floor[rows], kept)
        keys = self._to_device(row_keys(states.seed[slots], positions.astype(np.uint64)))
        return draw(logits, floor, keys)

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, self._device)


def forbidden_ends(states: SlotStates, slots: Sequence[int], rows: Sequence[int]) -> dict[int, list[int]]:
    """By row of the slots: the tokens that min_tokens forbids there."""
    waiting = [row for row in rows if states.output_length[slots[row]] < states.min_tokens[slots[row]]]
    return {row: states.stop_tokens[slots[row]] for row in waiting}


@dataclass(slots=True)
class KeptToken:
    """Sampled behind a draft that was right."""

    token: int
    logprobs: Logprobs | None
    finite: bool
    """Whether its logits were."""
    error: str
    """Error of the row's grammar; empty: none."""


BAD_LOGITS = "the model's logits are not finite: its weights or its KV are damaged"


def row_results(
    rows: Sequence[PlanRow],
    tokens: Sequence[int],
    finite: Sequence[bool],
    logprobs: Mapping[int, Logprobs],
    prompts: Mapping[int, Sequence[TokenLogprobs]],
    errors: Mapping[int, str],
    kept: Mapping[int, Sequence[KeptToken]],
) -> tuple[RowResult, ...]:
    """`tokens`, `finite` (whether the logits were numbers) and the keys of `logprobs`, `errors` (of grammars)
    and `kept` (what follows a token) count the rows' sampled slots, in order; `prompts` holds prompt
    log-probabilities by the row's index."""
    if (
        not logprobs
        and not kept
        and not prompts
        and not errors
        and all(finite)
        and all(len(row.sample) == 1 for row in rows)
    ):
        return tuple(RowResult((token,)) for token in tokens)
    results: list[RowResult] = []
    first = 0
    for i, row in enumerate(rows):
        last = first + len(row.sample)
        prompt = tuple(
            entry for part in prompts.get(i, ()) for entry in part.read([row.prompt_top] * len(part.tokens))
        )
        row_logprobs = tuple(map(logprobs.get, range(first, last))) if logprobs else ()
        error = None if all(finite[first:last]) else BAD_LOGITS
        result = RowResult(tuple(tokens[first:last]), prompt, error, logprobs=row_logprobs)
        failed = [errors[slot] for slot in range(first, last) if slot in errors]
        if failed and error is None:
            result.error, result.reason = failed[0], "GRAMMAR_FAILED"
        if row.drafts and result.error is None:
            _add_kept(result, kept.get(first, ()))
        results.append(result)
        first = last
    return tuple(results)


def _add_kept(result: RowResult, kept: Sequence[KeptToken]) -> None:
    """What the row sampled behind right drafts, up to the first position that failed."""
    for at, each in enumerate(kept):
        if not each.finite or each.error:
            result.error, result.failed_at = BAD_LOGITS, 1 + at
            if each.finite:
                result.error, result.reason = each.error, "GRAMMAR_FAILED"
            kept = kept[:at]
            break
    result.tokens += tuple(each.token for each in kept)
    if result.logprobs:
        result.logprobs += tuple(each.logprobs for each in kept)
