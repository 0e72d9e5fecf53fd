"""Pages of prompts out of other workers' prefix trees. Pure.

    wanted -> asked -> lent: compared, pulled, confirmed (handoff.fetch) -> in this worker's tree
       \\         \\__________\\
        \\            failed, late: the next source, or the tokens are computed
         not worth it, not connected

A prompt is borrowed for when it could be admitted, and admitted when nothing of it is under way. So the
scheduler finds what has come in the prefix tree, like anything else that is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.engine.request import EngineRequest, Sequence
from baton.engine.scheduler import Scheduler
from baton.engine.step_stats import StepStats
from baton.handoff.fetch import Fetch, FetchCounters, Fetches
from baton.handoff.messages import (
    AskCached,
    AttemptName,
    ChunkAnnounced,
    DraftsAnnounced,
    FirstSampled,
    Peer,
    PrefillOutput,
    PromptSource,
)
from baton.handoff.pull_cost import PullCost, PullMeter
from baton.kvcache import BlockTable
from baton.kvcache.kv_events import content_digest
from baton.step_cost import chunk_pairs
from baton.tracing.recorder import EventKind, Recorder
from baton.worker.sources.lender import whole_in_pages

CONNECT_SECONDS = 0.5
"""How long a prompt waits for a connection to a source that is being opened."""
ANSWER_SECONDS = 1.0
"""A source that has not answered by then is given up."""
LEAST_PULL_SECONDS = 1.0
"""What a pull may take at least; else twice what it was to save."""
UNKNOWN_PULL_SECONDS = 5.0
"""What a pull may take while the time of steps is not known."""
FIRST_COST = PullCost(fixed=0.003, token=1e-5)
"""Cost of borrowing until some has been measured."""
KNOWN_SECONDS = 30.0
"""A measured cost is forgotten after this time without a new one: a bad moment must not end borrowing."""


@dataclass(slots=True, eq=False, kw_only=True)
class Borrowing(Fetch):
    """A prompt's beginning that is to come out of another worker's prefix tree."""

    request: EngineRequest
    prompt: tuple[int, ...]
    """What has been asked for: whole pages."""
    asked: float
    """When, on the recorder's clock."""
    due: float
    """When it is given up."""
    saves: float | None
    """Seconds of computing that it was to save; None: not known."""
    tokens: int = 0
    """Tokens whose pages are lent; 0: there is no answer yet."""
    block_table: BlockTable | None = None
    pulled: int = 0
    """Pages that have come."""


@dataclass(slots=True, eq=False)
class PromptToBorrow:
    """What may still be borrowed for a request."""

    sources: list[PromptSource]
    next_name: Callable[[], AttemptName]
    running: Borrowing | None = None


class Borrower:
    """The FetchCore of what is borrowed."""

    def __init__(
        self,
        scheduler: Scheduler,
        stats: Callable[[], StepStats],
        recorder: Recorder,
        *,
        silence: float,
        pull_seconds: float,
    ) -> None:
        """`silence`, `pull_seconds`: see Fetches."""
        self.fetches: Fetches[Borrowing] = Fetches(
            scheduler.cache, self, silence=silence, pull_seconds=pull_seconds
        )
        self.peers: dict[str, Peer] = {}
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._stats = stats
        self._recorder = recorder
        self._prompts: dict[EngineRequest, PromptToBorrow] = {}
        self._meter = PullMeter()
        self._measured = 0.0
        """When something was last measured, on the recorder's clock."""
        self.able = whole_in_pages(self._cache)
        """Whether it ever borrows."""

    @property
    def counters(self) -> FetchCounters:
        return self.fetches.counters

    # --- what the core wants ----------------------------------------------------------------------------

    def want(
        self,
        request: EngineRequest,
        sources: Iterable[PromptSource],
        next_name: Callable[[], AttemptName],
        now: float,
    ) -> None:
        """The request's prompt may be borrowed from these workers, each asked once at most. `next_name`:
        makes a name for what is asked for."""
        each = list({source.address: source for source in sources}.values())
        if each and self.able:
            self._prompts[request] = PromptToBorrow(each, next_name)
            for source in each:
                self.peers.setdefault(source.address, Peer(up=False, since=now))

    def waits(self, request: EngineRequest) -> bool:
        """Whether pages for the request are under way."""
        to_borrow = self._prompts.get(request)
        return to_borrow is not None and to_borrow.running is not None

    def settled(self, leader: Sequence, now: float) -> bool:
        """Whether the sequence, which is to be computed here, need not wait for pages. Asks the next source
        that is worth it."""
        request, size = leader.request, self._cache.page_size
        to_borrow = self._prompts.get(request)
        if to_borrow is None or request.wants_all_positions:
            return True
        if to_borrow.running is not None:
            return False
        if self._promotes_first(leader):
            return True
        cached = self._scheduler.cached_pages(leader)
        while to_borrow.sources:
            source = to_borrow.sources[0]
            # The last token is computed, for its logits.
            rows = min(source.tokens, len(leader.tokens) - 1) // size
            peer = self.peers.get(source.address)
            if rows > cached and self._pays(cached * size, rows * size) and peer is not None:
                if not peer.up and now - peer.since < CONNECT_SECONDS:
                    return False
                if self._may_ask(source, peer):
                    if self._scheduler.reservations.headroom < (rows - cached) * len(self._cache.groups):
                        return True  # nor is there room to compute it
                    self._ask(to_borrow, to_borrow.sources.pop(0), leader, cached * size, rows * size, now)
                    return False
            to_borrow.sources.pop(0)
        del self._prompts[request]
        return True

    def ended(self, request: EngineRequest) -> None:
        """The request has ended."""
        to_borrow = self._prompts.pop(request, None)
        if to_borrow is not None and to_borrow.running is not None:
            self.fetches.abandon(to_borrow.running)
            self._give_up(to_borrow.running)

    def _promotes_first(self, leader: Sequence) -> bool:
        """Whether pages come, or are now to come, out of this worker's own host tier. What that lacks is
        asked for when they are here."""
        if leader.awaits_pages:
            return True
        cached = self._scheduler.cached_pages(leader)
        in_tier, seconds = self._scheduler.promotable(leader, cached)
        return in_tier > cached and seconds <= self.cost.seconds((in_tier - cached) * self._cache.page_size)

    def _may_ask(self, source: PromptSource, peer: Peer) -> bool:
        same = peer.up and peer.incarnation == source.incarnation
        return same and source.address not in self.fetches.pulls.overdue

    def _pays(self, begin: int, end: int) -> bool:
        """Whether to pull the tokens takes less time than to compute them, by what both have taken here."""
        saved = self._saved(begin, end)
        return saved is None or self.cost.seconds(end - begin) < saved

    @property
    def cost(self) -> PullCost:
        """Cost of borrowing as measured lately."""
        known = self._recorder.clock() - self._measured < KNOWN_SECONDS
        return (self._meter.cost if known else None) or FIRST_COST

    def _saved(self, begin: int, end: int) -> float | None:
        """Seconds that computing these positions takes."""
        calibration = self._stats().calibration
        if calibration is None:
            return None
        cost = calibration.cost
        return cost.token * (end - begin) + cost.pair * chunk_pairs(begin, end - begin)

    def _ask(
        self,
        to_borrow: PromptToBorrow,
        source: PromptSource,
        leader: Sequence,
        begin: int,
        end: int,
        now: float,
    ) -> None:
        size, name = self._cache.page_size, to_borrow.next_name()
        borrowing = to_borrow.running = Borrowing(
            name=name,
            address=source.address,
            last_seen=now,
            rows=0,
            begins=[],
            done=True,
            request=leader.request,
            prompt=tuple(leader.tokens[: (len(leader.tokens) - 1) // size * size]),
            asked=self._recorder.clock(),
            due=now + ANSWER_SECONDS,
            saves=self._saved(begin, end),
        )
        self.fetches.begin(borrowing)
        prompt, request = borrowing.prompt, leader.request
        images = tuple(image for image in request.images if image.start < len(prompt))
        ask = AskCached(source.address, name, prompt, request.namespace, images)
        self.fetches.effects.append(ask)

    # --- what sources say, and time: worker.peers.PageTaker -----------------------------------------------

    def receive(self, address: str, messages: Iterable[PrefillOutput], now: float) -> None:
        self.fetches.note_alive(address, now)
        for message in messages:
            borrowing = self.fetches.of(address, message, now)
            if borrowing is None:
                continue
            if isinstance(message, FirstSampled | DraftsAnnounced):
                text = "tokens or pages were sent that nobody asked for"
                self.fetches.lose(borrowing, "PROTOCOL", text, now)
            elif isinstance(message, ChunkAnnounced):
                self._lent(borrowing, message, now)
            else:
                self.fetches.receive(borrowing, message, now)

    def peer_changed(self, address: str, peer: Peer, reason: str) -> None:
        self.peers[address] = peer
        if not peer.up:
            self.fetches.peer_down(address, reason)

    def forget_peer(self, address: str) -> None:
        self.peers.pop(address, None)
        self.fetches.peer_down(address, "no longer in use")

    def tick(self, now: float) -> None:
        self.fetches.tick(now)
        for borrowing in list(self.fetches.running.values()):
            if borrowing.due <= now:
                self.fetches.lose(borrowing, "LATE", "the pages took longer than computing them", now)

    def _lent(self, borrowing: Borrowing, chunk: ChunkAnnounced, now: float) -> None:
        """Pages are pulled only where the source's tree says the same of their contents as the prompt."""
        size, groups, namespace = self._cache.page_size, self._cache.groups, borrowing.request.namespace
        rows = len(chunk.groups[0].pages) + chunk.groups[0].first if chunk.groups else 0
        tokens = rows * size
        begins = [group.spec.keeps(tokens, size) for group in groups]
        spans = [(each.first, each.first + len(each.pages)) for each in chunk.groups]
        if borrowing.tokens or not 0 < tokens <= len(borrowing.prompt) or not chunk.last:
            self.fetches.lose(borrowing, "PROTOCOL", f"{rows} pages are lent that nobody asked for", now)
            return
        if spans != [(begin, rows) for begin in begins]:
            self.fetches.lose(borrowing, "PROTOCOL", f"pages {spans} are lent of {rows}", now)
            return
        known = borrowing.prompt[:tokens]
        if chunk.content != content_digest(size, namespace, self._cache.encode(known)):
            self.fetches.lose(borrowing, "OTHER_TOKENS", "the pages that are lent hold other tokens", now)
            return
        block_table = self._cache.hold(known, namespace, rows, position=tokens)
        if self._scheduler.reservations.headroom < self._cache.lacking(block_table, rows):
            self._cache.release(block_table, 0)
            self.fetches.lose(borrowing, "NO_PAGES", "the pages here are promised to other prompts", now)
            return
        borrowing.block_table, borrowing.tokens = block_table, tokens
        borrowing.expect(rows, begins)
        saves = borrowing.saves
        limit = UNKNOWN_PULL_SECONDS if saves is None else max(LEAST_PULL_SECONDS, 2 * saves)
        borrowing.due = now + limit
        self.fetches.receive(borrowing, chunk, now)

    # --- FetchCore ----------------------------------------------------------------------------------------

    def adopt_cached(self, fetch: Borrowing) -> int:
        assert fetch.block_table is not None
        return len(fetch.block_table)

    def make_room(self, fetch: Borrowing, rows: int) -> BlockTable | None:
        assert fetch.block_table is not None
        if self._scheduler.reservations.headroom < self._cache.lacking(fetch.block_table, rows):
            return None
        self._cache.extend(fetch.block_table, rows)
        return fetch.block_table

    def pull_changed(
        self, fetch: Borrowing, kind: EventKind, pages: int, step: int, error: str | None
    ) -> None:
        text = fetch.address
        if kind is EventKind.PULL_ENDED:
            peer = self.peers.get(fetch.address)
            text = f"failed: {error}" if error is not None else peer.transport if peer is not None else ""
        self._recorder.add(kind, *fetch.name, pages, text=text)

    def pulled(self, fetch: Borrowing, pages: int) -> None:
        fetch.pulled += pages

    def arrived(self, fetch: Borrowing) -> None:
        assert fetch.block_table is not None
        now = self._recorder.clock()
        if fetch.pulled:
            tokens = fetch.pulled * self._cache.page_size // len(self._cache.groups)
            self._meter.add(max(1, tokens), max(now - fetch.asked, 1e-6))
            self._measured = now
        spare = max(0, self._scheduler.reservations.headroom)
        namespace = fetch.request.namespace
        self._cache.commit(fetch.block_table, fetch.prompt[: fetch.tokens], namespace, spare)
        fetch.request.borrowed += fetch.tokens - fetch.block_table.shared * self._cache.page_size
        self._give_up(fetch)

    def lost(self, fetch: Borrowing, reason: str, message: str, told: float | None) -> None:
        self._give_up(fetch)

    def failed_late(self, name: AttemptName, address: str, reason: str) -> None:
        """What had been given up is not waited for."""

    def _give_up(self, borrowing: Borrowing) -> None:
        """The pages are the tree's now, or nobody's; a pull that still runs keeps them until its end."""
        to_borrow = self._prompts.get(borrowing.request)
        if to_borrow is not None:
            to_borrow.running = None
        if borrowing.block_table is not None:
            self._cache.release(borrowing.block_table, 0)
