"""Drafts of a head by CUDA graphs, one for each number of rows and of drafts: the host would take longer to
launch its passes than the device to compute them.

A graph computes for each row the last pairs that the head has not had (`heads`), as many as a step can
deliver, and all drafts, which depend on temperatures and seeds alone. A row with fewer pairs has tokens
behind them that mean nothing: no pair attends to them, and the drafts' keys and values are written over
theirs. What a row has no pages for goes to a spare one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from baton.attention.base import AttentionRows
from baton.attention.step import ModelAttention
from baton.engine import step_graphs
from baton.engine.draft.draft_head import DraftHead
from baton.engine.draft.sampling import sample_by_temperature
from baton.engine.sampler_ops import position_keys, seed_keys
from baton.layers.async_copy import to_device, to_host
from baton.layers.batch import Batch, LayerCache

ROWS = (1, 2, 4, 8, 16, 32, 64)
DRAFTS = (1, 2, 3, 5, 7)
MOST_TOKENS = 512


class HeadShape(NamedTuple):
    """What a graph has room for."""

    rows: int
    drafts: int

    @property
    def pairs(self) -> int:
        """Pairs of a row."""
        return self.drafts + 1


@dataclass(frozen=True, slots=True)
class HeadRow:
    """A row of a step."""

    tokens: Sequence[int]
    """Next tokens of its pairs."""
    positions: Sequence[int]
    """Positions of the row's pairs in the sequence."""
    start: int
    """Pairs that the head has had before."""
    pages: Sequence[int]
    temperature: float
    seed: int
    behind: int
    """Position of the first draft."""


class Unread(NamedTuple):
    """Where a step that has not been read has a row's results: see LaunchedStep."""

    hidden: int
    """In `tapped`, its first token's."""
    sampled: int
    """In `verified`, its first token."""
    sample: int
    """In `verified`, how many drafts were right."""


@dataclass(frozen=True, slots=True)
class LaunchedDrafts:
    """Drafts that are under way."""

    result: torch.Tensor
    """[drafts, rows, 2], on the host once `done`: as in HeadInputs."""
    rows: int
    done: torch.cuda.Event | None
    tokens: torch.Tensor
    """int32 [drafts * rows of the shape], on the device."""

    def names(self, row: int, drafts: int, first: int) -> list[int]:
        """The first drafts of a row, as PlanRow.drafts names what only the device knows; `tokens` begin at
        `first` there."""
        rows = self.result.shape[1]
        return [-1 - (first + depth * rows + row) for depth in range(drafts)]

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def finite(self) -> list[list[bool]]:
        """Whether the logits of each row's drafts were finite. Waits for the device."""
        self.wait()
        peaks = self.result.numpy()[:, : self.rows, 1].copy().view(np.float32)
        finite: list[list[bool]] = np.isfinite(peaks).T.tolist()
        return finite


@dataclass(slots=True)
class HeadInputs:
    """Views of the static buffers, of a shape; int32 but for the seeds."""

    shape: HeadShape
    seeds: torch.Tensor
    """int64 [rows]: `seed_keys`"""
    temperatures: torch.Tensor
    """float32 [rows]"""
    starts: torch.Tensor
    """[rows]"""
    counts: torch.Tensor
    """[rows]: pairs, at least one."""
    behind: torch.Tensor
    """[rows]"""
    tokens: torch.Tensor
    """[rows * pairs]"""
    positions: torch.Tensor
    """[rows * pairs]"""
    tables: torch.Tensor
    """[rows, pages]"""
    hidden: torch.Tensor
    """[rows * pairs, values]"""
    result: torch.Tensor
    """[drafts, rows, 2]: as in step_graphs.Inputs."""


class HeadGraphs:
    """Without CUDA its work is done as it comes."""

    def __init__(
        self,
        head: DraftHead,
        attention: ModelAttention,
        vocab_size: int,
        context: int,
        drafts: int,
        rows: int,
        kernels: bool = False,
    ) -> None:
        """`attention`: over the head's pool, with a spare page. `context`: positions that will be used; no
        row has more `drafts`, no step more `rows`. `kernels`: the head's layers write into the pool by
        kernels of their own."""
        self._head, self._attention = head, attention
        pool = attention.pool
        self._caches = [pool.layer_pages(layer) for layer in range(len(head.attention_options) * kernels)]
        self._device, self._size = pool.device, pool.layout.page_size
        self._context, self._spare, self._vocab_size = context, pool.num_pages, vocab_size
        self._pages = -(-(context + 2 * DRAFTS[-1]) // self._size)
        lengths = [each for each in DRAFTS if each < drafts] + [
            min([e for e in DRAFTS if e >= drafts] or DRAFTS[-1:])
        ]
        sizes = [each for each in ROWS if each < rows] + [min([e for e in ROWS if e >= rows] or ROWS[-1:])]
        shapes = sorted({HeadShape(r, k) for r in sizes for k in lengths if r * (k + 1) <= MOST_TOKENS})
        self.shapes = shapes
        tokens = max(shape.rows * shape.pairs for shape in shapes)
        longest = max(sum(self._lanes(shape)) for shape in shapes)
        self._static = torch.zeros(longest, dtype=torch.int32, device=self._device)
        self._hidden = torch.zeros(tokens, head.values, dtype=head.dtype, device=self._device)
        drawn = max(shape.rows * shape.drafts for shape in shapes)
        self._result = torch.zeros(drawn, 2, dtype=torch.int32, device=self._device)
        self._graphs: dict[HeadShape, torch.cuda.CUDAGraph] = {}
        self.seconds = 0.0
        if self._device.type == "cuda":
            started, memory = time.monotonic(), torch.cuda.graph_pool_handle()
            for shape in sorted(shapes, key=lambda s: -s.rows * s.pairs):
                self._fill(shape, ())
                self._graphs[shape] = step_graphs.capture(
                    self.work, self._inputs(shape), memory, self._device
                )
            torch.cuda.synchronize(self._device)
            self.seconds = time.monotonic() - started

    def shape(self, rows: int, drafts: int) -> HeadShape | None:
        """That of the graph for such a step; None: no graph fits."""
        fits = (shape for shape in self.shapes if shape.rows >= rows and shape.drafts >= drafts)
        return min(fits, key=lambda shape: shape.rows * shape.pairs, default=None)

    def run(
        self, shape: HeadShape, rows: Sequence[HeadRow], hidden: Sequence[torch.Tensor]
    ) -> LaunchedDrafts:
        """Enqueues the drafts of rows, and their copy to the host. `hidden`: of each row [pairs, values], the
        model's hidden states."""
        at = [i * shape.pairs + j for i, row in enumerate(rows) for j in range(len(row.tokens))]
        self._fill(shape, rows)
        where = to_device(np.array(at, np.int64), self._device)
        self._hidden.index_copy_(0, where, torch.cat(list(hidden)))
        return self._run(shape, len(rows))

    def run_behind(
        self,
        shape: HeadShape,
        rows: Sequence[HeadRow],
        unread: Sequence[Unread],
        hidden: torch.Tensor,
        verified: tuple[torch.Tensor, torch.Tensor],
    ) -> LaunchedDrafts:
        """`run` for rows of a step that nobody has read: all of its tokens are taken as pairs, of which those
        up to the first wrong draft count. `tokens` of the rows mean nothing but their number, and `behind` is
        that of no right draft. `hidden` and `verified`: as in LaunchedStep."""
        self._fill(shape, rows)
        count, indices = len(rows), np.arange(shape.pairs)
        at, sampled, first = np.array(unread, np.int64).T
        pair_offsets = np.minimum(indices, np.array([len(row.tokens) for row in rows])[:, None] - 1)
        there = [first, (sampled[:, None] + pair_offsets).ravel(), (at[:, None] + pair_offsets).ravel()]
        where = to_device(np.concatenate(there), self._device)
        first_at, token_at, hidden_at = torch.split(where, [len(each) for each in there])
        inputs, right = self._inputs(shape), verified[1].index_select(0, first_at)
        inputs.counts[:count].copy_(right).add_(1)
        inputs.behind[:count].add_(right)
        inputs.tokens[: len(token_at)].copy_(verified[0].index_select(0, token_at))
        torch.index_select(hidden, 0, hidden_at, out=self._hidden[: len(hidden_at)])
        return self._run(shape, count)

    def _run(self, shape: HeadShape, rows: int) -> LaunchedDrafts:
        graph = self._graphs.get(shape)
        if graph is None:
            self.work(self._inputs(shape))
        else:
            graph.replay()
        result, done = self._inputs(shape).result, None
        # Copies: the next drafts are written over these. What is not of numbers may not be a token.
        tokens = result[..., 0].clamp(0, self._vocab_size - 1).flatten()
        found = result.clone() if graph is None else to_host(result)
        if graph is not None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return LaunchedDrafts(found, rows, done, tokens)

    def work(self, inputs: HeadInputs) -> None:
        """The passes of a step; on buffers, so that a CUDA graph can hold it. What no draft changes is made
        once for all: many small kernels take a graph long."""
        head, device, shape = self._head, self._device, inputs.shape
        pairs, ends = shape.pairs, (shape.rows + 1) * shape.pairs
        offsets = torch.arange(pairs, dtype=torch.int32, device=device)
        firsts = torch.arange(0, ends, pairs, dtype=torch.int32, device=device)
        # Nobody reads them: drafts that come of no numbers are wrong ones.
        flags = torch.zeros(shape.rows, device=device) if self._caches else None
        entries = inputs.starts[:, None] + offsets
        batch = self._batch(inputs, inputs.tokens, inputs.positions, entries, firsts, flags)
        states = head.forward(inputs.tokens, head.enter(inputs.hidden), batch)
        states = states.index_select(0, firsts[:-1] + inputs.counts - 1)
        depths = offsets[: shape.drafts, None]
        keys = position_keys(inputs.seeds, inputs.behind + depths)
        positions = (inputs.behind + (depths - 1)).clamp(0, self._context - 1)
        entries = inputs.starts + inputs.counts + depths
        for depth in range(shape.drafts):
            sampled = inputs.result[depth]
            sample_by_temperature(head.logits(states), inputs.temperatures, keys[depth], sampled)
            if depth + 1 < shape.drafts:
                tokens = sampled[:, 0].contiguous()
                batch = self._batch(inputs, tokens, positions[depth], entries[depth, :, None], None, flags)
                states = head.forward(tokens, states, batch)

    def _targets(self, entries: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Where keys and values belong: int [rows, n], pages [rows, pages] -> int64 [rows, n]"""
        size = self._size
        pages = tables.gather(1, (entries // size).clamp(max=tables.shape[1] - 1).long())
        return (pages * size + entries % size).long()

    def _batch(
        self,
        inputs: HeadInputs,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        entries: torch.Tensor,
        starts: torch.Tensor | None,
        nan_flags: torch.Tensor | None,
    ) -> Batch:
        """tokens, positions [tokens]; entries int32 [rows, n]: among the row's keys and values, those of its
        tokens; `starts`: None: a token each."""
        longest = entries.shape[1]
        tables, lengths = inputs.tables, entries[:, -1] + 1
        rows = AttentionRows(None, 0, len(tokens), (tables,), lengths, starts, longest)
        attention = self._attention.over(rows)
        if not self._caches:
            rows.targets = (self._targets(entries, tables).flatten(),)
            return Batch(tokens, positions, attention)
        slots = torch.arange(len(tokens), dtype=torch.int32, device=self._device) // longest
        caches = [LayerCache(tables, pages) for pages in self._caches]
        return Batch(tokens, entries.flatten(), attention, caches, slots, nan_flags, turns=positions)

    def _lanes(self, shape: HeadShape) -> tuple[int, ...]:
        """Lengths of the fields of HeadInputs, which lie one behind the other."""
        rows, tokens = shape.rows, shape.rows * shape.pairs
        return (2 * rows, rows, rows, rows, rows, tokens, tokens, rows * self._pages)

    def _inputs(self, shape: HeadShape) -> HeadInputs:
        sizes = self._lanes(shape)
        lanes = torch.split(self._static[: sum(sizes)], list(sizes))
        seeds, temperatures, starts, counts, behind, tokens, positions, tables = lanes
        return HeadInputs(
            shape,
            seeds.view(torch.int64),
            temperatures.view(torch.float32),
            starts,
            counts,
            behind,
            tokens,
            positions,
            tables.view(shape.rows, self._pages),
            self._hidden[: len(tokens)],
            self._result[: shape.drafts * shape.rows].view(shape.drafts, shape.rows, 2),
        )

    def _fill(self, shape: HeadShape, rows: Sequence[HeadRow]) -> None:
        """Enqueues the copy of a step's inputs; the other rows are padding."""
        sizes = self._lanes(shape)
        host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        lanes: list[npt.NDArray[np.int32]] = np.split(host.numpy(), np.cumsum(sizes)[:-1])
        seeds, temperatures, starts, counts, behind, tokens, positions, tables = lanes
        counts[:] = 1
        tables[:] = self._spare
        tokens, positions = tokens.reshape(-1, shape.pairs), positions.reshape(-1, shape.pairs)
        table = tables.reshape(-1, self._pages)
        for i, row in enumerate(rows):
            count = len(row.tokens)
            tokens[i, :count], positions[i, :count] = row.tokens, row.positions
            starts[i], counts[i], behind[i] = row.start, count, row.behind
            table[i, : len(row.pages)] = row.pages[: self._pages]
        if rows:
            row_temperatures = np.array([row.temperature for row in rows], np.float32)
            temperatures.view(np.float32)[: len(rows)] = row_temperatures
            all_seeds = np.array([row.seed for row in rows], np.uint64)
            seeds.view(np.int64)[: len(rows)] = seed_keys(all_seeds)
        self._static[: len(host)].copy_(host, non_blocking=True)
