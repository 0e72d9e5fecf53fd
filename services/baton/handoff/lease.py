"""What a worker lends: pages under leases, each with a name and a holder.

    begin -> announced -> complete -> released (finished: stood)
        \\         \\            \\
         +---------+------------+--> failed (cancelled, out of time, expired, revoked)

A lease covers all its pages from their first announcement to its end. It lives while its holder's heartbeats
arrive, plus a grace on this worker's monotonic clock. When the holder's stream ends, everything of the
holder's is dropped, and nobody is told. What the pages are for, and who computes them, is not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.handoff.messages import (
    Alive,
    AttemptName,
    ChunkAnnounced,
    GroupPages,
    LeaseFinished,
    PrefillFailed,
    PrefillOutput,
    RecentNames,
)
from baton.kvcache import KvCacheManager
from baton.tracing.recorder import EventKind, Recorder

REVOKE_AFTER_SECONDS = 2.0
"""Work that has waited this long for pages may take the pages of a lease that has been complete as long."""


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """Pages that are promised to a holder. A subclass says which, and how they are given up."""

    name: AttemptName
    holder: Hashable
    tokens: int
    """Whose pages they are."""
    deadline: float
    """When it ends, whatever its holder says."""
    announced: list[int] | None = None
    """For each KV group the page index up to which pages have been announced; None: there was no
    announcement."""
    since: float | None = None
    """When pages were announced first."""
    complete_since: float | None = None
    pages: int = 0
    """Counted against the holder's limit: none before it is complete."""

    @property
    def importance(self) -> tuple[int, int]:
        """The least important lease is revoked first."""
        raise NotImplementedError

    @property
    def tables(self) -> Sequence[Sequence[int]] | None:
        """A page table for each KV group; None: it holds no pages."""
        raise NotImplementedError

    def free(self) -> None:
        """Called once, when it has ended, or was not begun: gives its pages up."""
        raise NotImplementedError


L = TypeVar("L", bound=Lease)


@dataclass(slots=True)
class LeaseCounters:
    """How leases ended; as in node_pb2.Load."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    leases_revoked: int = 0
    leases_expired: int = 0


class Leases(Generic[L]):
    """All leases of a worker. Pure. Outputs gather in `outputs`, as (holder, output)."""

    def __init__(
        self, cache: KvCacheManager, *, grace: float, max_pages: int, recorder: Recorder | None = None
    ) -> None:
        """`grace`: seconds. `max_pages`: complete leases of a holder may have so many before it gets no
        more."""
        self.outputs: list[tuple[Hashable, PrefillOutput | Alive]] = []
        self.counters = LeaseCounters()
        self.running: dict[AttemptName, L] = {}
        self._cache = cache
        self._grace = grace
        self._max_pages = max_pages
        self._recorder = recorder or Recorder(0)
        self._ended = RecentNames()
        self._last_seen: dict[Hashable, float] = {}
        """When every holder of a lease, and others that are connected, were last heard of."""
        self._held: Counter[Hashable] = Counter()
        """Pages of complete leases, by holder."""
        self._blocked_since: float | None = None

    # --- what holders say -------------------------------------------------------------------------------

    def connect(self, holder: Hashable, now: float) -> None:
        self._last_seen[holder] = now

    def disconnect(self, holder: Hashable) -> None:
        """The holder's stream has ended: drops everything that it held, without a message."""
        self._last_seen.pop(holder, None)
        for lease in [each for each in self.running.values() if each.holder == holder]:
            self.counters.cancelled += 1
            self._end(lease, "cancelled")

    def heartbeat(self, holder: Hashable, now: float) -> None:
        if holder in self._last_seen:
            self._last_seen[holder] = now
            self.outputs.append((holder, Alive()))

    def cancel(self, holder: Hashable, name: AttemptName) -> L | None:
        """Ends the lease; whoever asks has to answer (`say_failed`). None: it is none of the holder's."""
        lease = self._owned(holder, name)
        if lease is not None:
            self.counters.cancelled += 1
            self._end(lease, "cancelled")
        return lease

    def release(self, holder: Hashable, name: AttemptName) -> None:
        """The holder has its copies. The answer confirms that the lease stood until now."""
        lease = self._owned(holder, name)
        if lease is not None:
            self.finish(lease)

    def _owned(self, holder: Hashable, name: AttemptName) -> L | None:
        lease = self.running.get(name)
        if lease is not None and lease.holder == holder:
            return lease
        if name not in self._ended:
            text = "no such attempt here; it may have been started at an earlier incarnation of this node"
            self.outputs.append((holder, PrefillFailed(name, "NOT_FOUND", "UNKNOWN_ATTEMPT", text)))
        return None

    # --- what the worker does ---------------------------------------------------------------------------

    def begin(self, lease: L, now: float) -> bool:
        """Whether it has begun. A name in use is refused: it belongs to another holder, because the shell
        lets no holder use a name twice."""
        self._last_seen[lease.holder] = now
        if lease.name in self.running:
            self.counters.failed += 1
            lease.free()
            text = f"attempt {lease.name} was started by another caller and is still running"
            self.say_failed(lease, "INVALID_ARGUMENT", "DUPLICATE_ATTEMPT", text)
            return False
        self.running[lease.name] = lease
        return True

    def announce(
        self, lease: L, tokens: int, last: bool, now: float, step: int = 0, content: bytes = b""
    ) -> None:
        """Announces the pages of the first `tokens` tokens that have not been yet, and which are final once
        `step` has retired; of window groups those that are seen behind the lease's tokens. `content`: as in
        ChunkAnnounced."""
        tables = lease.tables
        if tables is None:
            return
        size = self._cache.page_size
        upto = -(-tokens // size) if last else tokens // size
        announced = lease.announced or self._begins(lease)
        if upto > min(announced) or last:
            groups: list[GroupPages] = []
            for begin, table in zip(announced, tables, strict=True):
                pages = tuple(table[begin:upto])
                groups.append(GroupPages(begin, pages, tuple(map(self._cache.generation, pages))))
            lease.announced = [max(begin, upto) for begin in announced]
            if lease.since is None:
                lease.since = now
            chunk = ChunkAnnounced(lease.name, tuple(groups), last, step, content)
            self.outputs.append((lease.holder, chunk))
            self.note(lease.name, EventKind.ANNOUNCED, sum(len(each.pages) for each in groups), step)

    def _begins(self, lease: L) -> list[int]:
        """For each KV group the page index of the first page to be announced."""
        return [group.spec.keeps(lease.tokens, self._cache.page_size) for group in self._cache.groups]

    def complete(self, lease: L, pages: int, now: float) -> None:
        """Nothing is written into its pages any more: from now on they count against its holder's limit."""
        lease.complete_since = now
        lease.pages = pages
        self._held[lease.holder] += pages

    def may_lend(self, holder: Hashable) -> bool:
        """Whether the holder's complete but unpulled leases leave room for another."""
        return self._held[holder] <= self._max_pages

    def finish(self, lease: L) -> None:
        self.counters.finished += 1
        self._end(lease, "released")
        self.outputs.append((lease.holder, LeaseFinished(lease.name, stood=True)))

    def fail(self, lease: L, code: str, reason: str, message: str) -> None:
        """Ends the lease for a reason of the worker's own."""
        self.counters.failed += 1
        self._fail(lease, code, reason, message)

    def say_failed(self, lease: L, code: str, reason: str, message: str) -> None:
        self.outputs.append((lease.holder, PrefillFailed(lease.name, code, reason, message)))

    def _fail(self, lease: L, code: str, reason: str, message: str) -> None:
        self._end(lease, reason)
        self.say_failed(lease, code, reason, message)

    def _end(self, lease: L, text: str) -> None:
        self.note(lease.name, EventKind.ENDED, text=text)
        del self.running[lease.name]
        self._held[lease.holder] -= lease.pages
        if not self._held[lease.holder]:
            del self._held[lease.holder]
        self._ended.add(lease.name)
        lease.free()

    def tick(self, now: float) -> None:
        """Ends leases whose time is over."""
        for lease in list(self.running.values()):
            if lease.deadline <= now:
                self.fail(lease, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "the request's time is over")
            elif self._last_seen[lease.holder] + self._grace <= now:
                self.counters.leases_expired += 1
                self._fail(lease, "ABORTED", "LEASE_EXPIRED", f"no heartbeat for {self._grace:g} s")

    def revoke_under_pressure(self, blocked: bool, now: float) -> None:
        """To be called after each `tick`. `blocked`: whether work of this worker waits for pages. If it has
        for long, it takes those of the least important lease that has been complete as long. A request is
        revoked at most once: leases of second tries stay."""
        if not blocked:
            self._blocked_since = None
            return
        if self._blocked_since is None:
            self._blocked_since = now
        if now - self._blocked_since < REVOKE_AFTER_SECONDS:
            return
        idle = [
            lease
            for lease in self.running.values()
            if lease.complete_since is not None
            and now - lease.complete_since >= REVOKE_AFTER_SECONDS
            and lease.name.decode_try == 0
            and lease.tables is not None
        ]
        if idle:
            self.counters.leases_revoked += 1
            self._blocked_since = now
            victim = min(idle, key=lambda lease: lease.importance)
            self._fail(victim, "ABORTED", "LEASE_REVOKED", "its pages were needed by a prompt that waited")

    # --- what there is ----------------------------------------------------------------------------------

    @property
    def announced(self) -> int:
        """Leases with announced pages. May be asked from another thread than the core's."""
        return sum(1 for lease in list(self.running.values()) if lease.announced is not None)

    def oldest(self, now: float) -> float:
        """Age of the oldest of these in seconds; 0 without one. May be asked from another thread than the
        core's."""
        since = [lease.since for lease in list(self.running.values()) if lease.since is not None]
        return max(0.0, now - min(since)) if since else 0.0

    def pages(self) -> Iterator[int]:
        """Pages that have been announced and may still be pulled; some of them twice."""
        for lease in self.running.values():
            tables = lease.tables
            if tables is not None and lease.announced is not None:
                for table, begin, end in zip(tables, self._begins(lease), lease.announced, strict=True):
                    yield from table[begin:end]

    def holds(self, holder: Hashable) -> bool:
        """Whether the holder has a lease here."""
        return any(lease.holder == holder for lease in self.running.values())

    def note(
        self, name: AttemptName, kind: EventKind, number: int = 0, step: int = 0, text: str = ""
    ) -> None:
        """Records an event of the lease."""
        self._recorder.add(kind, *name, number, step=step, text=text)
