"""Chooses how pages are copied from one GPU pool to another. Needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ITEM_BYTES = 4096
ENGINE_RATE = 337e9
COMMAND_SECONDS = 5e-6
KERNEL_RATES = {8: 118e9, 32: 364e9}
KERNEL_SECONDS = 80e-6
BUSY_QUOTA, IDLE_QUOTA = 8, 32


@dataclass(frozen=True, slots=True)
class Way:
    """`quota` 0: one copy-engine command for each run of adjacent pages. Else one kernel
    (`sgl_kernel.transfer_kv`) for all pages, on so many blocks."""

    quota: int = 0

    def __str__(self) -> str:
        return f"kernel, quota {self.quota}" if self.quota else "copy engine"


COPY_ENGINE = Way()


def choose_way(pages: int, runs: int, page_bytes: int, busy: bool, kernel: bool = True) -> Way:
    """The faster way for a pull of `pages` pages that lie in `runs` runs; the copy engine, which leaves all
    multiprocessors to others, unless a kernel saves a quarter of the time.

    `busy`: decode steps run on this GPU meanwhile, and a kernel may take few of its multiprocessors only.
    `kernel`: sgl_kernel is there.

    Measured on H200s. The copy engine: 337 GB/s between two GPUs, but each command
    costs the thread that enqueues it 5 µs, which is what copies of less than 1.7 MB are bound by (64 KiB at
    random places: 15 GB/s). One kernel for all pages takes 80 µs more to get going, for its indices; it pulls
    118 GB/s at a quota of 8 and 364 GB/s at 32, where decode-like work beside it is 1.16 and 1.21 times
    slower (copy engine: 1.09). `cudaMemcpyBatchAsync` would save a quarter of a command's cost; it is not
    used because its parameters differ between CUDA 12 and 13.
    """
    quota = BUSY_QUOTA if busy else IDLE_QUOTA
    if not kernel or item_bytes(page_bytes) == 0:
        return COPY_ENGINE
    size = pages * page_bytes
    by_engine = max(size / ENGINE_RATE, runs * COMMAND_SECONDS)
    by_kernel = KERNEL_SECONDS + size / KERNEL_RATES[quota]
    return Way(quota) if by_kernel < 0.75 * by_engine else COPY_ENGINE


def item_bytes(page_bytes: int) -> int:
    """What one warp of the kernel copies at a time: the largest power of two that divides a page, up to
    ITEM_BYTES; 0 for pages that have none of 128 bytes."""
    item = math.gcd(page_bytes, ITEM_BYTES)
    return item if item >= 128 else 0


def runs_of(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(source, target, pages) of each run that is adjacent on both sides, in the order of the pairs."""
    source = target = count = 0
    for a, b in pairs:
        if count and (a, b) == (source + count, target + count):
            count += 1
            continue
        if count:
            yield source, target, count
        source, target, count = a, b, 1
    if count:
        yield source, target, count
