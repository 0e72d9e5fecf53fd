"""The floor of a decode step: the bytes that it must move, over what the device's memory gives."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from baton.models.config import read_config

COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
"""Of the source of one copy: far more than caches hold."""
COPIES = 12


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy inside the device's memory; the best of several. Raises
    torch.OutOfMemoryError."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(_seconds(source, target) for _ in range(COPIES))
    return 2 * source.nbytes / best


def _seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    if source.device.type == "cpu":
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started
    with torch.cuda.device(source.device):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        target.copy_(source)
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3


def weight_bytes(path: Path, parameters: int, dtype: torch.dtype) -> int:
    """What one step reads of a model's weights: all but an embedding that is not also the output projection,
    of which it reads only a row a token."""
    config = read_config(path)
    unread = 0 if config.tied else config.vocab_size * config.hidden_size
    return (parameters - unread) * dtype.itemsize
