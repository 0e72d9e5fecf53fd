"""The disk tier: files of pages, below the host tier, that survive the process.

What the host tier is given is *written*, and *read* back into it while a request waits. Both hold the host
tier's pages meanwhile, so that nothing can be reused. Files may be of any age, torn or somebody else's: what
is not exactly what was asked for is a miss. Pure, for one thread; `PageFiles` has the threads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as counter
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from baton.handoff.pull_cost import PullCost, PullMeter
from baton.kvcache.block_table import BlockTable
from baton.kvcache.kv_groups import NO_PAGE
from baton.kvcache.page_file import PageNames, fault, header

if TYPE_CHECKING:
    from baton.kvcache.host_tier import HostTier

READ_SECONDS = 5.0
"""A request waits no longer for its pages; then it is computed."""
KNOWN_SECONDS = 30.0
"""A measured cost is forgotten after this time without a new one: a bad moment must not end reading."""
FIRST_BYTES_PER_SECOND = 5e8
"""Assumed until reads have been measured."""
FRESH_SECONDS = 0.05
"""For so long nobody asks again which files there are."""
MOST_OFFERED = 256
"""Prefixes that wait to be written; older ones are forgotten."""
MOST_NAMES = 64
"""Prompts whose names are remembered."""


class FilePage(NamedTuple):
    name: str
    row: int
    group: int
    page: int
    """In the host tier."""


@dataclass(slots=True, eq=False)
class FileJob:
    """Pages of one sequence that are written to files, or read from them."""

    number: int
    fingerprint: bytes
    namespace: str
    key: bytes
    """Key of whole pages: `page_keys.page_key`."""
    stride: int
    """Bytes of a page in it."""
    page_bytes: int
    pages: list[FilePage]
    block_table: BlockTable
    """Table of the host tier's pages."""
    running: bool = True
    """Whether a request waits for it."""
    spoiled: bool = False
    """What it reads is known to be damaged."""
    due: float = inf
    read_rows: int = 0
    """Page indexes that have come."""

    def header(self, each: FilePage) -> bytes:
        """Header of a page's file."""
        key = self.key[: (each.row + 1) * self.stride]
        return header(self.fingerprint, self.namespace, key, each.group, self.page_bytes)

    def fault(self, each: FilePage, found: bytes | bytearray, page: memoryview, size: int) -> str:
        """What is wrong with a page's file: see page_file.fault."""
        return fault(self.header(each), found, page, size)


class PageFiles(Protocol):
    """Files by name, which several processes may share. Nothing may block."""

    size: int
    """Bytes of all files, as far as is known."""
    evicted: int
    """Files that were removed to make room."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a file of this name; may be out of date."""

    def write(self, job: FileJob) -> None:
        """Begins to write; DiskTier.written is called when that has ended, in the step thread."""

    def read(self, job: FileJob) -> None:
        """Begins to read; DiskTier.read_ended is called when that has ended, in the step thread."""

    def remove(self, namespace: str, first: bytes) -> None:
        """Begins to remove all files whose tokens begin with a page of these, 4 bytes each; DiskTier.removed
        is called when that has ended, in the step thread."""


@dataclass(slots=True)
class DiskCounters:
    written_pages: int = 0
    read_pages: int = 0
    reads: int = 0
    """Requests for which pages were read."""


class DiskTier:
    def __init__(self, host: HostTier, files: PageFiles, fingerprint: bytes, page_bytes: int) -> None:
        """`fingerprint`: 32 bytes, of model, layout and dtypes."""
        self.counters = DiskCounters()
        self.faults: Counter[str] = Counter()
        """Files that were not read, or pages that were not written, by reason."""
        self.files = files
        self._cache = host.cache
        self._fingerprint = fingerprint
        self._page_bytes = page_bytes
        self._stride = host.cache.row_bytes
        self._numbers = counter(1)
        self._running: dict[int, FileJob] = {}
        self._offered: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._writing = False
        self._names: OrderedDict[tuple[str, bytes], PageNames] = OrderedDict()
        self._withdrawn: Counter[tuple[str, bytes]] = Counter()
        """What is damaged, and may still have files."""
        self._asked: OrderedDict[tuple[str, bytes], tuple[float, int, int, int]] = OrderedDict()
        """When a prompt's `readable` was last computed, for what, and what it was."""
        self._reading = 0
        """Pages of reads that run, one after the other."""
        self._meter = PullMeter()
        self._now = self._measured = 0.0
        host.disk = self

    @property
    def copies(self) -> int:
        """Jobs that run."""
        return len(self._running)

    def seconds(self, pages: int) -> float:
        """That reading so many takes, behind those that are being read."""
        known = self._meter.cost if self._now - self._measured < KNOWN_SECONDS else None
        first = PullCost(fixed=0.0005, token=self._page_bytes / FIRST_BYTES_PER_SECOND)
        return (known or first).seconds(pages + self._reading)

    # --- reading ----------------------------------------------------------------------------------------

    def readable(self, key: bytes, namespace: str, begin: int, limit: int) -> int:
        """Leading page indexes of the tokens, `limit` at most, that the host tier would hold after a read; it
        holds `begin` now. A waiting prompt asks in each step, and gets what was true a moment ago."""
        asked = self._asked.get((namespace, key))
        if asked is not None and asked[0] >= self._now - FRESH_SECONDS and asked[1:3] == (begin, limit):
            return asked[3]
        found = self._readable(key, namespace, begin, limit)
        self._asked[namespace, key] = self._now, begin, limit, found
        while len(self._asked) > MOST_NAMES:
            self._asked.popitem(last=False)
        return found

    def _readable(self, key: bytes, namespace: str, begin: int, limit: int) -> int:
        if self._is_withdrawn(namespace, key):
            return begin
        names, rows = self._names_of(namespace, key), begin
        always = [i for i, group in enumerate(self._cache.groups) if not group.spec.rows_may_lack]
        while rows < limit and all(names.name(rows, group) in self.files for group in always):
            rows += 1
        while rows > begin and not all(each in self.files for each in self._names_needed(names, begin, rows)):
            rows -= 1
        return rows

    def _names_needed(self, names: PageNames, begin: int, rows: int) -> list[str]:
        """Names of the pages that groups may lack."""
        size = self._cache.page_size
        return [
            names.name(row, group)
            for group, each in enumerate(self._cache.groups)
            if each.spec.rows_may_lack
            for row in each.spec.takes(max(begin, each.spec.keeps(rows * size + 1, size)), rows)
        ]

    def read(self, key: bytes, namespace: str, rows: int) -> FileJob | None:
        """Begins to read what the host tier lacks of the first `rows` page indexes. None: there is no room,
        or nothing to read."""
        cache = self._cache
        block_table = cache.hold(key, namespace, rows, rows * cache.page_size + 1)
        begin = len(block_table)
        if begin == rows or cache.lacking(block_table, rows) > cache.available:
            cache.release(block_table, 0)
            return None
        cache.extend(block_table, rows)
        self.counters.reads += 1
        job = self._begin(namespace, key[: rows * self._stride], block_table, begin)
        self._reading += len(job.pages)
        self.files.read(job)
        return job

    def read_ended(self, number: int, faults: Sequence[str], seconds: float) -> None:
        """`faults`: of each page, why it was not read; empty: it was. `seconds`: what reading took."""
        job = self._running.pop(number)
        self._reading -= len(job.pages)
        cache, bad = self._cache, [each.row for each, fault in zip(job.pages, faults, strict=True) if fault]
        self.faults.update(fault for fault in faults if fault)
        rows = 0 if job.spoiled else min(bad, default=len(job.block_table))
        if job.pages and not bad:  # of rows that groups may lack there may be none
            self._meter.add(len(job.pages), max(seconds, 1e-6))
            self._measured = self._now
        self._asked.pop((job.namespace, job.key), None)
        begin = job.block_table.shared
        if rows > begin:
            job.read_rows = rows - begin
            self.counters.read_pages += sum(each.row < rows for each in job.pages)
            cache.commit(job.block_table, job.key[: rows * self._stride], job.namespace)
        cache.release(job.block_table, 0)
        job.running = False

    # --- writing ----------------------------------------------------------------------------------------

    def offer(self, namespace: str, key: bytes) -> None:
        """The host tier holds whole pages of these tokens, which are to be written."""
        self._offered[namespace, key] = None
        while len(self._offered) > MOST_OFFERED:
            self._offered.popitem(last=False)

    def tick(self, now: float) -> None:
        """Ends waits that last too long, and writes what has been offered, one prefix at a time."""
        self._now = now
        for job in self._running.values():
            if job.due == inf:
                job.due = now + READ_SECONDS
            elif job.due <= now:
                job.running = False
        while self._offered and not self._writing:
            (namespace, key), _ = self._offered.popitem(last=False)
            self._write(namespace, key)

    def _write(self, namespace: str, key: bytes) -> None:
        if self._is_withdrawn(namespace, key):
            return
        block_table = self._cache.hold(key, namespace)
        job = self._begin(namespace, key[: len(block_table) * self._stride], block_table, 0)
        job.pages = [each for each in job.pages if each.name not in self.files]
        self._writing = True
        if job.pages:
            self.files.write(job)
        else:
            self.written(job.number, ())

    def written(self, number: int, faults: Sequence[str]) -> None:
        """`faults`: of each page, why it was not written; empty: it was."""
        job = self._running.pop(number)
        self._writing = False
        self.faults.update(fault for fault in faults if fault)
        self.counters.written_pages += sum(not fault for fault in faults)
        self._cache.release(job.block_table, 0)

    # --- both -------------------------------------------------------------------------------------------

    def _begin(self, namespace: str, key: bytes, block_table: BlockTable, begin: int) -> FileJob:
        names = self._names_of(namespace, key)
        pages = [
            FilePage(names.name(row, group), row, group, table[row])
            for group, table in enumerate(block_table.tables)
            for row in range(begin, len(table))
            if table[row] != NO_PAGE
        ]
        job = FileJob(
            next(self._numbers),
            self._fingerprint,
            namespace,
            key,
            self._stride,
            self._page_bytes,
            pages,
            block_table,
        )
        self._running[job.number] = job
        return job

    def _names_of(self, namespace: str, key: bytes) -> PageNames:
        names = self._names.pop((namespace, key), None)
        if names is None:
            names = PageNames(self._fingerprint, namespace, key, self._stride)
        self._names[namespace, key] = names
        while len(self._names) > MOST_NAMES:
            self._names.popitem(last=False)
        return names

    def withdraw(self, namespace: str, first: bytes) -> None:
        """What begins with these tokens of one page, 4 bytes each, is damaged: its files are removed."""
        for offered in [o for o in self._offered if o[0] == namespace and o[1].startswith(first)]:
            del self._offered[offered]
        for job in self._running.values():
            if job.namespace == namespace and job.key.startswith(first):
                job.spoiled = True
        self._asked.clear()
        if self._withdrawn[namespace, first]:
            return  # its files are being removed, and none is written meanwhile
        self._withdrawn[namespace, first] += 1
        self.files.remove(namespace, first)

    def removed(self, namespace: str, first: bytes) -> None:
        """The files are gone, as far as they could be removed."""
        self._withdrawn[namespace, first] -= 1
        self._withdrawn += Counter()  # drops what is zero

    def _is_withdrawn(self, namespace: str, key: bytes) -> bool:
        return any(name == namespace and key.startswith(first) for name, first in self._withdrawn)
