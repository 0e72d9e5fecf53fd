"""What CUDA graphs capture of a step: the forward pass up to the logits, and sampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton.attention.base import AttentionRows
from baton.attention.step import ModelAttention
from baton.engine.chunk_graphs import ChunkInputs
from baton.engine.device_slots import DeviceSlots
from baton.engine.launched_step import Chains
from baton.engine.step_graphs import Inputs
from baton.engine.step_sampling import StepSampling
from baton.layers.batch import Batch, HiddenTap, LayerCache, StateCache, StateRows
from baton.models.body import Body


def final_states(body: Body, batch: Batch) -> torch.Tensor:
    """Final hidden states [wanted tokens, hidden], with kernels no numbers where values were none."""
    hidden = body.forward(batch)
    if not batch.caches:
        return hidden
    assert batch.slots is not None and batch.nan_flags is not None
    return hidden.add_(batch.nan_flags.index_select(0, batch.chosen(batch.slots))[:, None])


class CapturedWork:
    """What one runner's graphs capture. Works on buffers that each replay finds filled."""

    def __init__(
        self,
        body: Body,
        slots: DeviceSlots,
        caches: Sequence[LayerCache | StateCache],
        attention: ModelAttention,
        sampling: StepSampling,
        tap: tuple[int, ...] = (),
        tapped: torch.Tensor | None = None,
        shifted: bool = False,
        one_by_one: bool = False,
    ) -> None:
        """`tap`: see `HiddenTap.layers`; `tapped` [tokens, values]: a buffer for those hidden states of the
        largest step's tokens. `shifted`: images shift the rotation of what follows them; `one_by_one`: see
        `StateRows`."""
        self._shifted, self._one_by_one = shifted, one_by_one
        self._tap, self._tapped = tap, tapped
        self._body, self._slots, self._caches = body, slots, caches
        self._attention, self._sampling = attention, sampling

    def decode(self, inputs: Inputs) -> None:
        """A decode step up to its logits."""
        slots = self._slots
        count, attending = len(inputs.slots), len(self._attention.pool.groups)
        tables = slots.tables[:, :attending].index_select(0, inputs.slots).unbind(1)
        rows = AttentionRows(None, 0, count, tables, inputs.positions + 1)
        attention = self._attention.over(rows)
        tokens = slots.last_token.index_select(0, inputs.slots)
        where = self._caches, inputs.slots, slots.nan_flags
        states = _one_by_one(count, tokens.device) if self._one_by_one else StateRows(count)
        batch = Batch(tokens, inputs.positions, attention, *where, few=True, states=states)
        batch.turns = inputs.positions + inputs.shifts if self._shifted else None
        self._logits(batch, inputs.logits)

    def _logits(self, batch: Batch, out: torch.Tensor) -> None:
        batch.tap = HiddenTap(self._tap) if self._tapped is not None else None
        hidden = final_states(self._body, batch)
        if batch.tap is not None and self._tapped is not None:
            found = [batch.tap.found[layer] for layer in self._tap]
            torch.cat(found, -1, out=self._tapped[: len(batch.tokens)])
        self._body.logits(hidden, out)

    def sample_plain(self, inputs: Inputs) -> None:
        """Sampling after it with a temperature only."""
        from baton.layers.kernels.sampling import sample

        last = self._slots.last_token
        sample(inputs.logits, inputs.temperatures, inputs.keys, inputs.slots, last, inputs.result)

    def sample_masked(self, inputs: Inputs) -> None:
        """Samples under grammar masks."""
        from baton.layers.kernels.sampling import sample

        sample(
            inputs.logits,
            inputs.temperatures,
            inputs.keys,
            inputs.slots,
            self._slots.last_token,
            inputs.result,
            masks=(inputs.words, inputs.masked),
        )

    def small(self, inputs: ChunkInputs) -> None:
        """A small step up to its logits."""
        slots, count = self._slots, len(inputs.ids)
        tables = slots.tables.index_select(0, inputs.row_slots).unbind(1)
        longest = inputs.shape.longest
        rows = AttentionRows(None, 0, count, tables, inputs.lengths, inputs.starts, longest)
        if len(inputs.drafts):
            lanes = inputs.ids, inputs.positions, inputs.lengths, inputs.token_slots, inputs.row_slots
            slots.settle(*lanes, inputs.drafts)
            tokens = inputs.ids
        else:
            tokens = slots.tokens(inputs.ids, inputs.token_slots)
        attention = self._attention.over(rows)
        where = self._caches, inputs.token_slots, slots.nan_flags
        few = inputs.shape.few
        batch = Batch(
            tokens, inputs.positions, attention, *where, logits_indices=inputs.logits_indices, few=few
        )
        batch.turns = inputs.positions + inputs.shifts if self._shifted else None
        self._logits(batch, inputs.logits)

    def sample_drafts(self, inputs: ChunkInputs) -> None:
        """Sampling after it with a temperature only."""
        logits_indices = inputs.logits_indices
        depths = np.array([inputs.shape.longest])
        where = inputs.ids.index_select(0, logits_indices), inputs.positions.index_select(0, logits_indices)
        chain_arguments = inputs.slots, inputs.firsts, inputs.depths
        chains = Chains(depths, *where)
        simple = inputs.temperatures, inputs.seeds
        out = inputs.result, inputs.right
        self._sampling.choose_chains(inputs.logits, chains, *simple, *chain_arguments, out)


def _one_by_one(count: int, device: torch.device) -> StateRows:
    """Rows of one token in pieces."""
    first = torch.arange(count + 1, dtype=torch.int32, device=device)
    pages, one = first[:-1], torch.ones(count, dtype=torch.int32, device=device)
    return StateRows(0, torch.stack((pages, one, pages, one), 1), first, one_by_one=True)
