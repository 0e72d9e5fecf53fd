"""Base of layers that remember a sequence in a state instead of in keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from baton.layers.attention import NONE, AttentionOptions
from baton.layers.batch import Batch, StateRows, StateRun
from baton.layers.cache_spec import State
from baton.layers.linear import Linear
from baton.layers.tensor_parallel import TensorSlice

_Parts = tuple[int, Sequence[torch.Tensor]]
"""An axis, and the parts of a tensor of all pages, [pages, ...], that lie side by side along it."""


class RecurrentModule(ABC):
    """A projection, a recurrence over the states in the pool, output projection."""

    index: int
    """Index of the layer."""
    cache: State
    input: Linear
    output: Linear
    options: AttentionOptions = NONE
    rope: None = None
    cuts: Sequence[TensorSlice | None] | None = None
    """The part of each tensor of a state that this rank has, where it does not have all; None: the module
    cannot be divided among ranks."""
    _most_drafts = (0, 0)
    _drafted: torch.Tensor | None = None
    """[slots, drafts, outputs of `project`]: what was projected of the drafts in each slot's last row."""

    def keep_drafts(self, slots: int, drafts: int) -> None:
        """Rows of these batch slots may have so many drafts."""
        self._most_drafts = slots, drafts

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.output(self.write(self.project(x), batch))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """residual + the same; `residual` may be overwritten."""
        return self.output.add_to(residual, self.write(self.project(x), batch))

    def write(self, projected: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What `project` gave of all tokens goes through the states in the pool -> [tokens, inputs of
        `output`]"""
        if batch.states is not None:
            return self.by_kernels(projected, batch, batch.states)
        runs, tensors = batch.attention.states(self.index)
        cuts = self.cuts or (None,) * len(tensors)
        owned = [_owned(tensor, cut) for tensor, cut in zip(tensors, cuts, strict=True)]
        if self._drafted is None and self._most_drafts[1]:
            self._drafted = projected.new_empty(*self._most_drafts, projected.shape[1])
        outputs: torch.Tensor | None = None
        for run in runs:
            states = [_read(parts, run.reads) for parts in owned]
            if run.begins is not None:
                for state in states:
                    state[run.begins] = 0  # what a page held before may be no number
            part = projected[run.tokens].view(run.rows, -1, projected.shape[1])
            if run.slots is not None:
                assert self._drafted is not None, "nobody said that rows may have drafts"
                if run.writes is None:
                    self._drafted[run.slots, : part.shape[1]] = part
                else:
                    part = torch.cat((self._drafted[run.slots, : run.replay], part), 1)
            out, after = self.advance(part, states)
            self._write(run, owned, after)
            out = out[:, run.replay :].flatten(0, 1)
            if len(runs) == 1:
                return out
            if outputs is None:
                outputs = out.new_empty(len(projected), out.shape[1])
            outputs[run.tokens] = out
        assert outputs is not None
        return outputs

    def attend(self, batch: Batch, written: torch.Tensor) -> torch.Tensor:
        """What `write` returned is done; attention has this for the part that does not write."""
        return written

    def _write(self, run: StateRun, owned: Sequence[_Parts], after: Sequence[torch.Tensor]) -> None:
        """Drafts leave no trace."""
        if run.writes is not None:
            for parts, state in zip(owned, after, strict=True):
                _put(parts, run.writes, state)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> what `write` takes, [tokens, outputs]"""
        return self.input(x)

    @abstractmethod
    def by_kernels(self, projected: torch.Tensor, batch: Batch, rows: StateRows) -> torch.Tensor:
        """On a GPU: `advance` of all rows, which have no drafts, with states where they are."""

    @abstractmethod
    def advance(
        self, projected: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """What `project` gave of consecutive tokens of each row, [rows, tokens, outputs], and the
        states before them, float32 [rows, *shape] each, which may be overwritten -> [rows, tokens, inputs of
        `output`], and the states behind them."""


def _owned(tensor: torch.Tensor, cut: TensorSlice | None) -> _Parts:
    """This rank's part of a tensor of all ranks; on a GPU there is no other."""
    if cut is None or tensor.shape[cut.axis + 1] == sum(count for _, count in cut.spans):
        return 0, [tensor]
    axis = cut.axis + 1
    return axis, [tensor.narrow(axis, first, count) for first, count in cut.spans]


def _read(owned: _Parts, pages: torch.Tensor) -> torch.Tensor:
    axis, parts = owned
    found = [part.index_select(0, pages) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found, axis)


def _put(owned: _Parts, pages: torch.Tensor, states: torch.Tensor) -> None:
    axis, parts = owned
    sizes = [part.shape[axis] for part in parts]
    for part, new_states in zip(parts, torch.split(states, sizes, axis) if axis else [states], strict=True):
        part.index_copy_(0, pages, new_states)
