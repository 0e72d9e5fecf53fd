"""Copies between host and device without the host waiting for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16


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
