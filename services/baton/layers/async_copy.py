"""Copies between host and device without the host waiting for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
_PIECE = 16 * 2**20
"""Bytes that are copied to a GPU at a time. Measured on an H200's host, from the page cache: 8 threads over
pinned pieces 30 to 45 GB/s, one thread or pageable memory 10; safetensors' own loading to the device 11 to
37, with whole tensors beside the weights in the device's memory."""


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; on a GPU through pinned memory, in the order of the stream."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    # The allocator of pinned memory reuses a block only once the copies out of it have completed.
    return host.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copies the tensor to pinned memory, which is valid once all work enqueued now has run; one that is on
    the host is returned as it is."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@contextmanager
def beside_steps(device: torch.device) -> Iterator[None]:
    """On a GPU, work that follows on a step that has been read: it waits for no later one, and goes before it
    where both are ready. Whoever wants its results waits for the stream."""
    if device.type == "cpu":
        yield
    else:
        with torch.cuda.stream(_beside(device)):
            yield


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class Upload:
    """Several arrays in one copy."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, npt.NDArray[Any]]] = []
        self._size = 0

    def add(self, array: npt.NDArray[Any]) -> int:
        """Adds an array; returns its index in the result of `send`."""
        array = np.ascontiguousarray(array)
        self._parts.append((self._size, array))
        self._size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return len(self._parts) - 1

    def send(self, device: torch.device) -> list[torch.Tensor]:
        host = torch.empty(self._size, dtype=torch.uint8, pin_memory=device.type != "cpu")
        raw = host.numpy()
        for offset, array in self._parts:
            raw[offset : offset + array.nbytes] = array.view(np.uint8).reshape(-1)
        there = host.to(device, non_blocking=True)
        return [_view(there[offset : offset + array.nbytes], array) for offset, array in self._parts]


def _view(raw: torch.Tensor, array: npt.NDArray[Any]) -> torch.Tensor:
    flat = raw.view(_torch_dtype(array.dtype))
    return flat if array.ndim == 1 else flat.view(array.shape)


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype


class PinnedPieces:
    """Two pinned pieces: one is filled while the other is copied to the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pieces = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._gone = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Flat tensors; the host converts to the target's dtype."""
        step = _PIECE // target.itemsize
        for part, there in zip(torch.split(source, step), torch.split(target, step), strict=True):
            self._turn ^= 1
            self._gone[self._turn].synchronize()
            piece = self._pieces[self._turn][: there.nbytes].view(target.dtype)
            piece.copy_(part)
            with torch.cuda.stream(self._stream):
                there.copy_(piece, non_blocking=True)
            self._gone[self._turn].record(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()
