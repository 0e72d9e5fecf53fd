"""The directory of a worker's disk tier, and the threads that read and write its files.

What reading costs (benchmarks/disk_tier.py, two virtual cores of a busy EPYC): of files of 1 MiB in the
page cache one thread copies 6,400 MB/s into as much memory, and 5,600 if it computes their XXH3 too; a
second thread only slows it down there. `dd` has 8,200, since it copies into the same 1 MiB again and again:
what keeps the bytes can have 0.7 of that. The tier has 0.3; the rest is Python's work for each page, and
threads that take turns. From the disk it has 0.5 of `dd`, and 0.9 where the processors have little else to
do.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count as counter
from pathlib import Path
from queue import Empty, SimpleQueue
from stat import S_ISREG

from baton.kvcache.disk_tier import DiskTier, FileJob, FilePage
from baton.kvcache.page_file import CHECKSUM_BYTES, begin_bytes, begins_with, sealed
from baton.rpc.errors import failed_precondition
from baton.rpc.logs import get_logger

_log = get_logger()

READERS = 4
"""Threads that read the files of a prompt."""
SCAN_SECONDS = 10.0
"""How often other processes' files are looked for."""
SCAN_SHARE = 50
"""Looking takes at most one part in so many of the time."""
PAUSE_SECONDS = 10.0
"""Nothing is written for so long after a write has failed: the disk may be full."""
LEAVE = 0.95
"""Part of the size that eviction leaves."""
ABANDONED_SECONDS = 600.0
"""An unfinished file of this age is nobody's."""
SHARE = 1 / 32
"""Part of the size that a process writes before it looks at what others have written: of as many processes
the files may be so much more than the size."""
CLOSE_SECONDS = 10.0
FOLDERS = 256
"""Named by the first byte of files' names."""
PART = ".part"
PAGE_FILE = re.compile(r"\.?(?P<name>[0-9a-f]{64}-\d+)(?P<part>\.[0-9a-f.]+\.part)?")
"""Names of files: finished and unfinished ones."""
Report = Callable[[Callable[[], None]], None]
"""Has something called in the step thread."""


class PageDirectory:
    """Implements kvcache.disk_tier.PageFiles. Other processes may use the same directory: files appear whole,
    by their renaming, and may be gone at any time."""

    tier: DiskTier
    """Set by its owner before `start`."""

    def __init__(self, path: Path, limit: int, page: Callable[[int], memoryview]) -> None:
        """`limit`: bytes of all files, at most. `page`: writable bytes of a page of the host tier. Raises
        BatonError for a directory that cannot be used."""
        self._path, self._limit, self._page = path, limit, page
        self._known: dict[str, dict[str, tuple[int, float]]] = {f"{i:02x}": {} for i in range(FOLDERS)}
        """By folder: bytes, and when last used, by name. Changed by the writing thread, but for what reads
        touch."""
        self._by_age: list[tuple[float, str]] = []
        """A heap with each known name, and perhaps others: when it was last used, or earlier."""
        self.size = 0
        """Bytes of all files, as far as is known."""
        self.evicted = 0
        """Files that were removed to make room."""
        self._process = secrets.token_hex(8)
        """In names of unfinished files: processes of other hosts and containers may have the same number."""
        self._numbers = counter()
        self._paused = 0.0
        self._unseen = 0
        """Bytes written since the directory was last looked at."""
        self._report: Report = lambda call: None
        self._writes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._reads: SimpleQueue[FileJob | None] = SimpleQueue()
        self._pool = ThreadPoolExecutor(READERS, "baton-disk-reader")
        self._threads = [
            threading.Thread(target=self._serve_writes, name="baton-disk-writes", daemon=True),
            threading.Thread(target=self._serve_reads, name="baton-disk-reads", daemon=True),
        ]
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            stat = path.stat()
            if stat.st_mode & 0o022 or stat.st_uid not in (0, os.geteuid()):
                text = "others may write there, and so choose what a prompt sees"
                raise failed_precondition(f"--disk {path}: {text}; it must be this user's, mode 700")
            self._scan()
        except OSError as error:
            raise failed_precondition(f"--disk {path}: {error.strerror}; name another directory") from error

    def start(self, report: Report) -> None:
        self._report = report
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Waits for the jobs that run, but not for a disk that hangs."""
        self._writes.put(None)
        self._reads.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(CLOSE_SECONDS)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- PageFiles --------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._known[name[:2]]

    def write(self, job: FileJob) -> None:
        self._writes.put(lambda: self._write(job))

    def read(self, job: FileJob) -> None:
        self._reads.put(job)

    def remove(self, namespace: str, first: bytes) -> None:
        self._writes.put(lambda: self._remove(namespace, first))

    # --- reading ----------------------------------------------------------------------------------------

    def _serve_reads(self) -> None:
        while (job := self._reads.get()) is not None:
            began = time.perf_counter()
            faults = ["late"] * len(job.pages)  # its request has been computed meanwhile
            if job.running:
                # Each thread has its part: to hand pages over one by one took a fifth of the time.
                parts = self._pool.map(partial(self._read_some, job), range(READERS))
                for first, found in enumerate(parts):
                    faults[first::READERS] = found
            seconds = time.perf_counter() - began
            self._report(partial(self.tier.read_ended, job.number, faults, seconds))

    def _read_some(self, job: FileJob, first: int) -> list[str]:
        return [self._read_or_fault(job, each) for each in job.pages[first::READERS]]

    def _read_or_fault(self, job: FileJob, each: FilePage) -> str:
        try:
            return self._read_page(job, each)
        except Exception as error:
            _log.error("a page was not read", exc_info=error)
            return "unreadable"

    def _read_page(self, job: FileJob, each: FilePage) -> str:
        """What was wrong; empty: nothing."""
        path = self._file(each.name)
        try:
            page = self._page(each.page)
            found, more = bytearray(len(job.header(each)) + CHECKSUM_BYTES), bytearray(1)
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                size = os.preadv(file, [found, page, more], 0)
                now = time.time()
                os.utime(file, (now, now))
            finally:
                os.close(file)
        except FileNotFoundError:
            self._forget(each.name)
            return "gone"
        except OSError as error:
            _log.warning("a page was not read", path=str(path), error=error.strerror)
            return "unreadable"
        wrong = job.fault(each, found, page, size)
        if wrong:
            # Written anew when the page is given up the next time.
            self._forget(each.name)
            _discard(path)
            _log.warning("a file of the disk tier is not as it should be", path=str(path), why=wrong)
        else:
            self._known[each.name[:2]][each.name] = (size, now)
        return wrong

    # --- writing ----------------------------------------------------------------------------------------

    def _serve_writes(self) -> None:
        scanned, pause = time.monotonic(), SCAN_SECONDS
        while True:
            try:
                job = self._writes.get(timeout=SCAN_SECONDS)
                if job is None:
                    return
                job()
            except Empty:
                pass
            except Exception as error:
                _log.error("the disk tier's directory", exc_info=error)
            if (began := time.monotonic()) - scanned >= pause:
                self._look_again()
                scanned = time.monotonic()
                pause = max(SCAN_SECONDS, SCAN_SHARE * (scanned - began))

    def _look_again(self) -> None:
        try:
            self._scan()
            self._evict(0)
        except OSError as error:
            _log.warning("the disk tier's directory cannot be read", error=error.strerror)

    def _write(self, job: FileJob) -> None:
        faults = [self._write_or_fault(job, each) for each in job.pages]
        self._report(partial(self.tier.written, job.number, faults))

    def _write_or_fault(self, job: FileJob, each: FilePage) -> str:
        try:
            return self._write_page(job, each)
        except Exception as error:
            _log.error("a page was not written", exc_info=error)
            return "unwritable"

    def _write_page(self, job: FileJob, each: FilePage) -> str:
        if time.monotonic() < self._paused:
            return "paused"
        path, page = self._file(each.name), self._page(each.page)
        begin = sealed(job.header(each), page)
        size = len(begin) + len(page)
        part = path.with_name(f".{each.name}.{self._process}.{next(self._numbers)}{PART}")
        try:
            if self._unseen > SHARE * self._limit:
                self._scan()  # what others have written counts, too
            self._evict(size)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if os.writev(file, [begin, page]) != size:
                    raise OSError(errno.ENOSPC, "there was not room for all of it")
            finally:
                os.close(file)
            part.rename(path)
        except OSError as error:
            self._paused = time.monotonic() + PAUSE_SECONDS
            _log.warning("a page was not written", path=str(path), error=error.strerror)
            _discard(part)
            return "full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "unwritable"
        self._learn(each.name, size, time.time())
        self.size += size
        self._unseen += size
        return ""

    def _evict(self, more: int) -> None:
        """Removes those files that were used least recently, if they and `more` bytes are too many."""
        if self.size + more <= self._limit:
            return
        while self._by_age and self.size + more > LEAVE * self._limit:
            used, name = heapq.heappop(self._by_age)
            size, last = self._known[name[:2]].get(name, (0, used))
            if last > used:
                heapq.heappush(self._by_age, (last, name))
            elif self._forget(name):
                _discard(self._file(name))
                self.evicted += 1
                self.size -= size

    def _learn(self, name: str, size: int, used: float) -> None:
        self._known[name[:2]][name] = size, used
        heapq.heappush(self._by_age, (used, name))

    def _forget(self, name: str) -> bool:
        """Whether it was known."""
        return self._known[name[:2]].pop(name, None) is not None

    def _remove(self, namespace: str, first: bytes) -> None:
        try:
            self._remove_all(namespace, first)
        finally:
            self._report(lambda: self.tier.removed(namespace, first))

    def _remove_all(self, namespace: str, first: bytes) -> None:
        self._scan()  # other processes' files, too
        for name in [name for folder in self._known.values() for name in list(folder)]:
            path = self._file(name)
            try:
                with path.open("rb") as file:
                    found = file.read(begin_bytes(namespace, first))
            except OSError:
                continue
            if begins_with(found, namespace, first):
                _discard(path)
                self.size -= self._known[name[:2]].get(name, (0, 0.0))[0]
                self._forget(name)

    # --- the directory ----------------------------------------------------------------------------------

    def _file(self, name: str) -> Path:
        return self._path / name[:2] / name

    def _scan(self) -> None:
        """Looks at the directory's own files; all others are left alone. Folder by folder, and other threads
        run in between: there may be hundreds of thousands."""
        size = 0
        for folder, known in self._known.items():
            found = self._files_of(folder)
            for name in known.keys() - found.keys():
                self._forget(name)
            for name, (bytes_, used) in found.items():
                if name in known:
                    known[name] = bytes_, used
                else:
                    self._learn(name, bytes_, used)
                size += bytes_
            if found:
                time.sleep(0)
        self.size, self._unseen = size, 0
        if len(self._by_age) > 2 * sum(map(len, self._known.values())) + 1000:  # others have evicted
            self._by_age = [
                (used, name) for known in self._known.values() for name, (_, used) in known.items()
            ]
            heapq.heapify(self._by_age)

    def _files_of(self, folder: str) -> dict[str, tuple[int, float]]:
        """Bytes, and when last used, of the finished files in a folder; unfinished ones of processes that are
        gone are removed."""
        found: dict[str, tuple[int, float]] = {}
        path = self._path / folder
        if path.is_symlink() or not path.is_dir():
            return found
        for entry in os.scandir(path):
            page_file = PAGE_FILE.fullmatch(entry.name)
            if page_file is None or not page_file["name"].startswith(folder):
                continue
            try:
                stat = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed by another process
                continue
            if not S_ISREG(stat.st_mode):
                continue
            if page_file["part"] is None:
                found[entry.name] = (stat.st_size, stat.st_mtime)
            elif time.time() - stat.st_mtime > ABANDONED_SECONDS:
                _discard(Path(entry.path))
        return found


def _discard(path: Path) -> None:
    """Removes the file, if that can be done."""
    with contextlib.suppress(OSError):
        path.unlink()
