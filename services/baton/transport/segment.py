"""A pool in shared memory: a file in /dev/shm that its owner writes and others map read-only.

Layout: a header of 4096 bytes, with the number of the owner's last retired step in it, a little-endian uint64
at RETIRED_OFFSET; the generations, one little-endian uint64 a page; the pages, from an offset
that is a multiple of 4096. The owner holds a lock (flock) on the file for as long as it lives; a file without
that lock is an orphan. `multiprocessing.shared_memory` is no alternative: its tracker removes segments that
others own. The segment of a pool on a GPU has pages of 0 bytes: it holds the generations alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path("/dev/shm")
MAGIC = b"BATONKV\0"
VERSION = 1
ALIGNMENT = 4096
RETIRED_OFFSET = 64
LOCK_SECONDS = 5.0
_HEADER = struct.Struct("<8sQQQQQQ")


class SegmentError(Exception):
    """A segment cannot be created or is invalid. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Header:
    token: int
    """Random number that identifies the file of an endpoint."""
    num_pages: int
    page_bytes: int
    generations_offset: int
    pages_offset: int

    @classmethod
    def plan(cls, num_pages: int, page_bytes: int) -> Header:
        if num_pages < 1 or page_bytes < 0:
            raise ValueError(f"a segment of {num_pages} pages of {page_bytes} bytes")
        pages_offset = -(-(ALIGNMENT + 8 * num_pages) // ALIGNMENT) * ALIGNMENT
        return cls(secrets.randbits(64), num_pages, page_bytes, ALIGNMENT, pages_offset)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.pages_offset + self.num_pages * self.page_bytes

    def pack(self) -> bytes:
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.token,
            self.num_pages,
            self.page_bytes,
            self.generations_offset,
            self.pages_offset,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Raises SegmentError."""
        if len(data) < _HEADER.size:
            raise SegmentError("not a segment: too short")
        magic, version, *fields = _HEADER.unpack(data[: _HEADER.size])
        if magic != MAGIC or version != VERSION:
            raise SegmentError(f"not a segment of version {VERSION}")
        return cls(*fields)


class Segment:
    """The owner's side. `generations` (format "Q") and `pages` are writable views of the mapping."""

    def __init__(self, path: Path, descriptor: int, header: Header) -> None:
        """Takes over a locked, allocated file; use `create`."""
        self.path = path
        self.header = header
        self._descriptor = descriptor
        # Populated, so that no request waits for page faults, and the process has its full size from the
        # start.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._map = mmap.mmap(descriptor, header.size, flags=flags)
        self._map[: _HEADER.size] = header.pack()
        whole = memoryview(self._map)
        generations_end = header.generations_offset + 8 * header.num_pages
        self.generations = whole[header.generations_offset : generations_end].cast("Q")
        self.pages = whole[header.pages_offset :]
        self._retired = whole[RETIRED_OFFSET : RETIRED_OFFSET + 8].cast("Q")
        whole.release()
        self._closed = False

    @classmethod
    def create(
        cls, num_pages: int, page_bytes: int, incarnation: int, directory: Path = DIRECTORY
    ) -> Segment:
        """Makes, locks and allocates the file, zeroed. Raises SegmentError."""
        header = Header.plan(num_pages, page_bytes)
        path = directory / f"{_prefix()}{incarnation:016x}"
        try:
            descriptor = _create_locked(path)
        except OSError as error:
            raise SegmentError(f"cannot create the KV pool {path}: {error.strerror}") from error
        try:
            # Reserved now: later, a write to a full tmpfs would kill the process (SIGBUS).
            os.posix_fallocate(descriptor, 0, header.size)
            return cls(path, descriptor, header)
        except (OSError, OverflowError, ValueError) as error:
            path.unlink()
            os.close(descriptor)
            raise SegmentError(_explain(error, header.size, directory)) from error

    def retire(self, step: int) -> None:
        """Publishes that this step and all earlier ones have retired: receivers may copy their pages. Does
        nothing once closed."""
        with contextlib.suppress(ValueError):
            self._retired[0] = step

    def close(self) -> None:
        """Removes the file. Receivers that mapped it keep their mapping. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        # Tensors over the pages keep the mapping alive; it ends with the last of them.
        with contextlib.suppress(BufferError):
            self._retired.release()
            self.generations.release()
            self.pages.release()
            self._map.close()


def reap_orphans(directory: Path = DIRECTORY) -> list[Path]:
    """Removes this user's segments whose owner has died, and returns their paths. Called at the start of
    every worker."""
    reaped = []
    for path in sorted(directory.glob(f"{_prefix()}*")):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            about = os.fstat(descriptor)
            ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
            if ours and _lock(descriptor) and _is_named(descriptor):
                path.unlink()
                reaped.append(path)
        finally:
            os.close(descriptor)
    return reaped


def _prefix() -> str:
    return f"baton-{os.geteuid()}-"


def _create_locked(path: Path) -> int:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        # Before we hold the lock another worker may remove the file as an orphan; check that it still exists.
        while not _lock(descriptor):
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock")
            time.sleep(0.001)
        if _is_named(descriptor):
            return descriptor
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(descriptor: int) -> bool:
    """Whether a locked file still has its name. Names are removed only under the lock, so it stays as long
    as the lock."""
    return os.fstat(descriptor).st_nlink > 0


def _explain(error: Exception, size: int, directory: Path) -> str:
    code = error.errno if isinstance(error, OSError) else errno.EFBIG
    if code not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EINVAL):
        return f"cannot allocate the KV pool in {directory}: {error}"
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    return (
        f"the KV pool needs {size / 2**30:.2f} GiB in {directory}, where {free / 2**30:.2f} GiB are free: "
        "lower --kv-tokens, or enlarge it (in a container: --shm-size)"
    )
