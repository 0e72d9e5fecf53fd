"""CUDA graphs over static buffers, and those of decode steps, one per batch size."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Progress = Callable[[int, int], None]
"""Called with (graphs captured, graphs in all)."""

Work = Callable[["Inputs"], None]
"""Part of a decode step: up to the logits, or from the logits to the result."""


def batch_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, ... up to `most`, which is always one of them."""
    sizes = [size for size in (1, 2, 4, *range(8, most, 8)) if size < most]
    return (*sizes, most)


@dataclass(slots=True)
class Inputs:
    """Inputs of the first rows of a step; views of the static buffers."""

    keys: torch.Tensor
    """int64: generator states."""
    slots: torch.Tensor
    """int32"""
    positions: torch.Tensor
    """int32: of the rows' input tokens."""
    shifts: torch.Tensor
    """int32: see HostBatch."""
    temperatures: torch.Tensor
    """float32"""
    logits: torch.Tensor
    """[rows, vocab]"""
    result: torch.Tensor
    """int32 [rows, 2]: the token, and the bits of the largest logit."""
    masked: torch.Tensor
    """int32: each row's index in `words`, or -1. Of steps with masks."""
    words: torch.Tensor
    """int32 [masks, words]: see engine.grammar_masks."""


@dataclass(slots=True)
class _Graph:
    forward: torch.cuda.CUDAGraph
    choose: torch.cuda.CUDAGraph
    choose_masked: torch.cuda.CUDAGraph


In = TypeVar("In")


def capture(work: Callable[[In], None], inputs: In, pool: Any, device: torch.device) -> torch.cuda.CUDAGraph:
    """Captures the work's launches as a graph; runs the work once before, so all ranks of a worker capture at
    the same time."""
    # A first run outside the capture: libraries allocate and kernels compile at first use, which a capture
    # does not allow.
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work(inputs)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=side):
        work(inputs)
    return graph


class DecodeGraphs:
    """Captured largest first in one memory pool; a batch is padded to the next size.

    Padding rows have the slot after the last, whose page table names a spare page.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        num_slots: int,
        logits: torch.Tensor,
        forward: Work,
        choose: Work,
        choose_masked: Work,
        progress: Progress | None = None,
    ) -> None:
        """`logits`: a buffer [rows, vocab] for the largest size. choose_masked: the same as `choose`, under
        masks."""
        self._sizes = tuple(sorted(sizes))
        self._rows = self._sizes[-1] + self._sizes[-1] % 2
        self._padding_slot = num_slots
        self._logits = logits
        self._device = device = logits.device
        self._static = self._host(0)[0].to(device)
        self._result = torch.zeros(self._rows, 2, dtype=torch.int32, device=device)
        width = -(-logits.shape[1] // 32)
        self._words = torch.zeros(self._rows, width, dtype=torch.int32, device=device)
        self._graphs: dict[int, _Graph] = {}
        report = progress or (lambda done, total: None)
        started = time.monotonic()
        free = torch.cuda.mem_get_info(device)[0]
        self.pool: Any = torch.cuda.graph_pool_handle()
        """Memory pool of replays, shared by graphs that never run at the same time."""
        for done, size in enumerate(reversed(self._sizes)):
            report(done, len(self._sizes))
            inputs = self.inputs(size)
            self._graphs[size] = _Graph(
                *(capture(work, inputs, self.pool, device) for work in (forward, choose, choose_masked))
            )
        torch.cuda.synchronize(device)
        report(len(self._sizes), len(self._sizes))
        self.seconds = time.monotonic() - started
        self.bytes = free - torch.cuda.mem_get_info(device)[0]
        """Device memory that the graphs took, and what torch reserved to warm up for them."""

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    def fill(
        self,
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        shifts: npt.NDArray[np.int32],
        sampling: tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]] | None,
        masked: Sequence[int] = (),
    ) -> None:
        """Enqueues the copy of a step's inputs: slots, whose last tokens are at `positions`; `shifts`: see
        HostBatch; `sampling`: temperatures and generator states, None: the caller samples from the logits;
        masked: the rows that will have masks, in their order."""
        count = len(slots)
        host, lanes = self._host(count)
        lanes[2, :count] = slots
        lanes[3, :count] = positions
        lanes[6, :count] = shifts
        if sampling is not None:
            lanes[:2].reshape(-1).view(np.int64)[:count] = sampling[1]
            lanes[4].view(np.float32)[:count] = sampling[0]
        if masked:
            lanes[5] = -1
            lanes[5, masked] = np.arange(len(masked))
        self._static.copy_(host, non_blocking=True)

    def replay(self, rows: int) -> None:
        """Enqueues a step of `rows` rows after `fill`, up to its logits."""
        self._graph(rows).forward.replay()

    def choose(self, rows: int, words: torch.Tensor | None) -> torch.Tensor:
        """Enqueues its sampling, if `fill` was given what that depends on; words: of its masks, on the host.
        Returns the result: see Inputs."""
        graph = self._graph(rows)
        if words is None:
            graph.choose.replay()
        else:
            self._words[: len(words)].copy_(words, non_blocking=True)
            graph.choose_masked.replay()
        return self._result[:rows]

    def logits(self, rows: int) -> torch.Tensor:
        """The buffer [rows, vocab] that a step writes."""
        return self._logits[:rows]

    def _graph(self, rows: int) -> _Graph:
        return self._graphs[self._sizes[bisect.bisect_left(self._sizes, rows)]]

    def _host(self, rows: int) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        """A host buffer for the static inputs, int32 [7, rows]: keys (two lanes), slots, positions,
        temperatures, indices of masks, shifts; the caller fills `rows` of it."""
        host = torch.zeros(7, self._rows, dtype=torch.int32, pin_memory=True)
        lanes = host.numpy()
        lanes[2, rows:] = self._padding_slot
        return host, lanes

    def inputs(self, size: int) -> Inputs:
        """The buffers of the first `size` rows."""
        static = self._static
        keys = static[:2].view(-1).view(torch.int64)
        return Inputs(
            keys[:size],
            static[2, :size],
            static[3, :size],
            static[6, :size],
            static[4].view(torch.float32)[:size],
            self._logits[:size],
            self._result[:size],
            static[5, :size],
            self._words,
        )
