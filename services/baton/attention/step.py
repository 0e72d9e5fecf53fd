"""Attention of a whole model over one step: of each KV group by a backend for rows of one token and one for
longer rows. Groups of states have none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.attention.base import AttentionBackend, AttentionRows
from baton.attention.paged import PagedAttention
from baton.attention.state_runs import state_runs
from baton.attention.torch_sdpa import TorchAttention
from baton.kvcache.kv_groups import layer_indices
from baton.kvcache.kv_pool import PagePool
from baton.layers.attention import AttentionOptions
from baton.layers.batch import StateRun


class ModelAttention:
    """The backends of all KV groups of a pool."""

    def __init__(
        self,
        pool: PagePool,
        num_heads: int,
        options: Sequence[AttentionOptions],
        chunks: type[AttentionBackend],
        singles: type[AttentionBackend],
    ) -> None:
        """`options`: of each layer; `chunks`: for rows of several tokens; `singles`: for rows of one."""
        self.options = options
        groups = pool.layout.groups
        self.indices = layer_indices(groups)
        """KV group of each layer, and the layer's index in the group's pages."""
        self.pool = pool
        views = [
            (view, [options[layer] for layer in group.layers], index)
            for index, (group, view) in enumerate(zip(groups, pool.groups, strict=False))
        ]
        self.chunks = [chunks(view, num_heads, rows_here, index) for view, rows_here, index in views]
        self.singles = [singles(view, num_heads, rows_here, index) for view, rows_here, index in views]

    def over(self, *rows: AttentionRows) -> PlannedAttention:
        """Prepares a step of these rows. Those of one token, in a graph: whose `starts` is None."""
        parts = [(self.singles if rows_here.longest == 1 else self.chunks, rows_here) for rows_here in rows]
        for backends, rows_here in parts:
            for backend in backends:
                backend.plan(rows_here)
        return PlannedAttention(self, parts)


class PlannedAttention:
    """Implements `layers.batch.StepAttention`."""

    def __init__(
        self, model: ModelAttention, parts: list[tuple[list[AttentionBackend], AttentionRows]]
    ) -> None:
        self._options, self._indices, self._parts = model.options, model.indices, parts
        self._pool = model.pool
        self._runs: dict[int, list[StateRun]] = {}
        """By state group."""

    def write_and_attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        latent = self._options[layer].latent
        out = q.new_empty(*q.shape[:2], q.shape[2] if latent is None else latent.value_dim)
        group, index = self._indices[layer]
        if len(self._parts) == 1:
            ((backends, rows),) = self._parts
            backends[group].forward(index, q, k, v, out, rows)
            return out.flatten(1)
        for backends, rows in self._parts:
            at = slice(rows.first, rows.first + rows.tokens)
            backends[group].forward(index, q[at], k[at], v[at], out[at], rows)
        return out.flatten(1)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        group, index = self._indices[layer]
        for backends, rows in self._parts:
            backend, at = backends[group], slice(rows.first, rows.first + rows.tokens)
            assert isinstance(backend, PagedAttention | TorchAttention)
            backend.write(index, k[at], v[at], rows)

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        group, index = self._indices[layer]
        for backends, rows in self._parts:
            backend = backends[group]
            assert isinstance(backend, PagedAttention | TorchAttention)
            if len(self._parts) == 1:
                backend.attend(index, q, out, rows)
            else:
                at = slice(rows.first, rows.first + rows.tokens)
                backend.attend(index, q[at], out[at], rows)

    def states(self, layer: int) -> tuple[Sequence[StateRun], Sequence[torch.Tensor]]:
        group, index = self._indices[layer]
        pool = self._pool
        if group not in self._runs:
            size = pool.layout.page_size
            parts = (rows for _, rows in self._parts)
            self._runs[group] = [run for rows in parts for run in state_runs(rows, group, size, pool.device)]
        return self._runs[group], pool.state(group, index)
