"""The memory of a worker's host tier, and the threads that copy between it and the pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.disk_tier import DiskTier
from baton.kvcache.host_tier import HostTier, keep_what_returns
from baton.rpc.errors import failed_precondition, invalid
from baton.rpc.logs import get_logger
from baton.step_cost import StepCost, StepLoad, chunk_pairs
from baton.transport import cuda_runtime
from baton.transport.base import TransportError, pieces_of, runs_of
from baton.transport.cuda_pages import PagePart
from baton.worker.memory import check_pool
from baton.worker.page_directory import PageDirectory

_log = get_logger()

SLAB_BYTES = 256 * 2**20
"""Memory is pinned in pieces of this size, or of one page: about a quarter of a second each."""
MEASURED_PAGES = 8
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_Streams = dict[torch.device, torch.cuda.Stream]
"""Streams of one thread; none on a CPU."""
Report = Callable[[Callable[[], None]], None]
"""Has something called in the step thread."""


def parse_size(text: str, field: str) -> int:
    """Bytes of a size such as 64G; 0 for an empty text. `field`: of the configuration. Raises BatonError."""
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    if not text:
        return 0
    if not number.isdecimal():
        raise invalid(field, f"--{field.replace('_', '-')} {text!r} is no size: write it as 64G")
    return int(number) * unit


def takes_less(cost: Callable[[], StepCost], cached: int, tokens: int, seconds: float) -> bool:
    """Whether `seconds` are less than to compute tokens `cached` to `tokens` takes. `cost`: of steps, now."""
    count = tokens - cached
    load = StepLoad(prefill_tokens=count, attention_pairs=chunk_pairs(cached, count))
    return seconds < cost().seconds(load)


class HostMemory:
    """Implements kvcache.host_tier.PageCopier. A thread each way copies pages, with a stream of its own on
    each GPU; another one pins the memory."""

    def __init__(self, parts: Sequence[PagePart], cache: KvCacheManager, size: int) -> None:
        """`parts`: make up the pool's pages; bytes that several have are the same. Raises BatonError when the
        memory, or a page, does not fit."""
        page_bytes = max(part.span[1] for part in parts)
        pages = size // page_bytes
        if not pages:
            text = f"--host-memory of {size} bytes is less than a page of {page_bytes}: give it more"
            raise failed_precondition(text)
        check_pool(pages * page_bytes)
        self._parts = parts
        self._down = pieces_of([(0, page_bytes)], [part.span for part in parts])
        """Where each byte of a page is read."""
        self._devices = tuple(dict.fromkeys(part.memory.device for part in parts))  # which have an index
        self._cuda = self._devices[0].type == "cuda"
        self._page_bytes = page_bytes
        self._per_slab = min(pages, max(1, SLAB_BYTES // page_bytes))
        self._pinned: list[int] = []
        """Addresses."""
        self._slabs: list[torch.Tensor] = [self._slab(self._per_slab)]
        """uint8 [pages, page_bytes] each."""
        self._allocator = PageAllocator(pages)
        policy = keep_what_returns(pages // len(cache.groups))
        tree = PrefixTree(cache.page_size, policy, cache.groups, cache.images)
        self.tier = HostTier(cache, KvCacheManager(self._allocator, tree), self)
        # Quarantined: nobody may use it yet.
        rest = self._allocator.take(pages)[self._per_slab :]
        self._allocator.give_back(range(self._per_slab))
        self._allocator.quarantine(rest)
        self._report: Report = lambda call: None
        self._closed = threading.Event()
        self._ways: dict[bool, SimpleQueue[Any]] = {up: SimpleQueue() for up in (True, False)}
        self._threads = [
            threading.Thread(target=self._serve, args=(up,), name=f"baton-{name}", daemon=True)
            for up, name in ((True, "promotions"), (False, "demotions"))
        ]
        self._threads.append(threading.Thread(target=self._grow, name="baton-host-memory", daemon=True))
        self.tier.page_seconds = self._measure()
        self.directory: PageDirectory | None = None
        """Page directory of the disk tier; None: there is none."""

    def add_disk(self, path: Path, size: int, layout: bytes) -> None:
        """Adds a disk tier of `size` bytes. `layout`: says what pages mean. Raises BatonError."""
        self.directory = PageDirectory(path, size, self._page)
        fingerprint = sha256(layout).digest()
        self.directory.tier = DiskTier(self.tier, self.directory, fingerprint, self._page_bytes)

    def start(self, report: Report, cost: Callable[[], StepCost]) -> None:
        """`cost`: of steps, now."""
        self._report = report
        self.tier.pays = partial(takes_less, cost)
        if self.directory is not None:
            self.directory.start(report)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Waits for running copies."""
        self._closed.set()
        if self.directory is not None:
            self.directory.close()
        for way in self._ways.values():
            way.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def unpin(self) -> None:
        """After `close`, once nothing else waits to be closed: it may take seconds, and fails where the GPU
        has."""
        try:
            if self._pinned:
                cuda_runtime.use(self._devices[0])
            while self._pinned:
                cuda_runtime.unpin(self._pinned.pop())
        except (RuntimeError, TransportError) as error:
            _log.warning("host memory stays pinned", error=cuda_runtime.one_line(error))

    # --- copies -----------------------------------------------------------------------------------------

    def copy(self, number: int, pairs: Sequence[tuple[int, int]], up: bool) -> None:
        self._ways[up].put((number, pairs))

    def _serve(self, up: bool) -> None:
        streams = self._streams()
        while (job := self._ways[up].get()) is not None:
            number, pairs = job
            error = None
            try:
                self._copy(pairs, up, streams)
            except Exception as failure:
                error = str(failure)
                _log.warning("pages of the host tier were not copied", error=error)
            self._report(partial(self.tier.copied, number, error))

    def _streams(self) -> _Streams:
        if not self._cuda:
            return {}
        torch.cuda.set_device(self._devices[0])
        return {device: torch.cuda.Stream(device) for device in self._devices}  # type: ignore[no-untyped-call]

    def _copy(self, pairs: Sequence[tuple[int, int]], up: bool, streams: _Streams) -> None:
        """Returns when all copies are complete."""
        try:
            for target, source in self._pieces(pairs, up):
                if not streams:
                    target.numpy()[:] = source.numpy()  # by this thread alone
                else:
                    _enqueue(target, source, streams[(target if up else source).device])
        finally:  # whoever hears of an error may give the pages to others
            for stream in streams.values():
                with torch.cuda.stream(stream):
                    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    done.record(stream)
                    done.synchronize()

    def _pieces(
        self, pairs: Sequence[tuple[int, int]], up: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(target, source), [pages, bytes] each, of runs that are adjacent on both sides and lie in one
        slab."""
        spans = [(part, *part.span) for part in self._parts]
        if not up:
            spans = [(self._parts[piece.source], piece.begin, piece.end) for piece in self._down]
        for source, target, count in runs_of(pairs):
            host, local = (source, target) if up else (target, source)
            while count:
                slab, offset = divmod(host, self._per_slab)
                length = min(count, self._per_slab - offset)
                for part, begin, end in spans:
                    theirs = self._slabs[slab][offset : offset + length, begin:end]
                    ours = part.memory[local : local + length, begin - part.first : end - part.first]
                    yield (ours, theirs) if up else (theirs, ours)
                host, local, count = host + length, local + length, count - length

    def _measure(self) -> float:
        """The first pages of the slab are zeros, and the pool is empty."""
        streams = self._streams()
        count = min(MEASURED_PAGES, self._per_slab, *(len(part.memory) for part in self._parts))
        pairs, seconds = [(page, page) for page in range(count)], []
        for _ in range(3):
            began = time.perf_counter()
            self._copy(pairs, True, streams)
            seconds.append(time.perf_counter() - began)
        return min(seconds) / count

    # --- memory -----------------------------------------------------------------------------------------

    def _page(self, page: int) -> memoryview:
        """The page's bytes, writable."""
        slab, offset = divmod(page, self._per_slab)
        return self._slabs[slab][offset].numpy().data

    def _slab(self, pages: int) -> torch.Tensor:
        """Raises BatonError when it cannot be pinned."""
        size = pages * self._page_bytes
        try:
            slab = torch.zeros(size, dtype=torch.uint8)
            if self._cuda:
                # Not by torch's own pinned allocator, which rounds sizes up to powers of two.
                slab.fill_(0)
                cuda_runtime.use(self._devices[0])
                cuda_runtime.pin(slab.data_ptr(), size)
                self._pinned.append(slab.data_ptr())
        except (RuntimeError, TransportError) as error:
            text = f"--host-memory: {size} bytes cannot be had: {str(error).splitlines()[0]}; give it less"
            raise failed_precondition(text) from error
        return slab.view(pages, self._page_bytes)

    def _grow(self) -> None:
        """Pins the other slabs, one after the other."""
        began, total = time.monotonic(), self._allocator.counts().total
        for first in range(self._per_slab, total, self._per_slab):
            if self._closed.is_set():
                return
            pages = range(first, min(total, first + self._per_slab))
            try:
                self._slabs.append(self._slab(len(pages)))
            except Exception as error:
                _log.warning("the host tier stays smaller", pages=first, of=total, error=str(error))
                return
            self._report(partial(self._ready, pages))
        seconds = round(time.monotonic() - began, 1)
        _log.info(
            "host memory ready", pages=total, page_ms=round(1000 * self.tier.page_seconds, 3), seconds=seconds
        )

    def _ready(self, pages: range) -> None:
        """In the step thread."""
        self._allocator.recover(pages)
        self._allocator.give_back(pages)


def _enqueue(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Copies rows of bytes between host and GPU. The host does not wait."""
    with torch.cuda.stream(stream):
        if target.is_contiguous() and source.is_contiguous():
            target.copy_(source, non_blocking=True)
            return
        # torch would copy rows that lie apart through memory in between, and wait.
        rows, width = target.shape
        to, apart, of, apart_there = target.data_ptr(), target.stride(0), source.data_ptr(), source.stride(0)
        cuda_runtime.Copier(stream).copy_rows(to, apart, of, apart_there, width, rows)
