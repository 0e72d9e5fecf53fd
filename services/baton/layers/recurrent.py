"""Base of layers that remember a sequence in a state instead of in keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from baton.layers.attention import NONE, AttentionOptions
from baton.layers.batch import Batch
from baton.layers.cache_spec import State
from baton.layers.linear import Linear


class RecurrentModule(ABC):
    """A projection, a recurrence over the states in the pool, output projection."""

    index: int
    """Index of the layer."""
    cache: State
    input: Linear
    output: Linear
    options: AttentionOptions = NONE
    rope: None = None

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.output(self._advance_all(x, batch))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """residual + the same; `residual` may be overwritten."""
        return self.output.add_to(residual, self._advance_all(x, batch))

    def _advance_all(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        projected = self.project(x)
        runs, tensors = batch.attention.states(self.index)
        outputs = []
        for run in runs:
            states = [tensor.index_select(0, run.reads) for tensor in tensors]
            if run.begins is not None:
                for state in states:
                    state[run.begins] = 0  # what a page held before may be no number
            part = projected[run.first : run.first + run.tokens]
            out, after = self.advance(part.view(run.rows, -1, part.shape[1]), states)
            for tensor, state in zip(tensors, after, strict=True):
                tensor.index_copy_(0, run.writes, state)
            outputs.append(out.flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> what `advance` takes, [tokens, outputs]"""
        return self.input(x)

    @abstractmethod
    def advance(
        self, projected: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """What `project` gave of consecutive tokens of each row, [rows, tokens, outputs], and the
        states before them, float32 [rows, *shape] each, which may be overwritten -> [rows, tokens, inputs of
        `output`], and the states behind them."""
