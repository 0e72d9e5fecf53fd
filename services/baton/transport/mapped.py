"""Another process's segment, mapped read-only by a receiver."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from baton.transport.base import EndpointRefused, Refusal, TransportError
from baton.transport.pages import check_pairs
from baton.transport.segment import DIRECTORY, RETIRED_OFFSET, Header, Segment, SegmentError
from baton.v1 import common_pb2 as pb


def boot_id() -> str:
    """The kernel's boot id: equal for all processes and containers of this machine until it reboots; "" if
    it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def host_id() -> str:
    """The same for two processes that see the same /dev/shm, and for no others: the kernel's boot and the
    file system's device number (which containers that have a /dev/shm of their own do not share)."""
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
            raise EndpointRefused(Refusal.OTHER_HOST, text)
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
