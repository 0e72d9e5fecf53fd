"""Passes of a head that the host launches one by one: over the pairs of many sequences, and for drafts behind
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from baton.attention.base import AttentionRows
from baton.attention.step import ModelAttention
from baton.engine.batch import HostBatch
from baton.engine.draft.draft_head import DraftHead
from baton.engine.draft.head_state import HeadState, HeadWork
from baton.engine.draft.sampling import DraftSampler, read_drafts
from baton.engine.plan import PlanRow
from baton.engine.sampler import KernelSamples, Samples
from baton.kvcache.kv_pool import PagePool
from baton.layers.async_copy import to_device
from baton.layers.batch import Batch


class HeadPasses:
    def __init__(
        self,
        head: DraftHead,
        pool: PagePool,
        attention: ModelAttention,
        sampler: DraftSampler,
        *,
        paged: bool,
    ) -> None:
        """`pool`: of the head's keys and values; `paged`: its attention reads tables and lengths on the
        device."""
        self._head, self._pool, self._attention, self._sampler = head, pool, attention, sampler
        self._paged = paged
        self._written: torch.cuda.Event | None = None
        """That passes have written their keys and values; None on a CPU, where they have."""
        if pool.device.type == "cuda":
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until all keys and values are written."""
        if self._written is not None:
            self._written.synchronize()

    def run(
        self,
        rows: Sequence[PlanRow],
        positions: Sequence[Sequence[int]],
        hidden: Sequence[torch.Tensor],
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One pass of the head; `positions` and `hidden` of each row's tokens. `tokens`: those of rows of one
        token, where the host does not know them. -> hidden states at the last token of each row, [rows,
        hidden]."""
        host = HostBatch.of(rows)
        found = self._head.forward(*self._inputs(host, positions, hidden, tokens))
        self._record()
        return found.index_select(0, to_device(host.logits_indices, self._pool.device))

    def write(
        self,
        rows: Sequence[PlanRow],
        positions: Sequence[Sequence[int]],
        hidden: Sequence[torch.Tensor],
    ) -> None:
        """`run` for keys and values alone."""
        self._head.write(*self._inputs(HostBatch.of(rows), positions, hidden, None))
        self._record()

    def _record(self) -> None:
        if self._written is not None:
            self._written.record()

    def _inputs(
        self,
        host: HostBatch,
        positions: Sequence[Sequence[int]],
        hidden: Sequence[torch.Tensor],
        tokens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Batch]:
        """What DraftHead.forward takes."""
        device, rows = self._pool.device, host.rows
        single, parts = host.single, []
        for first, end, longest in ((0, single, 1), (single, len(rows), host.longest)):
            if first < end:
                count = single if longest == 1 else host.tokens - single
                parts.append(self._rows(host, first, end, count, longest))
        at = to_device(np.array([each for i in host.order for each in positions[i]], np.int64), device)
        if tokens is None:
            tokens = to_device(host.ids, device)
            hidden = [hidden[i] for i in host.order]
        return tokens, torch.cat(list(hidden)), Batch(tokens, at, self._attention.over(*parts))

    def _rows(self, host: HostBatch, first: int, end: int, tokens: int, longest: int) -> AttentionRows:
        """Rows of a part of the batch."""
        attention_rows = AttentionRows(host.rows[first:end], int(host.starts[first]), tokens, longest=longest)
        if not self._paged:
            return attention_rows
        device, spare = self._pool.device, self._pool.num_pages
        width = max(len(row.tables[0]) for row in attention_rows.host or ())
        tables = np.full((len(self._pool.layout.groups), end - first, width), spare, np.int32)
        for i, row in enumerate(attention_rows.host or ()):
            for group, pages in enumerate(row.tables):
                tables[group, i, : len(pages)] = pages
        attention_rows.tables = to_device(tables, device).unbind(0)
        attention_rows.lengths = to_device(host.lengths[first:end], device)
        if longest > 1:
            attention_rows.starts = to_device(host.starts[first : end + 1] - host.starts[first], device)
        return attention_rows

    def draft(self, works: Sequence[HeadWork]) -> Iterator[tuple[HeadState, int, int, bool]]:
        """A token of each sequence in a pass, for those that want so many; reads them when all passes are
        under way. -> the draft's depth and token, and whether its logits were finite."""
        for work in works:
            self._sampler.init(work.kv.slot, work.state.sequence)
        hidden = [work.state.last for work in works if work.state.last is not None]
        states = torch.stack(hidden) if hidden else torch.empty(0)
        found: list[tuple[Sequence[HeadWork], Samples | KernelSamples]] = []
        for depth in range(max((work.drafts for work in works), default=0)):
            if depth:
                going = [i for i, work in enumerate(works) if work.drafts > depth]
                tokens = found[-1][1].tokens
                if len(going) < len(works):
                    works, at = [works[i] for i in going], to_device(np.array(going), self._pool.device)
                    states, tokens = states.index_select(0, at), tokens.index_select(0, at)
                rows = [
                    PlanRow(w.kv.slot, (0,), w.state.pairs + depth - 1, w.kv.tables, (w.kv.slot,))
                    for w in works
                ]
                positions = [[work.state.behind + depth - 2] for work in works]
                states = self.run(rows, positions, [states], tokens)
            slots = np.array([work.kv.slot for work in works], np.int64)
            behind = np.array([work.state.behind + depth for work in works], np.int64)
            found.append((works, self._sampler.sample(self._head.logits(states), slots, behind)))
        drawn = read_drafts([samples for _, samples in found])
        for depth, ((those, _), (drafts, finite)) in enumerate(zip(found, drawn, strict=True)):
            for work, token, is_number in zip(those, drafts, finite, strict=True):
                yield work.state, depth, token, is_number
