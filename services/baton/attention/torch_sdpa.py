"""Attention with torch's scaled_dot_product_attention, on every device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from baton.attention.base import AttentionRows, SeenRow, seen_rows
from baton.attention.fp8 import dequantize, quantize
from baton.attention.sdpa import attend
from baton.kvcache.kv_pool import KvPool
from baton.layers.attention import AttentionOptions

_GROUP_BYTES = 2**19
"""On a CPU, most bytes gathered at a time, so that they stay in the cache until they are attended to.
Measured for 16 rows of 304 tokens (2 and 4 KV heads x 64, one core with 2 MiB): 0.6 to 0.7 of the time for
all at once."""


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Where pages come together, of every layer the same; all share one buffer."""

    pages: torch.Tensor
    """[entries, page_size * dim]"""
    heads: torch.Tensor
    """[2, rows, kv heads, length, dim]"""
    keys: torch.Tensor
    values: torch.Tensor
    """Views of `heads`."""


@dataclass(slots=True)
class _RowGroup:
    """Rows of one token, padded to one length; groups follow each other by length."""

    padded: bool
    """False: one row, whose keys are attended to as they are."""
    lengths: list[int]
    """Keys of each row."""
    firsts: list[int]
    """Position of each row's first key."""
    gathered: _Gathered
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    """By window: [rows, 1, 1, length], 0 or -inf; None: all keys of every row are seen."""


@dataclass(slots=True)
class _Chunk:
    """A row of several tokens."""

    row: SeenRow
    tokens: slice
    end: int
    """Keys of its last token."""
    pages: tuple[torch.Tensor, ...] | None = None
    """Like a group's; None where nothing precedes the chunk, and no layer reads what another has written."""
    gathered: _Gathered | None = None
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    """By window: [tokens, end], 0 or -inf; None: causal, nothing precedes the chunk."""


class TorchAttention:
    """Gathers pages into a buffer that all layers share, then attends.

    Rows of one token: in groups of similar length, heads that share a KV head becoming queries of it. Chunks:
    one by one; one that nothing precedes needs no gathering.
    """

    name = "torch"
    features = frozenset(
        {"scale", "window", "chunk", "softcap", "sinks", "kv_scales", "sinks and kv_scales", "states"}
    )

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        return None

    def __init__(
        self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = (), group: int = 0
    ) -> None:
        self._options = options or [AttentionOptions()] * pool.layout.num_layers
        self._pool, self._layout = pool, pool.layout
        self._num_heads = num_heads
        self._group = group
        self._layers = torch.arange(pool.layout.num_layers, device=pool.device)[:, None]
        first, self._kv_heads = pool.heads
        self._heads = np.arange(first, first + self._kv_heads) * (2 * pool.layout.num_layers)
        """Where each own head of a page begins, in `KvPool.halves`."""
        # index_copy_ and index_select do not know FP8.
        quantized = any(each.kv_scales is not None for each in self._options)
        self._vectors, self._halves = (
            view.view(torch.uint8) if quantized else view for view in (pool.vectors, pool.halves)
        )
        self._buffer = self._halves.new_empty(0)
        page_bytes = pool.layout.page_bytes * self._kv_heads // pool.layout.num_kv_heads
        page_bytes //= pool.layout.num_layers
        self._pages_at_once = _GROUP_BYTES // page_bytes if pool.device.type == "cpu" else sys.maxsize
        self._rows: Sequence[SeenRow] = ()
        self._starts: dict[int, int] = {}
        """First positions of each row by its table's identity, which the row keeps."""
        self._single = 0
        self._order: torch.Tensor | None = None
        self._groups: list[_RowGroup] = []
        self._group_sizes: list[int] = []
        """Rows of each."""
        self._group_pages: tuple[tuple[torch.Tensor, ...], ...] = ()
        """Page indices, for each layer and row group: entries of `KvPool.halves`, [2, rows, kv heads,
        pages] flattened."""
        self._chunks: list[_Chunk] = []
        self._written = torch.empty(0)
        """[2, layers, tokens * kv heads]: the entries of `KvPool.vectors` that the step writes."""
        self._keys: tuple[torch.Tensor, ...] = ()
        self._values: tuple[torch.Tensor, ...] = ()
        """Views of `_written`, of each layer."""

    def plan(self, rows: AttentionRows) -> None:
        """Rows of one token come before all others."""
        options = self._options[0]
        self._plan(seen_rows(rows, self._group, self._layout.page_size, options.window, options.chunk))

    def _plan(self, rows: Sequence[SeenRow]) -> None:
        if self._one_token_on(rows):
            self._written += 1
            for group in self._groups:
                self._lengthen(group)
            self._remember(rows)
            return
        size = self._layout.page_size
        locations: list[tuple[int, int]] = []
        for row in rows:
            if row.tokens == 1:
                locations.append((row.pages[row.start // size], row.start % size))
            else:
                locations += [
                    (row.pages[p // size], p % size) for p in range(row.start, row.start + row.tokens)
                ]
        self._written = self._vectors_at(locations)
        self._keys, self._values = (half.unbind(0) for half in self._written.unbind(0))
        self._single = next((i for i, row in enumerate(rows) if row.tokens > 1), len(rows))
        self._group_rows(rows[: self._single])
        self._chunks = []
        first = self._single
        for row in rows[self._single :]:
            self._chunks.append(self._chunk(row, first))
            first += row.tokens
        self._remember(rows)

    def _remember(self, rows: Sequence[SeenRow]) -> None:
        self._rows = rows
        self._starts = {id(row.pages): row.start for row in rows if row.tokens == 1}

    def _goes_on(self, row: SeenRow) -> bool:
        """It had one token in the step before, too, and is one token on in the same page. Another sequence's
        table is another object, even if it has the same pages."""
        before = self._starts.get(id(row.pages))
        return row.tokens == 1 and before == row.start - 1 and row.start % self._layout.page_size != 0

    def _one_token_on(self, rows: Sequence[SeenRow]) -> bool:
        """The rows are those of the step before in the same order, and each goes on."""
        same = len(rows) == len(self._rows) and not self._chunks
        return same and all(
            row.pages is before.pages and self._goes_on(row)
            for row, before in zip(rows, self._rows, strict=True)
        )

    def _vectors_at(self, locations: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Entries of `KvPool.vectors` of the own heads at pairs of page and offset: [2, layers, pairs * kv
        heads]"""
        size, layers = self._layout.page_size, self._layout.num_layers
        stride = self._layout.num_kv_heads * layers * 2 * size
        tokens = np.array([page * stride + offset for page, offset in locations], np.int64)
        keys = self._there(np.add.outer(tokens, self._heads * size).ravel()) + self._layers * (2 * size)
        return torch.stack((keys, keys + size))

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        rows: AttentionRows,
    ) -> None:
        options = self._options[layer]
        own_k, own_v = self.write(layer, k, v, rows)
        if options.kv_scales is not None:
            # A chunk that nothing precedes sees what later ones will.
            by_head = options.kv_scales[:, :, None]
            k, v = (dequantize(x, by, q.dtype) for x, by in zip((own_k, own_v), by_head, strict=True))
        if self._groups:
            self._decode(layer, q[: self._single], out[: self._single])
        for chunk in self._chunks:
            at = chunk.tokens
            row_q = q[at].transpose(0, 1)[None]
            if chunk.pages is None or chunk.gathered is None:
                row_k, row_v = k[at].transpose(0, 1)[None], v[at].transpose(0, 1)[None]
            else:
                row_k, row_v = self._gather(chunk.gathered, chunk.pages[layer], layer, q.dtype)
            mask = self._chunk_mask(chunk, options.window, q.dtype)
            out[at] = attend(row_q, row_k, row_v, mask, options)[0].transpose(0, 1)

    def write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, rows: AttentionRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `forward` does to the pool; -> as the pool has them."""
        scales, dim = self._options[layer].kv_scales, self._layout.head_dim
        if scales is not None:
            k, v = (quantize(x, by) for x, by in zip((k, v), scales, strict=True))
        self._vectors.index_copy_(0, self._keys[layer], k.reshape(-1, dim))
        self._vectors.index_copy_(0, self._values[layer], v.reshape(-1, dim))
        return k, v

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: AttentionRows) -> None:
        """Attends as `forward` does, to keys and values that `forward` of this step has written."""
        if self._groups:
            self._decode(layer, q[: self._single], out[: self._single])
        for chunk in self._chunks:
            gathered, pages = self._find_pages(chunk)
            keys, values = self._gather(gathered, pages[layer], layer, q.dtype)
            mask = self._chunk_mask(chunk, self._options[layer].window, q.dtype)
            row_q = q[chunk.tokens].transpose(0, 1)[None]
            out[chunk.tokens] = attend(row_q, keys, values, mask, self._options[layer])[0].transpose(0, 1)

    def _decode(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        kv_heads, dim = self._kv_heads, self._layout.head_dim
        shape = (-1, kv_heads, self._num_heads // kv_heads, dim)
        order = self._order
        q = q.reshape(shape) if order is None else q[order].view(shape)
        options = self._options[layer]
        results = []
        queries = (q,) if len(self._groups) == 1 else torch.split(q, self._group_sizes)
        for group, group_q, pages in zip(self._groups, queries, self._group_pages[layer], strict=True):
            keys, values = self._gather(group.gathered, pages, layer, q.dtype)
            mask = self._group_mask(group, options.window, q.dtype)
            results.append(attend(group_q, keys, values, mask, options, causal=False))
        result = results[0] if len(results) == 1 else torch.cat(results)
        result = result.reshape(-1, self._num_heads, dim)
        if order is None:
            out.copy_(result)
        else:
            out.index_copy_(0, order, result)

    def _gather(
        self, where: _Gathered, pages: torch.Tensor, layer: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv heads, length, dim], valid until the next call."""
        torch.index_select(self._halves, 0, pages, out=where.pages)
        scales = self._options[layer].kv_scales
        if scales is None:
            return where.keys, where.values
        keys, values = dequantize(where.heads, scales[:, None, :, None, None], dtype).unbind(0)
        return keys, values

    def _gathered(self, entries: int, rows: int, length: int) -> _Gathered:
        dim, size = self._layout.head_dim, self._halves.shape[1]
        if self._buffer.numel() < entries * size:
            self._buffer = self._buffer.new_empty(entries * size * 5 // 4)
        pages = self._buffer[: entries * size].view(entries, size)
        heads = pages.view(2, rows, self._kv_heads, -1, dim)[:, :, :, :length]
        return _Gathered(pages, heads, heads[0], heads[1])

    def _group_rows(self, rows: Sequence[SeenRow]) -> None:
        """Groups rows of one token, sorted by length; `_order` is None where they come so."""
        order = sorted(range(len(rows)), key=lambda i: -rows[i].start)
        parts: list[tuple[int, list[SeenRow]]] = []
        for i in order:
            length = self._padded(rows[i])
            if parts:
                longest, part = parts[-1]
                width = -(-length // self._layout.page_size)
                if longest == length and width * (len(part) + 1) <= self._pages_at_once:
                    part.append(rows[i])
                    continue
            parts.append((length, [rows[i]]))
        self._order = None if order == list(range(len(order))) else self._there(np.array(order, np.int64))
        self._groups = []
        self._group_sizes = [len(part) for _, part in parts]
        entries: list[npt.NDArray[np.int64]] = []
        for length, part in parts:
            entries.append(self._entries(self._padded_table(part, length), len(part)))
            lengths, firsts = [row.start + 1 for row in part], [row.first for row in part]
            gathered = self._gathered(len(entries[-1]), len(part), length)
            self._groups.append(_RowGroup(self._pads(part[0]), lengths, firsts, gathered))
        if parts:
            of_layers = self._there(np.concatenate(entries)) + 2 * self._layers
            sizes = [len(part) for part in entries]
            self._group_pages = tuple(torch.split(layer, sizes) for layer in of_layers.unbind(0))
            self._clear_ends(rows)

    def _clear_ends(self, rows: Sequence[SeenRow]) -> None:
        """Memory behind a row's end in its last page is gathered with it and may hold NaN, and 0 times NaN is
        NaN. Only the row itself writes into this page, so it stays cleared while the row goes on."""
        size = self._layout.page_size
        ends = [
            (row.pages[row.start // size], offset)
            for row in rows
            if self._pads(row) and not self._goes_on(row)
            for offset in range(row.start % size + 1, size)
        ]
        if ends:
            self._vectors.index_fill_(0, self._vectors_at(ends).flatten(), 0)

    def _lengthen(self, group: _RowGroup) -> None:
        """The group's rows are one token on in the same pages."""
        group.lengths = [length + 1 for length in group.lengths]
        group.masks.clear()
        if not group.padded:
            group.gathered = self._gathered(len(group.gathered.pages), 1, group.lengths[0])

    def _pads(self, row: SeenRow) -> bool:
        """A row too long to share a group is not padded."""
        return 2 * (row.start // self._layout.page_size + 1) <= self._pages_at_once

    def _padded(self, row: SeenRow) -> int:
        """Keys that the row's are padded to, so that rows of similar length come together: to whole pages,
        above seven to the next of four steps between powers of two.

        How a sum is rounded depends on how many keys there are, masked ones too. The number depends on the
        row alone, and so does the result, if one thread computes it."""
        size = self._layout.page_size
        if not self._pads(row):
            return row.start + 1
        pages = row.start // size + 1
        step = 1 << max(0, pages.bit_length() - 3)
        return -(-pages // step) * step * size

    def _padded_table(self, rows: Sequence[SeenRow], length: int) -> list[int]:
        """The rows' pages one after the other, of each so many that they hold `length` keys."""
        size = self._layout.page_size
        width = -(-length // size)
        table: list[int] = []
        for row in rows:
            used = row.start // size + 1
            table += row.pages[:used]
            table += [row.pages[0]] * (width - used)
        return table

    def _group_mask(self, group: _RowGroup, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        keys = group.gathered.keys.shape[2]
        if window is not None and window >= keys:
            window = None
        if window not in group.masks:
            group.masks[window] = None
            chunk = self._options[0].chunk
            if window is not None or chunk is not None or min(group.lengths) < keys:
                lengths, positions = np.array(group.lengths)[:, None, None, None], np.arange(keys)
                hidden = positions >= lengths
                if chunk is not None:
                    firsts = np.array(group.firsts)[:, None, None, None]
                    hidden |= positions < (lengths - 1 + firsts) // chunk * chunk - firsts
                if window is not None:
                    hidden |= positions < lengths - window
                mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
                group.masks[window] = torch.from_numpy(mask).to(self._pool.device, dtype)
        return group.masks[window]

    def _chunk(self, row: SeenRow, first: int) -> _Chunk:
        tokens, end = slice(first, first + row.tokens), row.start + row.tokens
        chunk = _Chunk(row, tokens, end)
        if row.start:
            self._find_pages(chunk)
        return chunk

    def _find_pages(self, chunk: _Chunk) -> tuple[_Gathered, tuple[torch.Tensor, ...]]:
        """The chunk's pages are gathered from now on."""
        if chunk.gathered is None or chunk.pages is None:
            pages = chunk.row.pages[: -(-chunk.end // self._layout.page_size)]
            of_layers = self._there(self._entries(pages, 1)) + 2 * self._layers
            chunk.pages = of_layers.unbind(0)
            chunk.gathered = self._gathered(of_layers.shape[1], 1, chunk.end)
        return chunk.gathered, chunk.pages

    def _chunk_mask(self, chunk: _Chunk, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        if window is not None and window >= chunk.end:
            window = None
        if window not in chunk.masks:
            chunk.masks[window] = None
            size, first = self._options[0].chunk, chunk.row.first
            if size is not None and (chunk.end - 1 + first) // size * size <= first:
                size = None
            if window is not None or size is not None or chunk.pages is not None:
                device, count = self._pool.device, chunk.tokens.stop - chunk.tokens.start
                positions = torch.arange(chunk.end - count, chunk.end, device=device)[:, None]
                keys = torch.arange(chunk.end, device=device)
                hidden = keys > positions
                if window is not None:
                    hidden |= keys <= positions - window
                if size is not None:
                    hidden |= keys < (positions + first) // size * size - first
                mask = torch.zeros(count, chunk.end, dtype=dtype, device=device)
                chunk.masks[window] = mask.masked_fill_(hidden, -torch.inf)
        return chunk.masks[window]

    def _entries(self, pages: Sequence[int], rows: int) -> npt.NDArray[np.int64]:
        """Entries of `KvPool.halves` in the first layer, [2, rows, kv heads, pages] flattened, of rows with
        equally many pages, one after the other."""
        page = self._layout.num_kv_heads * 2 * self._layout.num_layers
        keys = np.array(pages, np.int64).reshape(rows, 1, -1) * page + self._heads[:, None]
        return np.stack((keys, keys + 1)).ravel()

    def _there(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._pool.device)
