"""CUDA graphs of small steps that hold prompt chunks or drafts, one per number of tokens: the host would take
longer to launch them than the device to compute."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from baton.engine import step_graphs
from baton.engine.batch import HostBatch
from baton.engine.step_graphs import Progress
from baton.layers.async_copy import to_device

CHUNK_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of a step. From 512 on, an 8B model on an H200 computes a step longer than the host launches it."""
MIXTURE_CHUNK_SIZES = (*CHUNK_SIZES, 768, 1024, 1280, 1536, 1792, 2048)
"""Experts have more kernels: the host takes 50 ms to launch a step of 30B-A3B, whatever its tokens."""
FEW_CHUNK_ROWS = 8
"""Steps of at most this many rows have separate graphs: with few rows attention is split further."""


def chunk_sizes(mixture: bool, token_budget: int, context_length: int) -> tuple[int, ...]:
    """Tokens of the steps that have a graph. The last one is the first that holds `token_budget`, the most
    tokens of a step; none is above `context_length`, because a step's padding is one row."""
    sizes = MIXTURE_CHUNK_SIZES if mixture else CHUNK_SIZES
    enough = sizes[: bisect.bisect_left(sizes, token_budget) + 1]
    return tuple(size for size in enough if size <= context_length)


DRAFT_LENGTHS = (2, 4, 6, 8)
"""Tokens of a row with drafts, its last one and those."""
DRAFT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_DRAFT_TOKENS = 512


class ChunkShape(NamedTuple):
    """What a graph has room for."""

    tokens: int
    rows: int
    padding: int
    """Rows of padding, besides."""
    longest: int
    """Tokens of a row."""
    num_logits: int
    """Tokens whose logits are wanted."""

    @property
    def few(self) -> bool:
        """Whether all rows are decode rows, with drafts."""
        return self.longest <= DRAFT_LENGTHS[-1]


def chunk_shapes(sizes: Sequence[int], num_slots: int) -> list[ChunkShape]:
    """`sizes`: tokens of a step, which has no more rows than tokens, nor than slots."""
    pairs = {(size, min(rows, size, num_slots)) for size in sizes for rows in (FEW_CHUNK_ROWS, size)}
    return [ChunkShape(size, rows, 1, size, rows) for size, rows in sorted(pairs)]


def draft_shapes(draft_tokens: int, num_slots: int) -> list[ChunkShape]:
    """For rows of at most so many drafts."""
    if not draft_tokens:
        return []
    lengths = DRAFT_LENGTHS[: bisect.bisect_left(DRAFT_LENGTHS, draft_tokens + 1) + 1]
    pairs = sorted((rows * length, rows, length) for rows in DRAFT_ROWS for length in lengths)
    return [
        ChunkShape(tokens, rows, rows, length, tokens)
        for tokens, rows, length in pairs
        if tokens <= MOST_DRAFT_TOKENS and rows < 2 * num_slots
    ]


@dataclass(slots=True)
class ChunkInputs:
    """Views of the static buffers, of a shape; int32 but for the logits."""

    shape: ChunkShape

    ids: torch.Tensor
    """[tokens], as in HostBatch until the graph has run; then the tokens."""
    positions: torch.Tensor
    """[tokens], likewise."""
    token_slots: torch.Tensor
    """[tokens]"""
    shifts: torch.Tensor
    """[tokens]: see HostBatch."""
    row_slots: torch.Tensor
    """[rows + padding]"""
    lengths: torch.Tensor
    """[rows + padding]: of the rows, with their tokens of this step; likewise."""
    starts: torch.Tensor
    """[rows + padding + 1]"""
    logits_indices: torch.Tensor
    """[num_logits]: the tokens whose logits are wanted; 0 where there are fewer."""
    drafts: torch.Tensor
    """See HostBatch; of any length, empty where no row has drafts."""
    temperatures: torch.Tensor
    """float32 [num_logits], in shapes of `few`, as all that follows."""
    seeds: torch.Tensor
    """int64 [num_logits]: `seed_keys`"""
    slots: torch.Tensor
    """[samples]"""
    firsts: torch.Tensor
    """[samples]: as in Chains."""
    depths: torch.Tensor
    """[samples]"""
    logits: torch.Tensor
    """[num_logits, vocab], of the model's dtype."""
    result: torch.Tensor
    """[num_logits, 2]: as in Inputs."""
    right: torch.Tensor
    """[samples]: how many drafts are right."""


ChunkWork = Callable[[ChunkInputs], None]
"""Part of a step: up to its logits, or from the logits to the result."""


class ChunkGraphs:
    """Captured largest first."""

    def __init__(
        self,
        shapes: Sequence[ChunkShape],
        num_slots: int,
        logits: torch.Tensor,
        work: ChunkWork,
        choose: ChunkWork,
        pool: Any,
        draft_tokens: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """`shapes`: a step runs by the first that has room for it. `logits`: a buffer for the logits of the
        largest. `choose`: samples, in shapes of `few`. `pool`: a memory pool shared with graphs that never
        run at the same time. `draft_tokens`: no row has more drafts."""
        self._draft_tokens = draft_tokens
        self._padding_slot = num_slots
        self._logits = logits
        device = logits.device
        self._shapes = shapes
        report = progress or (lambda done, total: None)
        started = time.monotonic()
        free = torch.cuda.mem_get_info(device)[0]
        longest = max((sum(self._lengths(shape)) for shape in shapes), default=0)
        self._static = torch.zeros(longest, dtype=torch.int32, device=device)
        few = [shape for shape in shapes if shape.few]
        num_logits, rows = max((s.num_logits for s in few), default=0), max((s.rows for s in few), default=0)
        self._result = torch.zeros(num_logits, 2, dtype=torch.int32, device=device)
        self._right = torch.zeros(rows, dtype=torch.int32, device=device)
        self._graphs: dict[ChunkShape, torch.cuda.CUDAGraph] = {}
        self._choosing: dict[ChunkShape, torch.cuda.CUDAGraph] = {}
        for done, shape in enumerate(sorted(shapes, reverse=True)):
            report(done, len(self._shapes))
            self._fill(shape, None)
            self._graphs[shape] = step_graphs.capture(work, self._inputs(shape), pool, device)
            if shape.few:
                self._choosing[shape] = step_graphs.capture(choose, self._inputs(shape), pool, device)
        torch.cuda.synchronize(device)
        report(len(self._shapes), len(self._shapes))
        self.seconds = time.monotonic() - started
        self.bytes = free - torch.cuda.mem_get_info(device)[0]
        """Device memory that they took, and what torch reserved to warm up for them."""

    def shape(self, step: HostBatch) -> ChunkShape | None:
        """Shape of the graph for this step; None: no graph fits."""
        tokens, longest, num_logits = step.tokens, step.longest, len(step.logits_indices)
        rows = max(len(step.rows), len(step.slots))  # a prompt may sample for several
        for shape in self._shapes:
            fits = shape.tokens >= tokens and shape.rows >= rows and shape.num_logits >= num_logits
            if fits and shape.longest >= longest:
                return shape
        return None

    def run(
        self,
        shape: ChunkShape,
        step: HostBatch,
        sampling: tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]] | None = None,
        guesses: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Enqueues the step; returns the logits [num_logits, vocab] that it will write. `sampling`: what
        `choose` depends on, if that is to follow: temperatures and `seed_keys` of all wanted. `guesses`:
        int32, those of HostBatch, on the device."""
        self._fill(shape, step, sampling)
        if step.guesses.size:
            assert guesses is not None
            at, which = to_device(step.guesses, self._static.device).unbind()
            self._inputs(shape).drafts.index_copy_(0, at, guesses.index_select(0, which))
        self._graphs[shape].replay()
        return self._logits[: len(step.logits_indices)]

    def choose(self, shape: ChunkShape, num_logits: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueues the sampling of so many; see `result` and `right` of ChunkInputs."""
        self._choosing[shape].replay()
        return self._result[:num_logits], self._right[:samples]

    def settled(self, shape: ChunkShape, num_logits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and positions of those wanted, int32, once the step has run."""
        inputs = self._inputs(shape)
        at = inputs.logits_indices[:num_logits]
        return inputs.ids.index_select(0, at), inputs.positions.index_select(0, at)

    def _lengths(self, shape: ChunkShape) -> tuple[int, ...]:
        """Lengths of the fields of ChunkInputs, which lie one behind the other: `seeds` first, which are
        twice as wide, then the others in their order."""
        tokens, rows = shape.tokens, shape.rows + shape.padding
        drafts = tokens + shape.rows * self._draft_tokens if self._draft_tokens else 0
        few, samples = (shape.num_logits, shape.rows) if shape.few else (0, 0)
        step = (tokens, tokens, tokens, tokens, rows, rows, rows + 1, shape.num_logits, drafts)
        return (2 * few, *step, few, samples, samples, samples)

    def _inputs(self, shape: ChunkShape) -> ChunkInputs:
        sizes = self._lengths(shape)
        seeds, *lanes = torch.split(self._static[: sum(sizes)], list(sizes))
        ids, positions, token_slots, shifts, row_slots, lengths, starts, logits_indices, drafts = lanes[:9]
        temperatures, slots, firsts, depths = lanes[9:]
        return ChunkInputs(
            shape,
            ids,
            positions,
            token_slots,
            shifts,
            row_slots,
            lengths,
            starts,
            logits_indices,
            drafts,
            temperatures.view(torch.float32),
            seeds.view(torch.int64),
            slots,
            firsts,
            depths,
            self._logits[: shape.num_logits],
            self._result[: len(temperatures)],
            self._right[: len(slots)],
        )

    def _fill(
        self,
        shape: ChunkShape,
        step: HostBatch | None,
        sampling: tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]] | None = None,
    ) -> None:
        """Enqueues the copy of a step's inputs; without a step, of padding only."""
        sizes = self._lengths(shape)
        host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=True)
        seeds, *lanes = np.split(host.numpy(), np.cumsum(sizes)[:-1])
        ids, positions, token_slots, shifts, row_slots, lengths, starts, logits_indices, drafts = lanes[:9]
        temperatures, slots, firsts, depths = lanes[9:]
        tokens = count = samples = 0
        if step is not None:
            tokens, count = step.tokens, len(step.rows)
            ids[:tokens], positions[:tokens] = step.ids, step.positions
            token_slots[:tokens], shifts[:tokens] = step.token_slots, step.shifts
            row_slots[:count], lengths[:count] = step.row_slots, step.lengths
            starts[: count + 1] = step.starts
            logits_indices[: len(step.logits_indices)] = step.logits_indices
            drafts[: len(step.drafts)] = step.drafts
            if sampling is not None:
                samples = len(step.slots)
                temperatures.view(np.float32)[: len(step.logits_indices)] = sampling[0]
                seeds.view(np.int64)[: len(step.logits_indices)] = sampling[1]
                slots[:samples], depths[:samples] = step.slots, step.depths
                firsts[:samples] = np.cumsum(step.depths) - step.depths
        slots[samples:], depths[samples:] = self._padding_slot, 1
        # Rows of padding have all remaining tokens; those behind them have none.
        positions[tokens:] = np.arange(len(ids) - tokens) % shape.longest
        token_slots[tokens:] = self._padding_slot
        row_slots[count:] = self._padding_slot
        more = np.arange(1, len(starts) - count) * shape.longest
        starts[count + 1 :] = np.minimum(tokens + more, len(ids))
        lengths[count:] = np.diff(starts[count:])
        self._static[: len(host)].copy_(host, non_blocking=True)
