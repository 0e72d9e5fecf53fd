"""Memory on the host that embeddings are pulled into, on their way to a GPU. New memory for each image would
cost a page fault for each 4 KiB, and so would a new mapping of the peer's; and a GPU reads memory that is not
pinned through its driver's own. On a CPU they stay where they have been pulled to. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import torch

from baton.transport import HostPages, Receiver, TransportError
from baton.v1 import common_pb2, encode_pb2

WIDTH = 4
"""Pulls at a time."""
IDLE_SECONDS = 30.0
"""A pool that nothing has been pulled from for so long is closed: its owner may be gone, and
its memory would stay."""

OpenPool = Callable[[Sequence[common_pb2.Endpoint], HostPages, str], Awaitable[Receiver]]
"""Opens a pool, of which pages are to be copied into the local one, by its endpoints and the address of its
node. Raises TransportError."""


class PullBuffers:
    def __init__(self, open_pool: OpenPool, device: torch.device) -> None:
        """`device`: which wants the embeddings."""
        self._open_pool, self._device = open_pool, device
        self.keep = device.type != "cpu"
        """Memory and opened pools stay for the next image."""
        self._loop = asyncio.get_running_loop()
        self._free: list[_Buffer] = []
        self._turns = asyncio.Semaphore(WIDTH)
        self._closing: asyncio.TimerHandle | None = None
        self._task: asyncio.Future[None] | None = None

    async def pull(
        self, address: str, ready: encode_pb2.EmbeddingsReady, size: int
    ) -> tuple[torch.Tensor, list[int] | None]:
        """uint8 [size] on the device, and the generations of the pages after the copy; None: they cannot be
        read here. `address`: of the node; `size`: bytes, for which there are pages enough. Raises
        TransportError."""
        async with self._turns:
            buffer = self._free.pop() if self._free else _Buffer(self._device.type == "cuda")
            try:
                generations = await buffer.pull(self._open_pool, address, ready)
                return buffer.memory[:size].to(self._device, copy=self.keep), generations
            finally:
                if self.keep:
                    self._free.append(buffer)
                    self._close_later()
                else:
                    await buffer.close_unused(float("inf"))

    def _close_later(self) -> None:
        if self._closing is None:
            self._closing = self._loop.call_later(IDLE_SECONDS, self._begin_closing)

    def _begin_closing(self) -> None:
        self._closing = None
        self._task = asyncio.ensure_future(self._close_idle())

    async def _close_idle(self) -> None:
        before = self._loop.time() - IDLE_SECONDS
        for buffer in list(self._free):
            if buffer not in self._free:  # something is being pulled into it
                continue
            self._free.remove(buffer)
            try:
                await buffer.close_unused(before)
            finally:
                self._free.append(buffer)
        if any(buffer.open for buffer in self._free):
            self._close_later()

    async def close(self) -> None:
        """Nothing may be pulled any more."""
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._closing is not None:
            self._closing.cancel()
        for buffer in self._free:
            await buffer.close_unused(float("inf"))


class _Buffer:
    """For one pull at a time."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._page_bytes = 0
        self.open: dict[str, _OpenPool] = {}
        """Pools whose pages are copied into this memory, by their nodes' addresses."""

    async def pull(
        self, open_pool: OpenPool, address: str, ready: encode_pb2.EmbeddingsReady
    ) -> list[int] | None:
        pages = list(ready.page_ids)
        if ready.page_bytes != self._page_bytes or len(pages) * self._page_bytes > len(self.memory):
            await self.close_unused(float("inf"))
            count = 1 << (len(pages) - 1).bit_length()
            self._page_bytes = ready.page_bytes
            self.memory = torch.empty(count * ready.page_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        key = b"".join(each.SerializeToString(deterministic=True) for each in ready.endpoints)
        if address in self.open and self.open[address].key != key:  # of the node's life before
            await self._close(address)
        if address not in self.open:
            local = HostPages(self.memory.numpy().data, ready.page_bytes)
            self.open[address] = _OpenPool(await open_pool(ready.endpoints, local, address), key)
        receiver = self.open[address].receiver
        try:
            await receiver.pull([(page, number) for number, page in enumerate(pages)])
            generations = receiver.generations(pages)
        except TransportError:
            await self._close(address)
            raise
        self.open[address].used = asyncio.get_running_loop().time()
        return generations

    async def close_unused(self, before: float) -> None:
        """Closes pools that were last used before this time of the event loop's."""
        for address in [address for address, each in self.open.items() if each.used < before]:
            await self._close(address)

    async def _close(self, address: str) -> None:
        if (pool := self.open.pop(address, None)) is not None:
            await pool.receiver.close()


@dataclass(slots=True)
class _OpenPool:
    receiver: Receiver
    key: bytes
    """Endpoints of the node."""
    used: float = 0.0
    """When something was last pulled, by the event loop's time."""
