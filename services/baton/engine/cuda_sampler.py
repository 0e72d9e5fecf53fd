"""Sampling on a GPU: prepares the inputs of the kernels in `layers.kernels` for each sampled slot.

Computes the same function as `engine.sampler.Sampler` in a few launches, without sorting and without waiting
for the device. Rounding differs: with top-p, a token whose cumulative mass is within about 1e-6 of p may be
kept by one and dropped by the other, and noise may differ in its last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.grammar_masks import GrammarMasks, Masks
from baton.engine.plan import SlotInit
from baton.engine.sampler import KernelSamples, SlotIds, forbidden_ends, token_logprobs
from baton.engine.sampler_ops import position_keys, row_keys, seed_keys
from baton.engine.sampler_state import SlotStates
from baton.layers.async_copy import Upload, to_device

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Edits:
    """Changes to rows' logits before sampling, besides penalties."""

    rows: Ints
    """Rows that change, penalized and masked ones included."""
    row_index: npt.NDArray[np.int32]
    """For every row: its index in `rows`, or -1."""
    at: Ints
    """Entries of a [len(rows), vocab] copy, flattened; none twice."""
    added: Floats
    """Added to them: a bias, or -inf for tokens that min_tokens forbids."""


def edits(states: SlotStates, slots: SlotIds, masked: Sequence[int] = ()) -> Edits:
    """Edits of the sampled slots, in their order. In the rows `masked`, masks say what min_tokens
    forbids."""
    waiting = states.output_length[slots] < states.min_tokens[slots]
    constrained = np.zeros(len(slots), np.bool_)
    constrained[list(masked)] = True
    waiting &= ~constrained
    rows = (states.penalized[slots] | states.biased[slots] | waiting | constrained).nonzero()[0]
    row_index = np.full(len(slots), -1, np.int32)
    row_index[rows] = np.arange(len(rows))
    at: list[int] = []
    added: list[float] = []
    for row in rows[states.biased[slots[rows]] | waiting[rows]].tolist():
        slot, first = slots[row], int(row_index[row]) * states.vocab_size
        changes = dict(zip(*states.bias[slot], strict=True))
        if waiting[row]:
            changes |= dict.fromkeys(states.stop_tokens[slot], -np.inf)
        at += [first + token for token in changes]
        added += changes.values()
    return Edits(rows, row_index, np.array(at, np.int64), np.array(added, np.float32))


class CudaSampler:
    """Parameters and state of every batch slot. Used by one thread."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._states = SlotStates(max_slots, vocab_size, device)
        self.grammars = GrammarMasks(vocab_size, pinned=device.type == "cuda")

    def init(self, init: SlotInit) -> None:
        self._states.init(init)
        self.grammars.init(init)

    def masks(self, slots: Sequence[int], rows: list[int]) -> Masks:
        """The masks of the slots at `rows`, for `sample` of the same slots. The device runs the forward pass
        meanwhile."""
        return self.grammars.compute(slots, rows, forbidden_ends(self._states, slots, rows))

    def simple(self, slots: SlotIds, positions: Ints) -> tuple[Floats, Ints] | None:
        """Temperatures (0: greedy) and generator states [slots] if these, and masks, are all that the slots'
        sampling depends on, for the caller to sample by; None, and nothing changed, if it takes more."""
        states = self._states
        if not self._is_simple(slots):
            return None
        return states.temperature[slots], row_keys(states.seed[slots], positions.astype(np.uint64))

    def simple_chains(self, slots: SlotIds, depths: Ints) -> tuple[Floats, Ints] | None:
        """`simple` for slots that each sample at so many positions, which the device knows: temperatures and
        `seed_keys` of each."""
        if not self._is_simple(slots):
            return None
        states, slots = self._states, slots.repeat(depths)
        return states.temperature[slots], seed_keys(states.seed[slots])

    def _is_simple(self, slots: SlotIds) -> bool:
        """If so, counts the tokens to be sampled."""
        states = self._states
        if not states.simple[slots].all() or (states.output_length[slots] < states.min_tokens[slots]).any():
            return False
        states.output_length[slots] += 1
        return True

    def sample_simple(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        temperatures: torch.Tensor,
        keys: torch.Tensor,
        last_token: torch.Tensor,
        masks: Masks | None = None,
    ) -> KernelSamples:
        """`sample` of slots (int32 [slots]) whose sampling depends on what `simple` gave and on masks alone.
        All of it is on the device."""
        from baton.layers.kernels.sampling import sample

        result = torch.empty(len(slots), 2, dtype=torch.int32, device=self._device)
        allowed = None
        if masks is not None:
            allowed = masks.on(self._device), to_device(masks.row_index(len(slots)), self._device)
        sample(logits, temperatures, keys, slots, last_token, result, masks=allowed)
        return KernelSamples(result)

    def sample(
        self,
        logits: torch.Tensor,
        slots: SlotIds,
        positions: Ints | torch.Tensor,
        last_token: torch.Tensor,
        masks: Masks | None = None,
        kept: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> KernelSamples:
        """Chooses a token for each slot, into `last_token` (int32) at the slot; none occurs twice.

        logits: [slots, vocab], unmodified; positions [slots]: that of the token being sampled, on the host
        or on the device; masks: of the slots that have a grammar. kept: behind drafts, on the device, which
        of the tokens count (bool [slots]), and the slots (int32), or that of padding.
        """
        from baton.layers.kernels.penalties import penalize
        from baton.layers.kernels.sampling import Special, sample

        states = self._states
        change = edits(states, slots, masks.rows if masks is not None else ())
        row_slots = slots[change.rows]
        penalized = states.penalized[slots]
        top_k, top_p = states.top_k[slots], states.top_p[slots]
        random = states.temperature[slots] > 0
        upload = Upload()
        seeds = states.seed[slots]
        if isinstance(positions, torch.Tensor):
            keys_there = seed_keys(seeds)
        else:
            keys_there = row_keys(seeds, positions.astype(np.uint64))
        masked = masks.row_index(len(slots)) if masks is not None else np.zeros(0, np.int32)
        for array in (
            states.temperature[slots],
            keys_there,
            slots.astype(np.int32),
            change.row_index,
            change.rows,
            np.minimum(top_k, states.vocab_size).astype(np.int32),
            top_p,
            # By torch, as where there is no GPU.
            -torch.from_numpy(states.min_p[slots]).log().numpy(),
            np.where(penalized, slots, -1).astype(np.int32),
            states.repetition[row_slots],
            states.presence[row_slots],
            states.frequency[row_slots],
            change.at,
            change.added,
            masked,
        ):
            upload.add(array)
        (
            temperatures,
            keys,
            slots_there,
            row_index,
            rows,
            top_k_there,
            top_p_there,
            limits,
            counted,
            repetition,
            presence,
            frequency,
            at,
            added,
            masked_there,
        ) = upload.send(self._device)
        if isinstance(positions, torch.Tensor):
            keys = position_keys(keys, positions)
        if kept is not None:
            slots_there, counted = kept[1], torch.where(kept[0], counted, -1)
        counts = states.counts if penalized.any() else None
        changed = torch.empty(0, logits.shape[1], device=self._device)
        if len(change.rows):
            words = masks.on(self._device) if masks is not None else None
            changed = penalize(
                logits,
                rows,
                counted,
                counts,
                states.prompt,
                repetition,
                presence,
                frequency,
                words,
                masked_there,
            )
            if len(change.at):
                changed.view(-1).index_add_(0, at, added)
        result = torch.empty(len(slots), 2, dtype=torch.int32, device=self._device)
        special = Special(
            changed=changed,
            row_index=row_index,
            changed_rows=rows,
            restricted=bool((random & ((top_k > 0) | (top_p < 1))).any()),
            top_k=top_k_there,
            top_p=top_p_there,
            limits=limits,
            counted=counted,
            counts=counts,
        )
        sample(logits, temperatures, keys, slots_there, last_token, result, special)
        if kept is None:
            states.output_length[slots] += 1
        return self._report(logits, slots, result)

    def advance(self, slots: Ints, counts: npt.NDArray[np.int32]) -> None:
        """So many tokens behind drafts were kept for each slot."""
        self._states.output_length[slots] += counts

    def _report(self, logits: torch.Tensor, slots: SlotIds, result: torch.Tensor) -> KernelSamples:
        samples = KernelSamples(result)
        logprob_at = (self._states.logprobs[slots] >= 0).nonzero()[0]
        if logprob_at.size:
            rows = to_device(logprob_at, self._device)
            samples.logprob_counts = tuple(self._states.logprobs[slots[logprob_at]].tolist())
            samples.logprob_rows = logprob_at.tolist()
            samples.logprobs = token_logprobs(
                logits.index_select(0, rows).float(), result[:, 0][rows].long(), max(samples.logprob_counts)
            )
        return samples
