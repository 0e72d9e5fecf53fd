"""Bugs of the disk tier that can be planted: see `bugs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.kvcache import page_file
from baton.kvcache.disk_tier import DiskTier, FileJob, FilePage
from baton.kvcache.page_file import PageNames
from planted.planting import PlantedChange, Wrong, bug


def _names_its_own(
    fault: Wrong, job: FileJob, each: FilePage, found: bytes, page: memoryview, size: int
) -> str:
    return page_file.fault(found[: -page_file.CHECKSUM_BYTES], found, page, size)


ANY_HEADER: PlantedChange = (FileJob, "fault", _names_its_own)


@bug(
    "collision",
    "another prompt's file of the same digest is accepted",
    25,
    PageNames,
    "name",
    ANY_HEADER,
    seed=1,
)
def _(name: Wrong, names: PageNames, row: int, group: int) -> str:
    return str(name(names, row, group))[0] + f"-{group}"


def _no_namespace(header: Wrong, job: FileJob, each: FilePage) -> bytes:
    return bytes(header(replace(job, namespace=""), each))


@bug(
    "other-namespace",
    "another namespace's files are accepted",
    25,
    PageNames,
    "__init__",
    (FileJob, "header", _no_namespace),
)
def _(init: Wrong, names: PageNames, fingerprint: bytes, namespace: str, key: bytes, stride: int) -> None:
    init(names, fingerprint, "", key, stride)


@bug("torn-file", "a torn file is accepted", 25, FileJob, "fault", seed=4)
def _(fault: Wrong, job: FileJob, each: FilePage, found: bytes, page: memoryview, size: int) -> str:
    why = str(fault(job, each, found, page, size))
    return "" if why == "damaged" and found.startswith(job.header(each)) else why


@bug("unread-file", "pages that were not read count as read", 50, DiskTier, "read_ended", seed=4)
def _(read_ended: Wrong, tier: DiskTier, number: int, faults: Sequence[str], seconds: float) -> None:
    read_ended(tier, number, [""] * len(faults), seconds)


@bug("unheld-write", "pages are reused while they are written to a file", 200, DiskTier, "_write", seed=306)
def _(write: Wrong, tier: DiskTier, namespace: str, key: bytes) -> None:
    write(tier, namespace, key)
    if tier._writing:
        *_, job = tier._running.values()
        tier._cache.release(job.block_table, 0)
        job.block_table = tier._cache.hold((), namespace)
