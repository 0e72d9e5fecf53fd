"""How pages are copied from one GPU pool to another: the choice, without any GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ENGINE_BYTES = 2**20
ITEM_BYTES = 4096
IDLE_QUOTA = 32
BUSY_QUOTA = 8


@dataclass(frozen=True, slots=True)
class Way:
    """`quota` 0: one copy-engine command for each run of adjacent pages. Else one kernel
    (`sgl_kernel.transfer_kv`) for all pages, on so many blocks."""

    quota: int = 0

    def __str__(self) -> str:
        return f"kernel, quota {self.quota}" if self.quota else "copy engine"


COPY_ENGINE = Way()


def choose_way(run_bytes: float, page_bytes: int, busy: bool, kernel: bool = True) -> Way:
    """The way for a pull whose runs of adjacent pages have `run_bytes` on average.

    `busy`: decode steps run on this GPU meanwhile. `kernel`: sgl_kernel is there.
    """
    if not kernel or run_bytes >= ENGINE_BYTES or item_bytes(page_bytes) == 0:
        return COPY_ENGINE
    return Way(BUSY_QUOTA if busy else IDLE_QUOTA)


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
