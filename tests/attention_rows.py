"""Rows for attention backends, as a runner makes them of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.attention.base import AttentionRows
from baton.layers.batch import Batch


@dataclass(frozen=True)
class Row:
    """Positions start .. start + count - 1 of a sequence, whose pages are given from the first on."""

    start: int
    count: int
    pages: tuple[int, ...]

    @property
    def tables(self) -> tuple[tuple[int, ...]]:
        return (self.pages,)


def planned(backend: Any, rows: Sequence[Row]) -> AttentionRows:
    """Rows of one token first, for a backend that has planned them."""
    device, size = backend._pool.device, backend._pool.layout.page_size
    counts = [row.count for row in rows]
    ends = [row.start + row.count for row in rows]
    table = torch.zeros(len(rows), max(-(-end // size) for end in ends), dtype=torch.int32)
    for at, (row, end) in enumerate(zip(rows, ends, strict=True)):
        used = row.pages[: -(-end // size)]
        table[at, : len(used)] = torch.tensor(used)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(device, torch.int32)
    made = AttentionRows(rows, 0, sum(counts), (table.to(device),), longest=max(counts))
    made.lengths = torch.tensor(ends, dtype=torch.int32, device=device)
    made.starts = None if made.longest == 1 else starts
    backend.plan(made)
    return made


class OneGroup:
    """A `layers.batch.StepAttention` of one backend with all layers."""

    def __init__(self, backend: Any, rows: Sequence[Row], options: Sequence[Any]) -> None:
        self._backend, self._rows, self._options = backend, planned(backend, rows), options

    def write_and_attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        latent = self._options[layer].latent
        out = q.new_empty(*q.shape[:2], q.shape[2] if latent is None else latent.value_dim)
        self._backend.forward(layer, q, k, v, out, self._rows)
        return out.flatten(1)


def whole_sequence(tokens: Sequence[int], backend: Any, options: Sequence[Any]) -> Batch:
    """A batch of one row, all of whose keys lie in page 0."""
    device = backend._pool.device
    attention: Any = OneGroup(backend, [Row(0, len(tokens), (0,))], options)
    ids = torch.tensor(tokens, device=device)
    return Batch(ids, torch.arange(len(tokens), device=device), attention)
