"""CUDA graphs of small steps that hold prompt chunks: one per number of tokens, over static buffers.

Kernel by kernel, the host takes longer to launch such a step than the device to run it. A step is padded with
the tokens of one more row, in the slot after the last, whose page table names a spare page.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from baton.engine.graphs import Progress, capture
from baton.engine.ragged import Ragged

SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of a step. From 512 on, an 8B model on an H200 computes a step longer than the host launches it."""
FEW_ROWS = 8
"""Steps of at most this many rows have separate graphs: with few rows attention is split further."""


@dataclass(slots=True)
class ChunkInputs:
    """Views of the static buffers, for `tokens` of `rows` and a row of padding; int32."""

    ids: torch.Tensor
    """[tokens]: -1: the last token of the row's slot."""
    positions: torch.Tensor
    token_slots: torch.Tensor
    row_slots: torch.Tensor
    """[rows + 1]"""
    lengths: torch.Tensor
    starts: torch.Tensor
    """[rows + 2]"""
    last: torch.Tensor
    """[rows]: the tokens whose logits are wanted; 0 where there are fewer."""
    logits: torch.Tensor
    """[rows, vocab]"""


Work = Callable[[ChunkInputs], None]
"""The part of a step up to its logits."""


class ChunkGraphs:
    """Captured largest first."""

    def __init__(
        self,
        num_slots: int,
        context_length: int,
        logits: torch.Tensor,
        work: Work,
        pool: Any,
        progress: Progress | None = None,
    ) -> None:
        """`logits`: a buffer [num_slots, vocab]. `pool`: a memory pool shared with graphs that never run
        at the same time."""
        self._padding_slot = num_slots
        self._logits = logits
        device = logits.device
        # A step has no more rows than tokens, nor than slots.
        self._shapes = sorted(
            {
                (size, min(rows, size, num_slots))
                for size in SIZES
                for rows in (FEW_ROWS, size)
                if size <= context_length
            }
        )
        report = progress or (lambda done, total: None)
        started = time.monotonic()
        free = torch.cuda.mem_get_info(device)[0]
        longest = max((self._length(*shape) for shape in self._shapes), default=0)
        self._static = torch.zeros(longest, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        for done, shape in enumerate(reversed(self._shapes)):
            report(done, len(self._shapes))
            self._fill(shape, None)
            self._graphs[shape] = capture(work, self._inputs(shape), pool, device)
        torch.cuda.synchronize(device)
        report(len(self._shapes), len(self._shapes))
        self.seconds = time.monotonic() - started
        self.bytes = free - torch.cuda.mem_get_info(device)[0]
        """Device memory that they took, and what torch reserved to warm up for them."""

    def shape(self, step: Ragged) -> tuple[int, int] | None:
        """Tokens and rows of the graph for this step; None: no graph fits."""
        rows = max(len(step.rows), len(step.slots))
        fitting = ((size, most) for size, most in self._shapes if size >= step.tokens and most >= rows)
        return next(fitting, None)

    def run(self, shape: tuple[int, int], step: Ragged) -> torch.Tensor:
        """Enqueues the step; returns the logits [samples, vocab] that it will write."""
        self._fill(shape, step)
        self._graphs[shape].replay()
        return self._logits[: len(step.slots)]

    @staticmethod
    def _lengths(size: int, rows: int) -> tuple[int, ...]:
        """Lengths of the fields of ChunkInputs, which lie one behind the other."""
        return (size, size, size, rows + 1, rows + 1, rows + 2, rows)

    def _length(self, size: int, rows: int) -> int:
        return sum(self._lengths(size, rows))

    def _inputs(self, shape: tuple[int, int]) -> ChunkInputs:
        lanes = torch.split(self._static[: self._length(*shape)], list(self._lengths(*shape)))
        ids, positions, token_slots, row_slots, lengths, starts, last = lanes
        logits = self._logits[: shape[1]]
        return ChunkInputs(ids, positions, token_slots, row_slots, lengths, starts, last, logits)

    def _fill(self, shape: tuple[int, int], step: Ragged | None) -> None:
        """Enqueues the copy of a step's inputs; without a step, of padding only."""
        host = torch.zeros(self._length(*shape), dtype=torch.int32, pin_memory=True)
        lanes = np.split(host.numpy(), np.cumsum(self._lengths(*shape))[:-1])
        ids, positions, token_slots, row_slots, lengths, starts, last = lanes
        tokens = count = 0
        if step is not None:
            tokens, count = step.tokens, len(step.rows)
            ids[:tokens], positions[:tokens] = step.ids, step.positions
            token_slots[:tokens] = step.token_slots
            row_slots[:count], lengths[:count] = step.row_slots, step.lengths
            starts[: count + 1] = step.starts
            last[: len(step.last)] = step.last
        # The padding row has all remaining tokens; rows behind it have none.
        left = len(ids) - tokens
        positions[tokens:] = np.arange(left)
        token_slots[tokens:] = self._padding_slot
        row_slots[count:] = self._padding_slot
        lengths[count] = left
        starts[count + 1 :] = len(ids)
        self._static[: len(host)].copy_(host, non_blocking=True)
