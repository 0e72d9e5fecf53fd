"""The interface of attention backends, and the rows that they attend for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from baton.kvcache.kv_pool import KvPool
from baton.layers.attention import AttentionOptions


class HostRow(Protocol):
    """A row on the host: `engine.plan.PlanRow`."""

    @property
    def start(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def tables(self) -> Sequence[Sequence[int]]: ...

    @property
    def slot(self) -> int: ...

    @property
    def drafts(self) -> Sequence[int]: ...

    @property
    def replay(self) -> int: ...


@dataclass(slots=True)
class AttentionRows:
    """Consecutive rows of a step that attend together, in each KV group by one backend.

    A row's tokens are consecutive positions of one sequence, the last of which is keys - 1; each attends to
    all positions up to its own. No two rows of a step belong to the same sequence, and no row writes a page
    that another row uses. A kernel's inputs besides queries and pages, the same for all layers of a group.
    """

    host: Sequence[HostRow] | None
    """None in a CUDA graph, which is replayed for other rows."""
    first: int = 0
    """Index of their first token in the step."""
    tokens: int = 0
    """In all."""
    tables: tuple[torch.Tensor, ...] = ()
    """Page tables: for each KV group int32 [rows, pages] on the device; entries behind a row's end may name
    any page. None for backends that read the host's."""
    lengths: torch.Tensor | None = None
    """int32 [rows] on the device, likewise: keys of each row's last token."""
    starts: torch.Tensor | None = None
    """int32 [rows + 1]: where each row's tokens start, counted from `first`; None: one token a row."""
    longest: int = 1
    """Tokens of the longest row, at most."""
    targets: tuple[torch.Tensor, ...] = ()
    """For each KV group int64 [tokens] on the device: page * page_size + offset, where each token's keys and
    values are written. For a graph whose layers write by `forward`."""
    plans: dict[int, Any] = field(default_factory=dict)
    """By KV group, what its backend has computed for all layers."""

    @property
    def keys(self) -> torch.Tensor:
        assert self.lengths is not None
        return self.lengths

    def starts_of_all(self) -> torch.Tensor:
        """`starts`, also of rows of one token each."""
        if self.starts is not None:
            return self.starts
        return torch.arange(self.keys.shape[0] + 1, dtype=torch.int32, device=self.keys.device)


class SeenRow(NamedTuple):
    """What a row sees of a KV group, on the host: positions count from the first page given, which is the
    sequence's first that a window or chunk sees."""

    start: int
    tokens: int
    pages: Sequence[int]
    """pages[p // page_size] holds position p; may be longer than needed."""
    first: int = 0
    """The sequence's position at which they begin."""


def seen_rows(
    rows: AttentionRows, group: int, page_size: int, window: int | None, chunk: int | None = None
) -> list[SeenRow]:
    """The rows in a KV group whose layers have this window, or see chunks of this size."""
    assert rows.host is not None
    seen, size = [], page_size
    for row in rows.host:
        table = row.tables[group]
        first = 0 if window is None else max(0, row.start - window + 1) // size
        if chunk is not None:
            first = row.start // chunk * chunk // size
        pages = table[first:] if first else table
        seen.append(SeenRow(row.start - first * size, row.count, pages, first * size))
    return seen


class AttentionBackend(Protocol):
    """Bound to one KV group: the view of a pool that has its layout. `plan` once per step, then `forward`
    once per layer, in one thread."""

    name: str
    features: frozenset[str]
    """Names of the `AttentionOptions` that it computes; and "states", if it reads nothing behind a row's end:
    pages that have held states of recurrent layers hold bits there that are no numbers."""

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        """None if the backend works here (with this dtype and head size, if given); else why not."""
        ...

    def __init__(
        self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = (), group: int = 0
    ) -> None:
        """`options`: of each layer of a page; empty: none in any layer. `group`: index of the KV group."""
        ...

    def plan(self, rows: AttentionRows) -> None:
        """Prepares a step."""
        ...

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        rows: AttentionRows,
    ) -> None:
        """Writes k and v [tokens, kv heads, head_dim] into the pages' `layer`, then attends with q
        [tokens, heads, head_dim] into `out`, of q's shape."""
        ...
