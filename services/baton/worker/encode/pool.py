"""Embeddings of images in pages that others pull: leases, generations; those least recently used make room.
On the event loop, but for `write`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.image_spans import ImageSpan
from baton.kvcache.page_allocator import PageAllocator, PageCounts
from baton.rpc.logs import get_logger
from baton.transport import cuda_runtime
from baton.transport.base import TransportError, nothing

_log = get_logger()

LEND_SECONDS = 30.0
"""After that the pages of a lease may be reused; a pull takes much less."""


@dataclass(slots=True, eq=False)
class StoredEmbeddings:
    """Those of one image."""

    digest: bytes
    shape: tuple[int, int, int]
    """Shape of the embeddings of VisionTower.encode."""
    nbytes: int
    pages: list[int]
    leases: list[EmbeddingLease] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class EmbeddingLease:
    """A promise to keep the pages of an image, for somebody who copies them."""

    stored: StoredEmbeddings
    generations: list[int]
    deadline: float
    stood: bool = True
    """The pages have not been reused."""


class EmbeddingPool:
    """`OutOfPages` is raised where leases leave no room."""

    def __init__(
        self,
        rows: npt.NDArray[np.uint8],
        generations: MutableSequence[int],
        clock: Callable[[], float],
        lend_seconds: float = LEND_SECONDS,
    ) -> None:
        """`rows`: [pages, bytes], which peers read; `generations`: of each page, likewise."""
        self._rows, self._clock, self._lend_seconds = rows, clock, lend_seconds
        self._allocator = PageAllocator(len(rows), generations)
        self._stored: OrderedDict[bytes, StoredEmbeddings] = OrderedDict()
        """The least recently used first."""

    def lend(self, image: ImageSpan) -> EmbeddingLease | None:
        """None: the image is not here."""
        stored = self._stored.get(image.digest)
        if stored is None or stored.shape[1] != image.tokens:
            return None
        self._stored.move_to_end(image.digest)
        generations = [self._allocator.generation(page) for page in stored.pages]
        lease = EmbeddingLease(stored, generations, self._clock() + self._lend_seconds)
        stored.leases.append(lease)
        return lease

    def give_back(self, lease: EmbeddingLease) -> None:
        lease.stored.leases.remove(lease)

    def take(self, digest: bytes, embeddings: torch.Tensor) -> StoredEmbeddings:
        """Pages to be written. Generations grow now, before anything is. Raises OutOfPages."""
        count = -(-embeddings.nbytes // self._rows.shape[1])
        now = self._clock()
        for each in list(self._stored.values()):
            if self._allocator.free >= count:
                break
            if all(lease.deadline <= now for lease in each.leases):
                self._evict(each)
        parts, tokens, values = embeddings.shape
        return StoredEmbeddings(
            digest, (parts, tokens, values), embeddings.nbytes, self._allocator.take(count)
        )

    def write(self, stored: StoredEmbeddings, embeddings: torch.Tensor) -> None:
        """`embeddings`: on any device, from where they are copied at once. In any thread."""
        data = embeddings.contiguous().view(torch.uint8).reshape(-1)
        size = self._rows.shape[1]
        for number, page in enumerate(stored.pages):
            part = data[number * size : (number + 1) * size]
            if part.is_cuda:
                torch.from_numpy(self._rows[page])[: len(part)].copy_(part)
            else:  # by one thread: the tower's are busy
                self._rows[page, : len(part)] = part.numpy()

    def keep(self, stored: StoredEmbeddings) -> None:
        """They have been written, and may be lent."""
        before = self._stored.get(stored.digest)
        if before is not None:
            self._evict(before)
        self._allocator.to_cached(stored.pages)
        self._stored[stored.digest] = stored

    def drop(self, stored: StoredEmbeddings) -> None:
        """They could not be written."""
        self._allocator.give_back(stored.pages)

    def _evict(self, stored: StoredEmbeddings) -> None:
        for lease in stored.leases:
            lease.stood = False
        del self._stored[stored.digest]
        self._allocator.drop_cached(stored.pages)

    def read(self, lease: EmbeddingLease) -> bytes:
        """A copy of [parts, tokens, values]."""
        return self._rows[lease.stored.pages].tobytes()[: lease.stored.nbytes]

    @property
    def leases(self) -> int:
        return sum(len(each.leases) for each in self._stored.values())

    def counts(self) -> PageCounts:
        return self._allocator.counts()


def pin(rows: npt.NDArray[np.uint8], device: torch.device) -> Callable[[], object]:
    """Has a GPU write this memory without its driver's own in between. Returns what
    undoes that. Where it cannot be had nothing changes, but for a line in the log. Blocks."""
    try:
        cuda_runtime.use(device)  # else a thread has the first GPU's driver take memory there
        cuda_runtime.pin(rows.ctypes.data, rows.nbytes)
    except (RuntimeError, TransportError) as error:
        why = cuda_runtime.one_line(error)
        _log.warning("embeddings are copied slowly: their memory cannot be pinned", error=why)
        return nothing
    return partial(cuda_runtime.unpin, rows.ctypes.data)
