"""One step's tokens, as the layers of a model see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from baton.layers.rope import Rope


class Attend(Protocol):
    """Writes a layer's keys and values of all tokens into the pool and attends."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv heads, head_dim] -> [tokens, heads * head_dim]."""
        ...


@dataclass(slots=True)
class ForwardBatch:
    """A ragged batch: the tokens of all rows, one row behind the other."""

    tokens: torch.Tensor
    """int64 [tokens]"""
    positions: torch.Tensor
    """int64 [tokens]"""
    attend: Attend
    _rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def rotation(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the positions, [tokens, 1, rotary dim] each; computed once a step."""
        found = self._rotations.get(id(rope))
        if found is None:
            found = self._rotations[id(rope)] = rope.at(self.positions)
        return found
