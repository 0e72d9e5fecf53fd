"""One step's tokens, as the layers of a model see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from baton.layers.rope import Rope


class Attend(Protocol):
    """Writes a layer's keys and values of all tokens into the pool and attends."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv heads, head_dim] -> [tokens, heads * head_dim]."""
        ...


AttendPages = Callable[[int, torch.Tensor, torch.Tensor], None]
"""(layer, q [tokens, heads, head_dim], out of that shape), once the layer's keys and values are in the pool.
Of latents: absorbed queries [tokens, heads, rank + rotated], weighted latents [tokens, heads, rank]."""


class Place(NamedTuple):
    """Where a layer's kernels write the keys and values of a step's tokens. All of it is on the device."""

    positions: torch.Tensor
    """int32 [tokens]"""
    slots: torch.Tensor
    """int32 [tokens]: batch slots."""
    damage: torch.Tensor
    """float32 [slots]: becomes NaN where values that are written are no numbers, or infinite; latents are
    not looked at."""
    tables: torch.Tensor
    """int32 [slots, pages]: their page tables."""
    cache: torch.Tensor
    """[pages, kv heads, parts, page_size, dim]"""
    rotation: torch.Tensor
    """float32 [positions, rotary dim]: cosines of the pairs, then their sines."""


class Paged(NamedTuple):
    """For layers whose own kernels write into the pool."""

    attend: AttendPages
    place: Callable[[int, Rope], Place]
    """Where a layer's keys and values are written."""


@dataclass(slots=True)
class ForwardBatch:
    """A ragged batch: the tokens of all rows, one row behind the other."""

    tokens: torch.Tensor
    """int [tokens]"""
    positions: torch.Tensor
    """int [tokens]"""
    attend: Attend | Paged
    """`Paged` where kernels of the layers write into the pool."""
    _rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def rotation(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the positions, [tokens, 1, rotary dim] each; computed once a step."""
        found = self._rotations.get(id(rope))
        if found is None:
            found = self._rotations[id(rope)] = rope.at(self.positions)
        return found
