"""The few calls of the CUDA runtime that torch has no public name for, by cuda-bindings (which torch's CUDA
builds depend on).

Everything here works on torch's own context: each device has one primary context per process. All functions
raise TransportError with one line.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from baton.transport.base import EndpointRefused, TransportError

HANDLE_BYTES = 64
Pointer = int


def problem() -> str | None:
    """Why nothing here can work in this process; None: it can. Makes no context on a device."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        _bindings()
    except EndpointRefused as error:
        return str(error)
    return None


def _bindings() -> tuple[Any, Any]:
    """cuda.bindings.runtime and .driver; imported late, as they are not everywhere."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        text = f"cuda-bindings cannot be imported ({error}); install it: pip install cuda-bindings"
        raise EndpointRefused(text) from error
    return runtime, driver


def _checked(what: str, answer: tuple[Any, ...]) -> Any:
    error, *rest = answer
    if int(error) != 0:
        raise TransportError(f"{what}: {error.name}")
    return rest[0] if rest else None


def use(device: torch.device) -> None:
    """Makes the device this thread's. Every thread that calls the functions below calls this first."""
    runtime, _ = _bindings()
    index = device_index(device)
    torch.cuda.set_device(index)
    # torch's set_device does nothing for a device that is current by default: the context might be missing.
    _checked("cudaSetDevice", runtime.cudaSetDevice(index))


def uuid_of(device: torch.device) -> str:
    """The GPU's UUID, equal in every process whatever its number there."""
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: str, default: torch.device) -> torch.device:
    """The GPU with this UUID; one that this process does not see: `default`."""
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return next((device for device in devices if uuid_of(device) == uuid), default)


def device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def export_memory(pointer: Pointer) -> tuple[bytes, int]:
    """The IPC handle of the allocation that `pointer` lies in, and the offset there: torch's allocator hands
    out parts of allocations, and a handle always means a whole one."""
    runtime, driver = _bindings()
    error, base, _ = driver.cuMemGetAddressRange(pointer)
    if int(error) != 0:
        raise TransportError(f"cuMemGetAddressRange: {error.name}")
    try:
        handle = _checked("cudaIpcGetMemHandle", runtime.cudaIpcGetMemHandle(int(base)))
    except TransportError as failure:
        if "expandable_segments" in _allocator_settings():
            hint = "the pool lies in an expandable segment; unset expandable_segments in PYTORCH_ALLOC_CONF"
            raise TransportError(f"{failure}: {hint}") from failure
        raise
    return bytes(handle.reserved), pointer - int(base)


def _allocator_settings() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def open_memory(handle: bytes) -> Pointer:
    """Maps another process's allocation into this thread's device, with peer access if it lies on another
    one. The same handle opened twice gives the same address, and is to be closed twice."""
    runtime, _ = _bindings()
    if len(handle) != HANDLE_BYTES:
        raise TransportError(f"an IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
    there = runtime.cudaIpcMemHandle_t()
    there.reserved = handle
    flag = runtime.cudaIpcMemLazyEnablePeerAccess
    return int(_checked("cudaIpcOpenMemHandle", runtime.cudaIpcOpenMemHandle(there, flag)))


def mapped_bytes(pointer: Pointer) -> int:
    """Size of the allocation that begins at an address."""
    _, driver = _bindings()
    error, _, size = driver.cuMemGetAddressRange(pointer)
    if int(error) != 0:
        raise TransportError(f"cuMemGetAddressRange: {error.name}")
    return int(size)


def close_memory(pointer: Pointer) -> None:
    runtime, _ = _bindings()
    _checked("cudaIpcCloseMemHandle", runtime.cudaIpcCloseMemHandle(pointer))


def pin(pointer: Pointer, size: int) -> None:
    """Page-locks the host's memory there for all GPUs, until `unpin`. Blocks."""
    runtime, _ = _bindings()
    _checked("cudaHostRegister", runtime.cudaHostRegister(pointer, size, runtime.cudaHostRegisterPortable))


def unpin(pointer: Pointer) -> None:
    """Before the memory is freed: what lies there next could not be pinned."""
    runtime, _ = _bindings()
    _checked("cudaHostUnregister", runtime.cudaHostUnregister(pointer))


class Copier:
    """Enqueues copies on one stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        runtime, _ = _bindings()
        self._copy = runtime.cudaMemcpyAsync
        self._copy_rows = runtime.cudaMemcpy2DAsync
        self._kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._stream = runtime.cudaStream_t(stream.cuda_stream)

    def copy(self, target: Pointer, source: Pointer, size: int) -> None:
        """Bytes from anywhere to anywhere; the driver knows where addresses lie."""
        _checked("cudaMemcpyAsync", self._copy(target, source, size, self._kind, self._stream))

    def copy_rows(
        self, target: Pointer, target_pitch: int, source: Pointer, source_pitch: int, width: int, rows: int
    ) -> None:
        """`width` bytes of each of so many rows, which begin a pitch apart."""
        answer = self._copy_rows(
            target, target_pitch, source, source_pitch, width, rows, self._kind, self._stream
        )
        _checked("cudaMemcpy2DAsync", answer)


class _Span:
    """Device memory as torch takes it from others (CUDA array interface, version 3)."""

    def __init__(self, pointer: Pointer, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def as_tensor(pointer: Pointer, size: int) -> torch.Tensor:
    """uint8 [size] over memory that must outlive it."""
    tensor: torch.Tensor = torch.as_tensor(_Span(pointer, size))
    return tensor


def one_line(error: BaseException) -> str:
    """torch explains CUDA errors at length."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
