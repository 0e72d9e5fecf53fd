"""An agent of NIXL's UCX plugin, as far as the `nixl` transport needs it.

Made with NIXL's bindings, not with its `nixl_agent`: that one fixes the progress thread's pause at 0, which
keeps a thread of an idle worker polling.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from baton.transport.base import EndpointRefused, PageStore, Refusal, TransportError
from baton.transport.pages import HostPages

PROGRESS_MICROSECONDS = 10_000
"""The progress thread waits so long for UCX's file descriptors, which wake it at once."""

Range = tuple[int, int, int]
"""Address, bytes, device."""


@dataclass(frozen=True, slots=True)
class Memory:
    """`kind`: NIXL's word, "DRAM" or "VRAM". `device`: the GPU's number; 0 for DRAM."""

    kind: str
    address: int
    size: int
    device: int


def bindings() -> Any:
    """Raises EndpointRefused when NIXL is not here, or not for this machine."""
    try:
        from nixl import _bindings
    except ModuleNotFoundError as error:
        if error.name != "nixl":
            raise EndpointRefused(Refusal.NO_NIXL, f"nixl cannot be imported: {error}") from error
        text = "nixl is not installed: pip install 'baton-serve[nixl]'"
        raise EndpointRefused(Refusal.NO_NIXL, text) from error
    except (ImportError, OSError) as error:
        raise EndpointRefused(Refusal.NO_NIXL, f"nixl cannot be imported: {error}") from error
    return _bindings


def problem() -> str | None:
    """Why `nixl` does not work here; None: an agent can be made."""
    memory = bytearray(4096)
    try:
        Agent(memory_of(HostPages(memoryview(memory), 4096)), progress=False).close()
    except TransportError as error:
        return str(error)
    return None


def memory_of(pages: PageStore) -> Memory:
    """Where a local pool lies. Raises ValueError when it is read-only."""
    size = pages.page_bytes * pages.num_pages
    if isinstance(pages, HostPages):
        return Memory("DRAM", pages.rows().ctypes.data, size, 0)
    from baton.transport.cuda_pages import CudaPages

    assert isinstance(pages, CudaPages)
    return Memory("VRAM", pages.pool.data_ptr(), size, pages.device.index or 0)


def scratch(pages: PageStore) -> PageStore:
    """One small page, of the sort of memory that `pages` are in."""
    size = min(64, pages.page_bytes)
    if isinstance(pages, HostPages):
        return HostPages(memoryview(bytearray(size)), size)
    import torch

    from baton.transport.cuda_pages import CudaPages

    assert isinstance(pages, CudaPages)
    return CudaPages(torch.zeros(1, size, dtype=torch.uint8, device=pages.device), 1)


class Agent:
    """With registered memory, which must outlive it. To be used in one thread at a time."""

    def __init__(self, memory: Memory, progress: bool) -> None:
        """`progress`: answers peers in a thread of its own; else data moves only inside `done`. Raises
        TransportError."""
        self._nixl = bindings()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = progress
        config.useListenThread = False
        config.pthrDelay = PROGRESS_MICROSECONDS
        self.name = f"baton-{secrets.token_hex(12)}"
        with _errors("no UCX agent can be made"):
            self._agent: Any = self._nixl.nixlAgent(self.name, config)
            options, _ = self._agent.getPluginParams("UCX")
            self._backend = self._agent.createBackend("UCX", options)
        self.register(memory)

    def register(self, memory: Memory) -> None:
        """Raises TransportError."""
        with _errors(f"{memory.size / 2**30:.2f} GiB of {memory.kind} cannot be registered"):
            what = self._nixl.nixlRegDList(
                self._kind(memory.kind), [(memory.address, memory.size, memory.device, "")]
            )
            self._agent.registerMem(what, [self._backend])

    def metadata(self) -> bytes:
        """Addresses and keys, for `connect`."""
        with _errors("the agent has no metadata"):
            return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes) -> str:
        """The peer's name. Raises TransportError."""
        with _errors("the peer's agent cannot be reached"):
            return str(self._agent.loadRemoteMD(metadata), "utf-8", "replace")

    def read(self, peer: str, kind: str, local: Sequence[Range], remote: Sequence[Range]) -> int:
        """Starts reading; ends with `done`, then `release`. Raises TransportError."""
        with _errors("the peer's memory cannot be read"):
            here = self._nixl.nixlXferDList(self._kind(kind), list(local))
            there = self._nixl.nixlXferDList(self._kind(kind), list(remote))
            transfer = self._agent.createXferReq(self._nixl.NIXL_READ, here, there, peer, "", [self._backend])
            self._agent.postXferReq(transfer, "")
            return int(transfer)

    def done(self, transfer: int) -> bool:
        """Raises TransportError when it failed; other parts of it may be running still, until `close`."""
        with _errors("the read failed"):
            return bool(self._agent.getXferStatus(transfer) == self._nixl.NIXL_SUCCESS)

    def release(self, transfer: int) -> None:
        """Of a transfer that is done. Releasing another one does not stop it: its bytes still come."""
        with _errors("the read cannot be released"):
            self._agent.releaseXferReq(transfer)

    def close(self) -> None:
        """Ends all connections: nothing is read into the registered memory any more. Idempotent."""
        self._agent = None

    def _kind(self, kind: str) -> Any:
        return self._nixl.VRAM_SEG if kind == "VRAM" else self._nixl.DRAM_SEG


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """NIXL's exceptions have no common class of their own."""
    try:
        yield
    except Exception as error:
        raise TransportError(f"{what}: {error}") from error
