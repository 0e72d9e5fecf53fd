"""A simulated worker's files of pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.kvcache import page_file
from baton.kvcache.disk_tier import DiskTier, FileJob, FilePage
from baton.kvcache.host_tier import HostTier
from baton.kvcache.page_allocator import PageAllocator, PageState
from baton.sim.model import SimPool
from baton.sim.page_disk import SimDisk, SimFile, Truth
from baton.sim.world import Violation

if TYPE_CHECKING:
    from baton.sim.worker import Worker


class SimFiles:
    """A worker's files: implements PageFiles."""

    size = evicted = 0

    def __init__(self, worker: Worker[Any], host: HostTier, allocator: PageAllocator, pool: SimPool) -> None:
        """`allocator`, `pool`: of the host tier."""
        self._worker, self._allocator, self._pool = worker, allocator, pool
        disk = worker.machine.disk
        self._disk = worker.network.disks.setdefault(disk, SimDisk(worker.world.rng(f"disk {disk}")))
        self._rng = worker.world.rng(f"files {worker.name}")
        self.tier = DiskTier(host, self, b"%32d" % worker.machine.heads, pool.page_bytes)

    def __contains__(self, name: str) -> bool:
        return name in self._disk.files

    def _later(self, function: Callable[[], None]) -> None:
        delay = self._worker.machine.tier_pace * self._rng.uniform(0.1, 2.0)
        self._worker.world.at(delay, self._worker.copy_thread, function)

    def write(self, job: FileJob) -> None:
        self._later(lambda: self._write(job, list(job.pages), []))

    def _write(self, job: FileJob, left: list[FilePage], faults: list[str]) -> None:
        if not left:
            self._worker.steps.call(lambda core, now: self.tier.written(job.number, faults))
            return
        each = left.pop(0)
        page = memoryview(self._bytes(each.page))
        written = page_file.sealed(job.header(each), page) + bytes(page)
        faults.append(self._disk.put(each.name, SimFile(written, self._truth(job, each))))
        self._later(lambda: self._write(job, left, faults))

    def read(self, job: FileJob) -> None:
        self._later(lambda: self._read(job, list(job.pages), []))

    def _read(self, job: FileJob, left: list[FilePage], faults: list[str]) -> None:
        if not left:
            self._worker.steps.call(lambda core, now: self.tier.read_ended(job.number, faults, 0.01))
            return
        each = left.pop(0)
        found = self._disk.files.get(each.name)
        if found is None:
            faults.append("gone")
        else:
            begin = len(job.header(each)) + page_file.CHECKSUM_BYTES
            page = found.held[begin : begin + self._pool.page_bytes]
            if self._allocator.state(each.page) is not PageState.OWNED:
                raise Violation(f"writer: a read of {self._worker.who} writes page {each.page}")
            self._pool.write(each.page, 0, page)
            page_now = memoryview(self._bytes(each.page))
            faults.append(job.fault(each, found.held[:begin], page_now, len(found.held)))
            if not faults[-1]:
                self._disk.read_pages += 1
                if found.truth != self._truth(job, each):
                    raise Violation(f"files: {self._worker.who} takes {each.name} for what it is not")
        if faults[-1]:
            self._disk.files.pop(each.name, None)
        self._later(lambda: self._read(job, left, faults))

    def _truth(self, job: FileJob, each: FilePage) -> Truth:
        """What the host tier's page is now."""
        key = job.key[: (each.row + 1) * job.stride]
        return job.fingerprint, job.namespace, key, each.group, self._bytes(each.page)

    def _bytes(self, page: int) -> bytes:
        return bytes(self._pool.read(page, 0, self._pool.page_bytes))

    def remove(self, namespace: str, first: bytes) -> None:
        def now() -> None:
            for name, found in list(self._disk.files.items()):
                if page_file.begins_with(found.held, namespace, first):
                    del self._disk.files[name]
            self._worker.steps.call(lambda core, at: self.tier.removed(namespace, first))

        self._later(now)
