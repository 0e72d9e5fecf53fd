"""Copies pages between two pools in the memory of GPUs, by the copy engine or by a kernel."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from baton.transport import cuda_runtime
from baton.transport.base import TransportError, pieces_of, runs_of

if TYPE_CHECKING:
    from baton.transport.cuda_pages import CudaPages, PagePart

ITEM_BYTES = 4096
ENGINE_RATE = 337e9
COMMAND_SECONDS = 5e-6
KERNEL_RATES = {8: 118e9, 32: 364e9}
KERNEL_SECONDS = 80e-6
BUSY_QUOTA, IDLE_QUOTA = 8, 32


@dataclass(frozen=True, slots=True)
class CopyStrategy:
    """`quota` 0: one copy-engine command for each run of adjacent pages. Else one kernel
    (`sgl_kernel.transfer_kv`) for all pages, on so many blocks."""

    quota: int = 0

    def __str__(self) -> str:
        return f"kernel, quota {self.quota}" if self.quota else "copy engine"


COPY_ENGINE = CopyStrategy()


def choose_copy_strategy(
    pages: int, runs: int, page_bytes: int, busy: bool, kernel: bool = True
) -> CopyStrategy:
    """The faster strategy for a pull of `pages` pages that lie in `runs` runs. It is the copy engine, which
    leaves all multiprocessors to others, unless a kernel saves a quarter of the time.

    `busy`: decode steps run on this GPU meanwhile, and a kernel may take few of its multiprocessors only.
    `kernel`: sgl_kernel is there.

    Measured on H200s. The copy engine: 337 GB/s between two GPUs, but each command costs the thread that
    enqueues it 5 µs, which is what copies of less than 1.7 MB are bound by (64 KiB at random addresses: 15
    GB/s). One kernel for all pages takes 80 µs more to get going, for its indices; it pulls 118 GB/s at a
    quota of 8 and 364 GB/s at 32, where decode-like work beside it is 1.16 and 1.21 times slower (copy
    engine: 1.09). `cudaMemcpyBatchAsync` would save a quarter of a command's cost; it is not used because its
    parameters differ between CUDA 12 and 13.
    """
    quota = BUSY_QUOTA if busy else IDLE_QUOTA
    if not kernel or item_bytes(page_bytes) == 0:
        return COPY_ENGINE
    size = pages * page_bytes
    by_engine = max(size / ENGINE_RATE, runs * COMMAND_SECONDS)
    by_kernel = KERNEL_SECONDS + size / KERNEL_RATES[quota]
    return CopyStrategy(quota) if by_kernel < 0.75 * by_engine else COPY_ENGINE


def item_bytes(page_bytes: int) -> int:
    """What one warp of the kernel copies at a time: the largest power of two that divides a page, up to
    ITEM_BYTES; 0 for pages that have none of 128 bytes."""
    item = math.gcd(page_bytes, ITEM_BYTES)
    return item if item >= 128 else 0


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


@dataclass(frozen=True, slots=True)
class PeerPart:
    """What one rank of the peer holds of each page, mapped into this process."""

    first: int
    """First byte in a page."""
    size: int
    """In bytes; pages lie behind one another at this distance."""
    base: cuda_runtime.Pointer
    """Page 0's."""


@dataclass(frozen=True, slots=True)
class _Route:
    """From a part of the peer to one of the local pool: where the bytes of page 0 begin, the distance from
    page to page, and how many go."""

    source: cuda_runtime.Pointer
    source_size: int
    target: cuda_runtime.Pointer
    target_size: int
    width: int

    @property
    def whole(self) -> bool:
        return self.width == self.source_size == self.target_size


def _routes(parts: Sequence[PagePart], peer: Sequence[PeerPart]) -> list[_Route]:
    """Raises TransportError if the peer's parts do not make up what `parts` hold of a page."""
    routes = []
    spans = [(part.first, part.first + part.size) for part in peer]
    for piece in pieces_of([part.span for part in parts], spans):
        ours, theirs = parts[piece.target], peer[piece.source]
        routes.append(
            _Route(
                theirs.base + piece.begin - theirs.first,
                theirs.size,
                ours.memory.data_ptr() + piece.begin - ours.first,
                ours.memory.shape[1],
                piece.end - piece.begin,
            )
        )
    return routes


class _Engine:
    """Copies into the parts that one GPU holds, on a stream of its own there: a GPU that copies for another
    one moves all bytes through itself (two H200s: 140 GB/s rather than 350)."""

    def __init__(self, parts: Sequence[PagePart], peer: Sequence[PeerPart]) -> None:
        self.device = parts[0].memory.device
        self.routes = _routes(parts, peer)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._copier = cuda_runtime.Copier(self.stream)
        self._peer = peer[0].base
        with torch.cuda.stream(self.stream):  # what this stream writes, no other may be using still
            size = min(REHEARSAL_BYTES, peer[0].size)
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self.device)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target, count in runs_of(pairs):
            for route in self.routes:
                begin = route.source + source * route.source_size
                destination = route.target + target * route.target_size
                if route.whole:
                    self._copier.copy(destination, begin, count * route.width)
                else:
                    pitches = destination, route.target_size, begin, route.source_size
                    self._copier.copy_rows(*pitches, route.width, count)

    def rehearse(self) -> None:
        self._copier.copy(self._scratch.data_ptr(), self._peer, len(self._scratch))


class CudaPageCopier:
    """Belongs to one thread. Nothing that it has enqueued runs any more once `copy` returned or raised."""

    def __init__(
        self, local: CudaPages, peer: Mapping[torch.device, Sequence[PeerPart]], peer_pages: int
    ) -> None:
        """`peer`: `peer_pages` pages of as many bytes as the local ones, as mapped into each of the local
        pool's devices. Raises TransportError if its parts do not make up a page."""
        self._pool = local.pool
        self._page_bytes = local.page_bytes
        self._engines = [
            _Engine([part for part in local.parts if part.memory.device == device], peer[device])
            for device in local.devices
        ]
        first = peer[local.device][0]
        self._peer, self._peer_bytes = first.base, peer_pages * first.size
        self._transfer: Callable[..., Any] | None = None

    @property
    def whole(self) -> bool:
        """Whether pages go from one pool to one pool: then a kernel can copy them, too."""
        routes = [route for engine in self._engines for route in engine.routes]
        return len(routes) == 1 and routes[0].whole

    def copy(self, pairs: Sequence[tuple[int, int]], strategy: CopyStrategy, stop: threading.Event) -> None:
        """Copies pages (peer's, local); returns when the host has seen the copies complete, or, once `stop`
        is set, that those under way are. Waits without the interpreter's lock. Raises TransportError."""
        pages = max(1, PART_BYTES // self._page_bytes)
        flying: deque[list[torch.cuda.Event]] = deque()
        try:
            for begin in range(0, len(pairs), pages):
                if stop.is_set():
                    break
                if len(flying) == 2:
                    _wait(flying.popleft())
                part = pairs[begin : begin + pages]
                flying.append([self._enqueue(engine, part, strategy) for engine in self._engines])
            while flying:
                _wait(flying.popleft())
        except BaseException as error:
            self._synchronize()
            if isinstance(error, RuntimeError):
                raise TransportError(
                    f"copying between GPUs failed: {cuda_runtime.one_line(error)}"
                ) from error
            raise

    def _enqueue(
        self, engine: _Engine, pairs: Sequence[tuple[int, int]], strategy: CopyStrategy
    ) -> torch.cuda.Event:
        with torch.cuda.stream(engine.stream):
            if strategy.quota:
                self._by_kernel(pairs, strategy.quota)
            else:
                engine.copy(pairs)
            # Spins while there are more cores than contexts: to be woken takes longer than to copy a short
            # prompt.
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return done

    def rehearse(self) -> None:
        """Copies a little of the peer's pool to nowhere. After a pause of 0.1 s the first copy takes 0.3 ms
        more, of an H200 and its host: what is rehearsed meanwhile does not. Raises TransportError."""
        try:
            for engine in self._engines:
                engine.rehearse()
            for engine in self._engines:
                engine.stream.synchronize()
        except RuntimeError as error:
            raise TransportError(f"copying between GPUs failed: {cuda_runtime.one_line(error)}") from error

    def _synchronize(self) -> None:
        try:
            for engine in self._engines:
                engine.stream.synchronize()
        except RuntimeError as error:
            # The context is lost, and with it everything that it was running.
            raise TransportError(f"the GPU has failed: {cuda_runtime.one_line(error)}") from error

    def _by_kernel(self, pairs: Sequence[tuple[int, int]], quota: int) -> None:
        if self._transfer is None:
            from sgl_kernel.kvcacheio import transfer_kv_per_layer_mla

            self._transfer = transfer_kv_per_layer_mla
        peer = cuda_runtime.as_tensor(self._peer, self._peer_bytes)
        item = item_bytes(self._page_bytes)
        items = self._page_bytes // item
        pages = torch.tensor(pairs, dtype=torch.int64).t().contiguous().pin_memory()
        pages = pages.to(self._pool.device, non_blocking=True)
        within = torch.arange(items, device=self._pool.device)
        sources, targets = (pages[:, :, None] * items + within).view(2, -1)
        self._transfer(peer, self._pool, sources, targets, item, quota)


def _wait(events: Iterable[torch.cuda.Event]) -> None:
    for event in events:
        event.synchronize()
