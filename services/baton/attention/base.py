"""The interface of attention backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.kvcache.kv_pool import KvPool
from baton.layers.attention import AttentionOptions


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Consecutive tokens of one sequence: positions start .. start + count - 1, which attend to all up to
    their own. Positions count from the first page given, which is the sequence's first that a window sees."""

    start: int
    count: int
    pages: Sequence[int]
    """pages[p // page_size] holds position p; may be longer than needed."""


class AttentionBackend(Protocol):
    """Bound to one KV group of a pool. `prepare` once per step, then `forward` once per layer, in one thread.

    No two rows of a step belong to the same sequence, and no row writes a page that another row uses.
    """

    name: str
    features: frozenset[str]
    """Names of the `AttentionOptions` that it computes."""

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        """None if the backend works here (with this dtype and head size, if given); else why not."""
        ...

    def __init__(self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = ()) -> None:
        """`options`: of each layer of a page; empty: none in any layer."""
        ...

    def prepare(self, rows: Sequence[AttentionRow]) -> None:
        """Prepares a step's rows, those of one token first; tokens are flattened in this order."""
        ...

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Writes k and v [tokens, kv heads, head_dim] into the pages' `layer`, then attends with q
        [tokens, heads, head_dim] into `out`, of q's shape."""
        ...
