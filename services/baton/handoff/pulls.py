"""Running copies into the local pool.

Destination pages are pinned until the transport has reported the end, whatever happens to the request.
Destination pages of an overdue copy are quarantined until that report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.kvcache import BlockTable, KvCacheManager

F = TypeVar("F")


@dataclass(slots=True, eq=False)
class Pull(Generic[F]):
    fetch: F
    address: str
    block_table: BlockTable
    targets: tuple[int, ...]
    """Local pages; the block table owns them."""
    stop: list[int]
    """For each KV group the page index up to which pages have arrived when this pull has succeeded."""
    generations: tuple[int, ...]
    """The owner's, as announced."""
    due: float
    """Infinite while the pull may wait for the owner's step."""
    abandoned: bool = False
    """No longer wanted: it is being stopped."""
    overdue: bool = False


class Pulls(Generic[F]):
    def __init__(self, cache: KvCacheManager, seconds: float) -> None:
        """`seconds`: how long a copy may take."""
        self.seconds = seconds
        self._cache = cache
        self.running: dict[int, Pull[F]] = {}
        self.begun = 0

    def __len__(self) -> int:
        return len(self.running)

    @property
    def overdue(self) -> list[str]:
        """Addresses of nodes with an overdue copy from their pools. May be called in another thread than
        the core's."""
        return sorted({pull.address for pull in list(self.running.values()) if pull.overdue})

    def targets(self) -> Iterator[int]:
        """Local pages that running copies may write."""
        for pull in self.running.values():
            yield from pull.targets

    def begin(self, pull: Pull[F]) -> int:
        """Returns the number that the transport will report."""
        self.begun += 1
        self._cache.pin(pull.block_table)
        self.running[self.begun] = pull
        return self.begun

    def wait_no_more(self, number: int, now: float) -> None:
        """The step that the pull waited for has retired: its time counts from now."""
        pull = self.running[number]
        pull.due = min(pull.due, now + self.seconds)

    def abandon(self, number: int) -> None:
        """Marks a pull that is being stopped. Its time counts from the next `expire` unless it counts
        already."""
        self.running[number].abandoned = True

    def end(self, number: int) -> Pull[F] | None:
        """No copy of this pull is running any more. Returns None for an unknown number."""
        pull = self.running.pop(number, None)
        if pull is not None:
            if pull.overdue:
                self._cache.recover(pull.block_table, pull.targets)
            self._cache.unpin(pull.block_table)
        return pull

    def expire(self, now: float) -> list[Pull[F]]:
        """Pulls that have become overdue since the last call."""
        for pull in self.running.values():
            if pull.abandoned:
                pull.due = min(pull.due, now + self.seconds)
        late = [pull for pull in self.running.values() if pull.due <= now and not pull.overdue]
        for pull in late:
            pull.overdue = True
            self._cache.quarantine(pull.block_table, pull.targets)
        return late
