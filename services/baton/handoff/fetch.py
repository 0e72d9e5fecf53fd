"""What a worker borrows: pages that another worker announces, pulled and checked by generation.

    begin -> announced/pulling -> [the owner is done] -> all pages here -> released -> confirmed: arrived
       \\____________\\____________________\\___________________\\_____________\\
                  refused, silent, peer lost, pull failed, generation moved on: lost

Pages may be announced before the step that writes them has retired: their pull waits for it, in the
transport. A pull that takes too long (`pulls`), counted from when the owner is done where it may have had to
wait, fails its fetch. Pages count as good only if, after the copy, the owner's generations equal the
announced ones (seen in shared memory), or the answer to the release says that the lease stood. Who wants the
pages, and what else the other worker was asked for, is known to the `FetchCore`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Protocol, TypeVar

from baton.handoff.messages import (
    AttemptName,
    Beat,
    CancelPrefill,
    ChunkAnnounced,
    FetchEffect,
    LeaseFinished,
    PrefillFailed,
    PrefillOutput,
    RecentNames,
    ReleaseLease,
    StartPull,
    StopPull,
)
from baton.handoff.pulls import Pull, Pulls
from baton.kvcache import BlockTable, KvCacheManager
from baton.tracing.recorder import EventKind

HEARTBEAT_SECONDS = 1.0
MAX_REASONS = 32


@dataclass(slots=True, eq=False, kw_only=True)
class Fetch:
    """Pages of another worker that are to come here."""

    name: AttemptName
    address: str
    last_seen: float
    rows: int
    """Page indexes that its tokens need."""
    begins: list[int]
    """For each KV group the page index with which its announcements begin."""
    pull_early: bool = True
    """The prompt's pages are pulled as they are announced; else not before the owner is done."""
    done: bool = False
    """The owner has nothing more to say but pages: what writes those announced has retired."""
    pages: list[list[int]] = field(init=False)
    """For each KV group the owner's page ids, as announced."""
    generations: list[list[int]] = field(init=False)
    named: set[int] = field(default_factory=set)
    """All of those pages."""
    announced_all: bool = False
    step: int = 0
    """The pages announced so far are final once this step of the owner's has retired."""
    here: list[int] | None = None
    """For each KV group the page index up to which pages have arrived or were cached; None before the
    first announcement."""
    pull: int | None = None
    released: bool = False
    waits: bool = False
    """The owner pulls something else under the same lease: it is not released before that has ended."""
    complete: float | None = None
    """Since when it has waited for that alone."""
    seen: bool = True
    """Whether generations were compared after every copy; else the answer to the release decides."""

    def __post_init__(self) -> None:
        self.expect(self.rows, self.begins)

    def expect(self, rows: int, begins: list[int]) -> None:
        """Sets `rows` and `begins`, before the first announcement."""
        self.rows, self.begins = rows, begins
        self.pages, self.generations = [[] for _ in begins], [[] for _ in begins]

    @property
    def announced(self) -> list[int]:
        """For each KV group the page index up to which pages have been announced."""
        return [begin + len(pages) for begin, pages in zip(self.begins, self.pages, strict=True)]


F = TypeVar("F", bound=Fetch)
FetchT = TypeVar("FetchT", bound=Fetch, contravariant=True)


class FetchCore(Protocol[FetchT]):
    """What the hand-off asks of the core that wants the pages."""

    def adopt_cached(self, fetch: FetchT) -> int:
        """The page index up to which pages need not come, because they are cached here."""

    def make_room(self, fetch: FetchT, rows: int) -> BlockTable | None:
        """Where the pages are to go: tables with this many page indexes. None: no pages are left."""

    def pull_changed(self, fetch: FetchT, kind: EventKind, pages: int, step: int, error: str | None) -> None:
        """Records that a pull has begun (PULL_BEGUN) or ended (PULL_ENDED)."""

    def pulled(self, fetch: FetchT, pages: int) -> None:
        """So many more are here and good, as far as that has been seen."""

    def arrived(self, fetch: FetchT) -> None:
        """It has ended: all pages are here and good."""

    def lost(self, fetch: FetchT, reason: str, message: str, told: float | None) -> None:
        """It has failed. `told`: when the other worker was told; None: it knows, or is gone."""

    def failed_late(self, name: AttemptName, address: str, reason: str) -> None:
        """The worker at `address` says how a fetch ended there that had ended here."""


@dataclass(slots=True)
class FetchCounters:
    pulled_pages: int = 0
    retries: dict[str, int] = field(default_factory=dict)
    """Number of lost fetches by reason."""
    unknown: int = 0
    """Messages with an unknown name."""

    def count_retry(self, reason: str) -> None:
        """Peers may send any reason: those beyond MAX_REASONS count as OTHER."""
        if reason not in self.retries and len(self.retries) >= MAX_REASONS:
            reason = "OTHER"
        self.retries[reason] = self.retries.get(reason, 0) + 1


class Fetches(Generic[F]):
    """All fetches of a worker. Pure. Effects gather in `effects`."""

    def __init__(
        self, cache: KvCacheManager, core: FetchCore[F], *, silence: float, pull_seconds: float
    ) -> None:
        """`silence`: seconds without a message after which a fetch is lost."""
        self.effects: list[FetchEffect] = []
        self.counters = FetchCounters()
        self.running: dict[AttemptName, F] = {}
        self.pulls: Pulls[F] = Pulls(cache, pull_seconds)
        self._core = core
        self._silence = silence
        self._ended = RecentNames()
        self._next_beat = 0.0
        self._beat = min(HEARTBEAT_SECONDS, silence / 4)
        self._last_seen: dict[str, float] = {}
        """When each peer's step thread last sent anything."""

    @property
    def expecting(self) -> bool:
        """Whether the last pages of a fetch are under way."""
        running = self.running.values()
        return any(each.complete or (each.announced_all and each.pull is not None) for each in running)

    def begin(self, fetch: F) -> None:
        """The owner asks the other worker under the fetch's name."""
        self.running[fetch.name] = fetch

    # --- what the other worker says ---------------------------------------------------------------------

    def of(self, address: str, message: PrefillOutput, now: float) -> F | None:
        """The running fetch that the message belongs to."""
        fetch = self.running.get(message.name)
        if fetch is not None and fetch.address == address:
            fetch.last_seen = now
            return fetch
        if message.name not in self._ended:
            self.counters.unknown += 1
            if not isinstance(message, LeaseFinished | PrefillFailed):
                self.effects.append(CancelPrefill(address, message.name))
        elif isinstance(message, PrefillFailed):
            self._core.failed_late(message.name, address, message.reason)
        return None

    def receive(self, fetch: F, message: ChunkAnnounced | LeaseFinished | PrefillFailed, now: float) -> None:
        if isinstance(message, ChunkAnnounced):
            self._announced(fetch, message, now)
        elif isinstance(message, PrefillFailed):
            self.lose(fetch, message.reason, message.message, None)
        elif fetch.released and message.stood:
            self._arrive(fetch)
        else:
            # The peer gets a cancel: after a wrong `finished` it might still hold the pages.
            self.lose(fetch, "LEASE_LOST", "the lease did not stand until the pages had been copied", now)

    def peer_down(self, address: str, reason: str) -> None:
        """The peer's pages are lost, and its step numbers start again."""
        self._last_seen.pop(address, None)
        for fetch in [each for each in self.running.values() if each.address == address]:
            self.lose(fetch, "PEER_LOST", reason, None)

    def owner_done(self, fetch: F, now: float) -> None:
        """The other worker has said all but pages; its step has retired. `advance` is to follow."""
        fetch.done = True
        if fetch.pull is not None:
            self.pulls.wait_no_more(fetch.pull, now)

    def _announced(self, fetch: F, chunk: ChunkAnnounced, now: float) -> None:
        announced = chunk.groups
        expected = not fetch.announced_all and [each.first for each in announced] == fetch.announced
        if not expected or any(each.first + len(each.pages) > fetch.rows for each in announced if each.pages):
            spans = ", ".join(f"{each.first} to {each.first + len(each.pages)}" for each in announced)
            text = f"pages {spans} were announced out of turn, or the prompt has fewer"
            self.lose(fetch, "PROTOCOL", text, now)
            return
        named, known = [page for each in announced for page in each.pages], len(fetch.named)
        fetch.named.update(named)
        if len(fetch.named) < known + len(named):
            self.lose(fetch, "PROTOCOL", "a page was announced twice", now)
            return
        for each, pages, generations in zip(announced, fetch.pages, fetch.generations, strict=True):
            pages.extend(each.pages)
            generations.extend(each.generations)
        fetch.announced_all = chunk.last
        fetch.step = max(fetch.step, chunk.step)
        self.advance(fetch, now)

    # --- pulling ----------------------------------------------------------------------------------------

    def advance(self, fetch: F, now: float) -> None:
        """Starts the next pull, or releases the lease when all pages have arrived."""
        if fetch.pull is not None:
            return
        if fetch.here is None and any(fetch.pages):
            cached = self._core.adopt_cached(fetch)
            fetch.here = [max(cached, begin) for begin in fetch.begins]
        here, stop = fetch.here or fetch.begins, fetch.announced
        waiting = any(first < behind for first, behind in zip(here, stop, strict=True))
        if waiting and (fetch.done or fetch.pull_early):
            rows = max(behind for first, behind in zip(here, stop, strict=True) if first < behind)
            block_table = self._core.make_room(fetch, rows)
            if block_table is None:
                # Reserved pages can always be taken: the announced prompt is larger than the admitted one.
                self.lose(fetch, "NO_PAGES", "no pages left to pull into", now)
                return
            self._pull(fetch, block_table, here, stop, now)
        elif fetch.announced_all and fetch.done and not fetch.released:
            if not fetch.waits:
                self._confirm(fetch, now)
            elif fetch.complete is None:
                fetch.complete = now

    def _pull(self, fetch: F, block_table: BlockTable, here: Seq[int], stop: list[int], now: float) -> None:
        """Starts to pull, of each group, the pages from `here` to `stop`."""
        sources: list[int] = []
        targets: list[int] = []
        generations: list[int] = []
        for group, (first, behind) in enumerate(zip(here, stop, strict=True)):
            begin = fetch.begins[group]
            part = slice(first - begin, behind - begin) if first < behind else slice(0)
            sources += fetch.pages[group][part]
            generations += fetch.generations[group][part]
            targets += block_table.tables[group][first:behind]
        pull = Pull(
            fetch=fetch,
            address=fetch.address,
            block_table=block_table,
            targets=tuple(targets),
            stop=stop,
            generations=tuple(generations),
            due=now + self.pulls.seconds if fetch.done or not fetch.step else inf,
        )
        fetch.pull = self.pulls.begin(pull)
        pairs = tuple(zip(sources, targets, strict=True))
        self.effects.append(StartPull(fetch.address, fetch.pull, pairs, fetch.step))
        self._core.pull_changed(fetch, EventKind.PULL_BEGUN, len(pairs), fetch.step, None)

    def pull_ended(self, number: int, error: str | None, generations: Seq[int] | None, now: float) -> None:
        """The transport reports that no copy of this pull is running any more."""
        pull = self.pulls.end(number)
        if pull is None:
            return
        fetch, count = pull.fetch, len(pull.targets)
        if self.running.get(fetch.name) is not fetch:
            return  # its owner continued without it; its pages are free now
        fetch.pull = None
        self._core.pull_changed(fetch, EventKind.PULL_ENDED, count, 0, error)
        if error is not None:
            self.lose(fetch, "PULL_FAILED", error, now)
        elif generations is not None and tuple(generations) != pull.generations:
            self.lose(fetch, "STALE_PAGES", "pages were overwritten before they had been copied", now)
        else:
            fetch.seen = fetch.seen and generations is not None
            assert fetch.here is not None
            fetch.here = [max(pair) for pair in zip(fetch.here, pull.stop, strict=True)]
            self.counters.pulled_pages += count
            self._core.pulled(fetch, count)
            self.advance(fetch, now)

    def _confirm(self, fetch: F, now: float) -> None:
        if min(fetch.announced) < fetch.rows:
            self.lose(fetch, "PROTOCOL", "fewer pages were announced than the prompt has", now)
            return
        fetch.released = True
        self.effects.append(ReleaseLease(fetch.address, fetch.name, awaited=not fetch.seen))
        if fetch.seen:
            self._arrive(fetch)

    # --- ends -------------------------------------------------------------------------------------------

    def _arrive(self, fetch: F) -> None:
        self._forget(fetch)
        self._core.arrived(fetch)

    def abandon(self, fetch: F) -> bool:
        """The fetch's owner does not want it any more. Returns whether the other worker will say how it ended
        there."""
        self._forget(fetch)
        if not fetch.released:
            self.effects.append(CancelPrefill(fetch.address, fetch.name))
        return not fetch.released

    def lose(self, fetch: F, reason: str, message: str, told: float | None) -> None:
        """It has failed. `told`: the time now, and the other worker is told; None: it knows, or is gone."""
        self._forget(fetch)
        self.counters.count_retry(reason)
        if told is not None:
            self.effects.append(CancelPrefill(fetch.address, fetch.name))
        self._core.lost(fetch, reason, message, told)

    def _forget(self, fetch: F) -> None:
        del self.running[fetch.name]
        self._ended.add(fetch.name)
        if fetch.pull is not None:
            self._stop(fetch.pull, fetch.address)

    def _stop(self, pull: int, address: str) -> None:
        """Stops a pull: its step may be far away, and a pull pins its destination pages."""
        for effect in self.effects:
            if isinstance(effect, StartPull) and effect.pull == pull and not effect.drafts:
                self.effects.remove(effect)
                self.pulls.end(pull)
                return
        self.pulls.abandon(pull)
        self.effects.append(StopPull(address, pull))

    # --- time -------------------------------------------------------------------------------------------

    def note_alive(self, address: str, now: float) -> None:
        """The peer's step thread has sent something, perhaps only the answer to a heartbeat."""
        self._last_seen[address] = now

    def shorten_beat(self, grace: float) -> None:
        """A peer's leases end `grace` seconds after a heartbeat: heartbeats must be much more frequent."""
        self._beat = min(self._beat, grace / 4)

    def tick(self, now: float) -> None:
        for pull in self.pulls.expire(now):
            if self.running.get(pull.fetch.name) is pull.fetch:
                text = f"pages did not arrive within {self.pulls.seconds:g} s"
                self.lose(pull.fetch, "PULL_STUCK", text, now)
        for fetch in list(self.running.values()):
            if now - max(fetch.last_seen, self._last_seen.get(fetch.address, 0.0)) > self._silence:
                self.lose(fetch, "SILENT", f"nothing heard for {self._silence:g} s", now)
        if now >= self._next_beat:
            self._next_beat = now + self._beat
            self.effects.extend(
                Beat(address) for address in sorted({fetch.address for fetch in self.running.values()})
            )
