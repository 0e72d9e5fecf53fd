"""The `nixl` transport: the receiver reads pages out of the owner's registered pool, over UCX.

The owner's host takes no part where the network can read memory (RDMA); elsewhere (TCP) UCX's thread
answers. Agents are made with NIXL's bindings, not with its `nixl_agent`: that one fixes the progress
thread's pause at 0, which keeps a thread of an idle worker polling.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from baton.transport.base import (
    EndpointRefused,
    HostPages,
    PageStore,
    TransportError,
    check_page_bytes,
    runs_of,
)
from baton.transport.pull_thread import ThreadReceiver
from baton.v1 import common_pb2 as pb

PROGRESS_MICROSECONDS = 10_000
"""The progress thread waits at most this long for UCX's file descriptors, which wake it at once."""

MemoryRange = tuple[int, int, int]
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
            raise EndpointRefused(f"nixl cannot be imported: {error}") from error
        text = "nixl is not installed: pip install 'baton-serve[nixl]'"
        raise EndpointRefused(text) from error
    except (ImportError, OSError) as error:
        raise EndpointRefused(f"nixl cannot be imported: {error}") from error
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

    def read(self, peer: str, kind: str, local: Sequence[MemoryRange], remote: Sequence[MemoryRange]) -> int:
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
        """Releases a transfer that is done. Releasing another one does not stop it: its bytes still come."""
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


BATCH_BYTES = 64 * 2**20
"""Bytes read at a time: a cancelled pull waits for the running batch."""
STALL_SECONDS = 20.0
"""Timeout of a batch. UCX detects a dead peer, but not a frozen one."""
STOP_SECONDS = 2.0
"""For the batch that runs when a pull is cancelled, or its receiver closed."""
OPEN_SECONDS = 5.0
POLL_SECONDS = 0.0001


class NixlOwner:
    """A pool that others may read. It must outlive this."""

    def __init__(self, pages: PageStore) -> None:
        """Raises TransportError."""
        memory = memory_of(pages)
        self._agent = Agent(memory, progress=True)
        self.endpoint = pb.NixlEndpoint(
            agent=self._agent.name,
            metadata=self._agent.metadata(),
            address=memory.address,
            page_bytes=pages.page_bytes,
            num_pages=pages.num_pages,
            memory=memory.kind,
            device=memory.device,
        )

    def close(self) -> None:
        """Idempotent. Pulls that run fail."""
        self._agent.close()


class NixlReceiver(ThreadReceiver):
    """Reads the owner's pool by an agent of its own.

    A read that was started cannot be taken back: NIXL reports a released one as over while its bytes still
    come. So a read that fails, or takes too long, costs the agent: with it goes the connection, and with that
    all that was under way. The next pull makes another one, which is why no two receivers share an agent.
    """

    kind = "nixl"
    stops_at_close = True

    def __init__(self, endpoint: pb.NixlEndpoint, local: PageStore, stall_seconds: float) -> None:
        """Use `open`."""
        memory = memory_of(local)
        if endpoint.memory != memory.kind:
            text = f"the peer's pool lies in {endpoint.memory or 'nothing'}, ours in {memory.kind}"
            raise EndpointRefused(text)
        check_page_bytes(endpoint.page_bytes, local)
        self._endpoint = endpoint
        self._memory = memory
        self._stall_seconds = stall_seconds
        self._batch = max(1, BATCH_BYTES // local.page_bytes)
        self._scratch = scratch(local)
        self._probe = memory_of(self._scratch)
        self._agent: Agent | None = None
        super().__init__(local, endpoint.num_pages)

    @classmethod
    async def open(
        cls, endpoint: pb.NixlEndpoint, local: PageStore, stall_seconds: float = STALL_SECONDS
    ) -> Self:
        """Reads a few bytes, to see that the peer can be reached. Raises EndpointRefused."""
        return await cls(endpoint, local, stall_seconds)._connected()

    # --- in the receiver's thread -----------------------------------------------------------------------

    def _connect(self) -> None:
        agent = Agent(self._memory, progress=False)
        try:
            name = agent.connect(self._endpoint.metadata)
            if name != self._endpoint.agent:
                raise TransportError(f"the metadata are of agent {name}, not of {self._endpoint.agent}")
            agent.register(self._probe)
            here = [(self._probe.address, self._probe.size, self._probe.device)]
            there = [(self._endpoint.address, self._probe.size, self._endpoint.device)]
            self._read(agent, here, there, OPEN_SECONDS, threading.Event())
        except BaseException:
            agent.close()
            raise
        self._agent = agent

    def _copy(self, pairs: list[tuple[int, int]], stop: threading.Event) -> None:
        try:
            for begin in range(0, len(pairs), self._batch):
                if stop.is_set():
                    raise TransportError("the pull was stopped")
                if self._agent is None:
                    self._connect()
                assert self._agent is not None
                here, there = self._ranges(pairs[begin : begin + self._batch])
                self._read(self._agent, here, there, self._stall_seconds, stop)
        except BaseException:
            self._disconnect()
            raise

    def _ranges(self, pairs: Sequence[tuple[int, int]]) -> tuple[list[MemoryRange], list[MemoryRange]]:
        size, here, there = self._local.page_bytes, self._memory, self._endpoint
        runs = list(runs_of(pairs))
        return (
            [(here.address + target * size, count * size, here.device) for _, target, count in runs],
            [(there.address + source * size, count * size, there.device) for source, _, count in runs],
        )

    def _read(
        self,
        agent: Agent,
        here: list[MemoryRange],
        there: list[MemoryRange],
        seconds: float,
        stop: threading.Event,
    ) -> None:
        """Raises TransportError; the agent must be closed then."""
        transfer = agent.read(self._endpoint.agent, self._memory.kind, here, there)
        deadline = time.monotonic() + seconds
        stopping = False
        while not agent.done(transfer):
            if stop.is_set() and not stopping:
                stopping = True
                deadline = min(deadline, time.monotonic() + STOP_SECONDS)
            if time.monotonic() > deadline:
                raise TransportError("the pull was stopped" if stopping else f"no answer for {seconds:g} s")
            time.sleep(POLL_SECONDS)
        agent.release(transfer)

    def _disconnect(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
