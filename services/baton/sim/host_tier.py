"""A simulated host tier: real bytes, half a page at a time, with anything in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.host_tier import HostTier, keep_what_returns
from baton.kvcache.page_allocator import PageState
from baton.sim.model import SimPool
from baton.sim.page_files import SimFiles
from baton.sim.world import Violation

if TYPE_CHECKING:
    from baton.sim.worker import Worker

_PIECES = 2
_FAILS = 0.1
"""Part of the copies that fail."""


class SimHostTier:
    """The tier of a worker, and its copier."""

    def __init__(self, worker: Worker[Any], rows: int, pace: float) -> None:
        """`rows`: page indexes that it has room for. `pace`: seconds, the usual time to copy half a page."""
        self._worker = worker
        self._pace = pace
        self._rng = worker.world.rng(f"tier {worker.name}")
        groups, size = worker.cache.groups, worker.pool.page_size
        self.pool = SimPool(rows * len(groups), size, worker.machine.heads)
        self._allocator = PageAllocator(self.pool.num_pages, self.pool.generations)
        # Often one that evicts what is being promoted.
        policy = self._rng.choice((keep_what_returns(rows), "mru"))
        cache = KvCacheManager(self._allocator, PrefixTree(size, policy, groups, worker.cache.images))
        self.tier = HostTier(worker.cache, cache, self)
        if worker.machine.disk:
            SimFiles(worker, self.tier, self._allocator, self.pool)

    def copy(self, number: int, pairs: Sequence[tuple[int, int]], up: bool) -> None:
        if self._worker.world.traced:
            self._worker.world.note(self._worker.who, f"{'promotes' if up else 'demotes'} {number} {pairs}")
        pieces = [(*pair, part) for pair in pairs for part in range(_PIECES)]
        fails = self._rng.random() < _FAILS
        self._later(lambda: self._step(number, pieces, up, fails))

    def _later(self, function: Callable[[], None]) -> None:
        delay = self._pace * self._rng.uniform(0.1, 2.0)
        self._worker.world.at(delay, self._worker.copy_thread, function)

    def _step(self, number: int, pieces: list[tuple[int, int, int]], up: bool, fails: bool) -> None:
        worker = self._worker
        if not pieces or fails:
            error = "the copier failed" if fails else None
            worker.steps.call(lambda core, now: self.tier.copied(number, error))
            return
        source, target, part = pieces.pop(0)
        pools = (self.pool, worker.pool) if up else (worker.pool, self.pool)
        owner = worker.allocator if up else self._allocator
        if owner.state(target) is not PageState.OWNED:
            text = f"page {target}, which is {owner.state(target).name}"
            raise Violation(f"writer: the copier of {worker.who} writes {text}")
        size = worker.pool.page_bytes // _PIECES
        pools[1].write(target, part * size, pools[0].read(source, part * size, size))
        self._later(lambda: self._step(number, pieces, up, fails))

    @property
    def copies(self) -> int:
        """From and to the tier, also files."""
        return self.tier.copies + (self.tier.disk.copies if self.tier.disk is not None else 0)

    def check(self, idle: bool = False) -> None:
        self.tier.cache.check(idle)
