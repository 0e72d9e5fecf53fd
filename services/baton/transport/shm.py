"""The `shm` transport: a pool in shared memory, a file in /dev/shm that its owner writes and receivers map
read-only.

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
import resource
import secrets
import stat
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.transport.base import (
    EndpointRefused,
    HostPages,
    PageStore,
    TransportError,
    check_page_bytes,
    check_pairs,
)
from baton.transport.pull_thread import ThreadReceiver
from baton.v1 import common_pb2 as pb

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
        cls,
        num_pages: int,
        page_bytes: int,
        incarnation: int,
        directory: Path = DIRECTORY,
        flag: str = "--kv-tokens",
    ) -> Segment:
        """Makes, locks and allocates the file, zeroed. `flag`: names the pool's size, for errors. Raises
        SegmentError."""
        header = Header.plan(num_pages, page_bytes)
        path = directory / f"{_prefix()}{incarnation:016x}"
        try:
            descriptor = _create_locked(path)
        except OSError as error:
            raise SegmentError(f"cannot create the pool {path}: {error.strerror}") from error
        try:
            # Reserved now: later, a write to a full tmpfs would kill the process (SIGBUS).
            os.posix_fallocate(descriptor, 0, header.size)
            return cls(path, descriptor, header)
        except (OSError, OverflowError, ValueError) as error:
            path.unlink()
            os.close(descriptor)
            raise SegmentError(_explain(error, header.size, directory, flag)) from error

    @staticmethod
    def join(path: Path) -> memoryview:
        """The pages of a segment of another rank of the same worker, writable. The caller must not create,
        free or publish pages. Raises SegmentError."""
        try:
            with path.open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise SegmentError(f"cannot map the KV pool {path}: {error.strerror}") from error
        return memoryview(mapped)[Header.unpack(mapped[: _HEADER.size]).pages_offset :]

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


def _explain(error: Exception, size: int, directory: Path, flag: str) -> str:
    code = error.errno if isinstance(error, OSError) else errno.EFBIG
    if code not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EINVAL):
        return f"cannot allocate the pool in {directory}: {error}"
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= limit < size:
        return (
            f"the pool needs {size / 2**30:.2f} GiB in one file, and none may have more than "
            f"{limit / 2**30:.2f} GiB here: lower {flag}, or raise the limit (ulimit -f)"
        )
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    return (
        f"the pool needs {size / 2**30:.2f} GiB in {directory}, where {free / 2**30:.2f} GiB are free: "
        f"lower {flag}, or enlarge it (in a container: --shm-size)"
    )


FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The one that the system started with (PROC_PID_INIT_INO in Linux)."""


def pid_namespace() -> str:
    """An id that is equal for processes which see each other's process ids; "" if it cannot be read."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def boot_id() -> str:
    """The kernel's boot id: equal for all processes and containers of this machine until it reboots; "" if
    it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def host_id() -> str:
    """A text that is equal for two processes that see the same /dev/shm, and for no others: the kernel's
    boot and the file system's device number (which containers that have a /dev/shm of their own do not
    share)."""
    boot = boot_id()
    try:
        return f"{boot}:{DIRECTORY.stat().st_dev}" if boot else ""
    except OSError:
        return ""


def segment_endpoint(segment: Segment) -> pb.ShmEndpoint:
    header = segment.header
    return pb.ShmEndpoint(
        path=str(segment.path),
        host_id=host_id(),
        token=header.token,
        generations_offset=header.generations_offset,
        pages_offset=header.pages_offset,
        page_bytes=header.page_bytes,
        num_pages=header.num_pages,
        retired_offset=RETIRED_OFFSET,
    )


class MappedSegment:
    """`pages`: uint8 [page, byte], read-only. The mapping outlives the owner and lasts until `close`."""

    def __init__(self, endpoint: pb.ShmEndpoint) -> None:
        """Raises TransportError when the segment cannot be opened or is not the endpoint's."""
        if not endpoint.host_id or endpoint.host_id != host_id():
            text = "the peer's shared memory is on another host or in another container"
            raise EndpointRefused(text)
        self._map, header = _open(endpoint)
        self.num_pages = header.num_pages
        self.pages = np.frombuffer(
            self._map, np.uint8, header.num_pages * header.page_bytes, header.pages_offset
        ).reshape(header.num_pages, header.page_bytes)
        self._generations = np.frombuffer(self._map, "<u8", header.num_pages, header.generations_offset)
        self.sees_steps = endpoint.retired_offset == RETIRED_OFFSET
        self._retired = np.frombuffer(self._map, "<u8", 1, RETIRED_OFFSET)

    def generations(self, pages: Sequence[int]) -> list[int]:
        """Raises TransportError for a page that is out of range."""
        check_pairs([(page, 0) for page in pages], self.num_pages, 1)
        return [int(self._generations[page]) for page in pages]

    def retired(self) -> int:
        """The number of the owner's last retired step."""
        return int(self._retired[0])

    def close(self) -> None:
        """Idempotent. No copy from `pages` may be running."""
        if not self._map.closed:
            del self.pages, self._generations, self._retired
            self._map.close()


def _open(endpoint: pb.ShmEndpoint) -> tuple[mmap.mmap, Header]:
    try:
        descriptor = os.open(endpoint.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise TransportError(f"cannot open {endpoint.path}: {error}") from error
    try:
        header = Header.unpack(os.pread(descriptor, 4096, 0))
        if (header.token, header.num_pages, header.page_bytes) != (
            endpoint.token,
            endpoint.num_pages,
            endpoint.page_bytes,
        ):
            raise TransportError(f"{endpoint.path} is not the segment that the peer speaks of")
        if os.fstat(descriptor).st_size < header.size:
            raise TransportError(f"{endpoint.path} is shorter than its header says")
        return mmap.mmap(descriptor, header.size, prot=mmap.PROT_READ), header
    except (OSError, OverflowError, ValueError, SegmentError) as error:
        raise TransportError(f"cannot map {endpoint.path}: {error}") from error
    finally:
        os.close(descriptor)


BATCH_BYTES = 2**20
"""Small pages are copied in batches of this size: every copy releases the interpreter lock, and may wait 5
ms to get it back."""


class ShmReceiver(ThreadReceiver):
    """The mapping outlives the peer and lasts until `close`."""

    kind = "shm"

    def __init__(self, endpoint: pb.ShmEndpoint, local: PageStore) -> None:
        """`local`: a pool on the host. Raises TransportError when the segment cannot be opened or is not the
        endpoint's."""
        if not isinstance(local, HostPages):
            raise EndpointRefused("the local pool is on a GPU")
        check_page_bytes(endpoint.page_bytes, local)
        self._rows = local.rows()
        self._peer = MappedSegment(endpoint)
        self._batch = max(1, BATCH_BYTES // local.page_bytes)
        retired = self._peer.retired if self._peer.sees_steps else None
        super().__init__(local, self._peer.num_pages, retired)

    def generations(self, pages: Sequence[int]) -> list[int]:
        """Raises TransportError for a page that is out of range, and after `close`."""
        self._require_open()
        return self._peer.generations(pages)

    def _copy(self, pairs: list[tuple[int, int]], stop: threading.Event) -> None:
        source, target = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
        for begin in range(0, len(source), self._batch):
            if stop.is_set():
                return
            if self._batch == 1:  # without the copy between that an index of several pages makes
                self._rows[target[begin]] = self._peer.pages[source[begin]]
            else:
                part = slice(begin, begin + self._batch)
                self._rows[target[part]] = self._peer.pages[source[part]]

    def _disconnect(self) -> None:
        self._peer.close()
