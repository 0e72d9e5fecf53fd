"""What the disk tier reads in a second, beside dd on the same disk.

    python benchmarks/disk_tier.py --folder /data/baton-bench --page-mib 1 --pages 256

The tier reads as many pages into memory of its own, each compared with its header and checksum; dd reads
one file of as many bytes and drops them. Each cold (POSIX_FADV_DONTNEED) and warm, in turn, --rounds times.
It prints the medians in MB/s, those of warm reads for a second of the processor's time, too, which other
programs disturb less.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from shared import make_parser, save_results

from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.disk_tier import DiskTier
from baton.kvcache.host_tier import HostTier
from baton.worker.page_directory import PageDirectory

PAGE_SIZE = 16
WAIT_SECONDS = 300.0


class Worker:
    """A host tier with a disk, without an engine."""

    def __init__(self, folder: Path, pages: int, page_bytes: int) -> None:
        self._tokens = list(range(pages * PAGE_SIZE))
        self._pages, self._page_bytes = pages, page_bytes
        self._memory = memoryview(bytearray(os.urandom(page_bytes)) * pages)
        cache = KvCacheManager(PageAllocator(pages), PrefixTree(PAGE_SIZE))
        self._host = HostTier(KvCacheManager(PageAllocator(1), PrefixTree(PAGE_SIZE)), cache, self)
        self.files = PageDirectory(folder, 2**50, self._page)
        self.disk = self.files.tier = DiskTier(self._host, self.files, bytes(32), page_bytes)
        self._called = threading.Event()
        self._calls: list[Callable[[], None]] = []
        self.files.start(self._report)

    def _page(self, page: int) -> memoryview:
        return self._memory[page * self._page_bytes : (page + 1) * self._page_bytes]

    def _report(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._called.set()

    def copy(self, number: int, pairs: object, up: bool) -> None:
        raise AssertionError("no page is demoted here")

    def _wait(self) -> None:
        while self.disk.copies:
            assert self._called.wait(WAIT_SECONDS), "the disk does not answer"
            self._called.clear()
            while self._calls:
                self._calls.pop(0)()

    def write(self) -> None:
        cache = self._host.cache
        block_table = cache.hold(self._tokens, "", self._pages)
        cache.extend(block_table, self._pages)
        cache.commit(block_table, self._tokens, "")
        cache.release(block_table, 0)
        self.disk.offer("", cache.encode(self._tokens))
        self.disk.tick(0.0)
        self._wait()
        assert self.disk.counters.written_pages == self._pages, self.disk.faults

    def read(self) -> None:
        self.disk.read(self._host.cache.encode(self._tokens), "", self._pages)
        self._wait()
        assert self.disk.counters.read_pages == self._pages, self.disk.faults


def drop(folder: Path) -> None:
    """Files leave the page cache."""
    os.sync()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(call: Callable[[], None], who: int) -> tuple[float, float]:
    """Of the wall clock, and of the processor, this process' or its children's."""
    spent = lambda: sum(resource.getrusage(who)[:2])  # noqa: E731
    began, before = time.perf_counter(), spent()
    call()
    return time.perf_counter() - began, spent() - before


def measure(args: argparse.Namespace, pages: Path, file: Path) -> dict[str, float]:
    page_bytes = int(args.page_mib * 2**20)
    total = args.pages * page_bytes / 1e6
    writer = Worker(pages, args.pages, page_bytes)
    writer.write()
    writer.files.close()
    with file.open("wb") as made:
        for _ in range(args.pages):
            made.write(os.urandom(page_bytes))

    def copy() -> None:
        subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=1M"], check=True, capture_output=True)

    def by_dd() -> tuple[float, float]:
        return seconds(copy, resource.RUSAGE_CHILDREN)

    def by_tier() -> tuple[float, float]:
        reader = Worker(pages, args.pages, page_bytes)
        try:
            return seconds(reader.read, resource.RUSAGE_SELF)
        finally:
            reader.files.close()

    found: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, read in (("dd", by_dd), ("tier", by_tier)):
            drop(pages.parent)
            for state in ("cold", "warm"):
                wall, spent = read()
                found.setdefault(f"{name} {state}", []).append(total / wall)
                if state == "warm":
                    found.setdefault(f"{name} warm, of the processor", []).append(total / spent)
    return {name: round(statistics.median(each), 1) for name, each in found.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk; made and removed")
    parser.add_argument("--page-mib", type=float, default=1.0)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    try:
        found = measure(args, args.folder / "pages", args.folder / "file")
    finally:
        shutil.rmtree(args.folder)
    for name, value in found.items():
        print(f"{name}: {value:,.0f} MB/s")
    save_results(args, {"page_mib": args.page_mib, "pages": args.pages, "mb_per_second": found})


if __name__ == "__main__":
    main()
