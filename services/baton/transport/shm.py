"""The `shm` transport: the receiver maps the owner's segment read-only and copies pages out of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from baton.transport.base import EndpointRefused, PageStore, Refusal, TransportError, unheard
from baton.transport.mapped import MappedSegment
from baton.transport.pages import HostPages, check_pairs, check_step
from baton.transport.pull_thread import PullThread
from baton.v1 import common_pb2 as pb

BATCH_BYTES = 2**20
"""Small pages are copied in batches of this size: every copy releases the interpreter lock, and may wait 5
ms to get it back."""

Indexes = npt.NDArray[np.intp]


class ShmReceiver:
    """The mapping outlives the peer and lasts until `close`."""

    kind = "shm"

    def __init__(self, endpoint: pb.ShmEndpoint, local: PageStore) -> None:
        """`local`: a pool on the host. Raises TransportError when the segment cannot be opened or is not the
        endpoint's."""
        if not isinstance(local, HostPages):
            raise EndpointRefused(Refusal.GPU_POOL, "the local pool is on a GPU")
        if endpoint.page_bytes != local.page_bytes:
            text = f"the peer's pages have {endpoint.page_bytes} bytes, not {local.page_bytes}"
            raise EndpointRefused(Refusal.PAGE_BYTES, text)
        self._local = local.rows()
        self._peer = MappedSegment(endpoint)
        self._batch = max(1, BATCH_BYTES // local.page_bytes)
        self._thread = PullThread("baton-shm", self._peer.retired)
        self._closed = False

    @property
    def sees_steps(self) -> bool:
        return self._peer.sees_steps

    async def pull(
        self,
        pairs: Sequence[tuple[int, int]],
        step: int = 0,
        copied: Callable[[float], None] = unheard,
    ) -> None:
        self._require_open()
        check_pairs(pairs, self._peer.num_pages, len(self._local))
        check_step(step, self)
        index = np.array(pairs, dtype=np.intp).reshape(-1, 2)

        def work(stop: threading.Event) -> None:
            began = time.monotonic()
            self._copy(index[:, 0], index[:, 1], stop)
            if not stop.is_set():
                copied(time.monotonic() - began)

        await self._thread.run(work, step)

    def generations(self, pages: Sequence[int]) -> list[int]:
        """Raises TransportError for a page that is out of range, and after `close`."""
        self._require_open()
        return self._peer.generations(pages)

    async def close(self) -> None:
        self._closed = True
        await self._thread.settle()
        self._thread.close()
        self._peer.close()

    def _copy(self, source: Indexes, target: Indexes, stop: threading.Event) -> None:
        peer = self._peer.pages
        for begin in range(0, len(source), self._batch):
            if stop.is_set():
                return
            if self._batch == 1:
                self._local[target[begin]] = peer[source[begin]]
            else:
                part = slice(begin, begin + self._batch)
                self._local[target[part]] = peer[source[part]]

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError("the receiver is closed")
