"""Copies pages between two pools in the memory of GPUs, on a stream of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from baton.transport import cuda
from baton.transport.base import TransportError
from baton.transport.ways import Way, item_bytes, runs_of

PART_BYTES = 256 * 2**20
"""So much is enqueued at a time, twice at most: a cancelled pull ends within two parts."""


def kernel_available() -> bool:
    """Whether `sgl_kernel.transfer_kv` can be used; imports it."""
    try:
        import sgl_kernel.kvcacheio  # noqa: F401
    except Exception:  # an installation that does not fit this machine raises anything
        return False
    return True


REHEARSAL_BYTES = 2**20


class PageCopier:
    """Belongs to one thread. Nothing that it has enqueued runs any more once `copy` returned or raised."""

    def __init__(self, pool: torch.Tensor, peer: cuda.Pointer, peer_pages: int) -> None:
        """`pool`: the local one, uint8 [page, byte]. `peer`: the other one's page 0, `peer_pages` pages of as
        many bytes, mapped into this device."""
        self._device = pool.device
        self._pool = pool
        self._page_bytes = pool.shape[1]
        self._peer = peer
        self._peer_bytes = peer_pages * self._page_bytes
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._engine = cuda.Copier(self._stream)
        self._transfer: Callable[..., Any] | None = None
        with torch.cuda.stream(self._stream):  # what this stream writes, no other may be using still
            size = min(REHEARSAL_BYTES, self._page_bytes)
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self._device)

    def copy(self, pairs: Sequence[tuple[int, int]], way: Way, stop: threading.Event) -> None:
        """Copies pages (peer's, local); returns when the host has seen the copies complete, or, once `stop`
        is set, that those under way are. Waits without the interpreter's lock. Raises TransportError."""
        pages = max(1, PART_BYTES // self._page_bytes)
        flying: deque[torch.cuda.Event] = deque()
        try:
            with torch.cuda.stream(self._stream):
                for begin in range(0, len(pairs), pages):
                    if stop.is_set():
                        break
                    if len(flying) == 2:
                        flying.popleft().synchronize()
                    part = pairs[begin : begin + pages]
                    if way.quota:
                        self._by_kernel(part, way.quota)
                    else:
                        self._by_engine(part)
                    # Spins while there are more cores than contexts: to be woken takes longer than to copy
                    # a short prompt.
                    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    done.record()
                    flying.append(done)
            while flying:
                flying.popleft().synchronize()
        except BaseException as error:
            self._settle()
            if isinstance(error, RuntimeError):
                raise TransportError(f"copying between GPUs failed: {cuda.one_line(error)}") from error
            raise

    def rehearse(self) -> None:
        """Copies a little of the peer's pool to nowhere. After a pause of 0.1 s the first copy takes 0.3 ms
        more, of an H200 and its host: what is rehearsed meanwhile does not. Raises TransportError."""
        try:
            self._engine.copy(self._scratch.data_ptr(), self._peer, len(self._scratch))
            self._stream.synchronize()
        except RuntimeError as error:
            raise TransportError(f"copying between GPUs failed: {cuda.one_line(error)}") from error

    def _settle(self) -> None:
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            # The context is lost, and with it everything that it was running.
            raise TransportError(f"the GPU has failed: {cuda.one_line(error)}") from error

    def _by_engine(self, pairs: Sequence[tuple[int, int]]) -> None:
        size, local = self._page_bytes, self._pool.data_ptr()
        for source, target, count in runs_of(pairs):
            self._engine.copy(local + target * size, self._peer + source * size, count * size)

    def _by_kernel(self, pairs: Sequence[tuple[int, int]], quota: int) -> None:
        if self._transfer is None:
            from sgl_kernel.kvcacheio import transfer_kv_per_layer_mla

            self._transfer = transfer_kv_per_layer_mla
        peer = cuda.as_tensor(self._peer, self._peer_bytes)
        item = item_bytes(self._page_bytes)
        items = self._page_bytes // item
        pages = torch.tensor(pairs, dtype=torch.int64).t().contiguous().pin_memory()
        pages = pages.to(self._device, non_blocking=True)
        within = torch.arange(items, device=self._device)
        sources, targets = (pages[:, :, None] * items + within).view(2, -1)
        self._transfer(peer, self._pool, sources, targets, item, quota)
