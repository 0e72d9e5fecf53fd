"""The decode side of the hand-off: one state machine per prompt that a prefill node computes.

    begin -> asked -> announced/pulling -> [first tokens] -> all pages here -> released -> confirmed: arrive
       \\________\\___________\\__________________\\_______________\\_____________\\
                  refused, silent, peer lost, pull failed, generation moved on: requeue, next candidate

Pages may be announced before the step that writes them has retired: their pull waits for it, in the
transport. A pull that takes too long (`pulls`), counted from the first tokens where it may have had to wait,
fails its try. Pages count as good only if, after the copy, the owner's generations equal the announced ones
(seen in shared memory), or the answer to the release says that the lease stood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf

from baton.engine.request import Sequence
from baton.engine.scheduler import Scheduler
from baton.handoff.decode_handoff import Handoff, HandoffCounters
from baton.handoff.messages import (
    AttemptName,
    Beat,
    CancelPrefill,
    ChunkAnnounced,
    DecodeEffect,
    FirstSampled,
    LeaseFinished,
    PrefillFailed,
    PrefillOutput,
    RecentNames,
    ReleaseLease,
    StartPrefill,
    StartPull,
    StopPull,
)
from baton.handoff.pulls import Pull, Pulls
from baton.tracing.recorder import EventKind

RecordPull = Callable[[EventKind, AttemptName, str, int, int, str | None], None]
"""record(PULL_BEGUN or PULL_ENDED, name, address, pages, step, error)."""

HEARTBEAT_SECONDS = 1.0


class DecodeSide:
    """All hand-offs of one decode node. Effects gather in `effects`; failures go to `failed`, those of
    hand-offs that had ended here to `failed_late`. `unanswered` learns of each failure that its node is told
    while it may still have the prompt in a step; it will answer."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        silence: float,
        pull_seconds: float,
        name_of: Callable[[Sequence, str], AttemptName],
        pulled: Callable[[Sequence, int], None],
        failed: Callable[[Sequence, str, str, str], None],
        failed_late: Callable[[AttemptName, str, str], None] = lambda name, address, reason: None,
        unanswered: Callable[[Sequence, AttemptName, str], None] = lambda leader, name, address: None,
        record: RecordPull = lambda kind, name, address, pages, step, error: None,
    ) -> None:
        self._scheduler = scheduler
        self._silence = silence
        self._name_of = name_of
        self._pulled = pulled
        self._failed = failed
        self._failed_late = failed_late
        self._unanswered = unanswered
        self._record = record
        self.effects: list[DecodeEffect] = []
        self.counters = HandoffCounters()
        self._by_leader: dict[Sequence, Handoff] = {}
        self._by_name: dict[AttemptName, Handoff] = {}
        self._pulls: Pulls[Handoff] = Pulls(scheduler.cache, pull_seconds)
        self._ended = RecentNames()
        self._next_beat = 0.0
        self._beat = min(HEARTBEAT_SECONDS, silence / 4)
        self._heard: dict[str, float] = {}
        """When each peer's step thread last sent anything."""

    @property
    def active(self) -> int:
        return len(self._by_leader)

    @property
    def pulls(self) -> int:
        return len(self._pulls)

    def pulled_pages(self) -> Iterator[int]:
        """Local pages that running pulls may write."""
        return self._pulls.targets()

    @property
    def expecting(self) -> bool:
        """Whether the last pages of a prompt are under way."""
        return any(h.announced_all and h.pull is not None for h in self._by_leader.values())

    @property
    def overdue(self) -> list[str]:
        """Addresses of nodes with an overdue copy from their pools."""
        return self._pulls.overdue

    def __contains__(self, leader: Sequence) -> bool:
        return leader in self._by_leader

    def address_of(self, leader: Sequence) -> str:
        """The node that computes the sequence's prompt; empty: it has no hand-off."""
        handoff = self._by_leader.get(leader)
        return handoff.address if handoff is not None else ""

    def knows(self, name: AttemptName) -> bool:
        """Whether a running hand-off has this name."""
        return name in self._by_name

    def under_way(self) -> list[tuple[AttemptName, str, int | None]]:
        """Name, node address and running pull (if any) of each running hand-off."""
        return [(handoff.name, handoff.address, handoff.pull) for handoff in self._by_leader.values()]

    def begin(self, leader: Sequence, address: str, now: float) -> None:
        """Asks the node at `address` for the prompt of an admitted sequence."""
        request = leader.request
        name = self._name_of(leader, address)
        cache = self._scheduler.cache
        begins = [group.spec.keeps(len(leader.tokens), cache.page_size) for group in cache.groups]
        pages: list[list[int]] = [[] for _ in begins]
        generations: list[list[int]] = [[] for _ in begins]
        handoff = Handoff(name, address, leader, now, begins, pages, generations)
        self._by_leader[leader] = self._by_name[name] = handoff
        params = replace(request.params, seed=leader.seed)
        if not request.wants_prompt_logprobs:
            params = replace(params, prompt_logprobs=None)
        start = StartPrefill(
            address=address,
            name=name,
            request=request,
            params=params,
            token_ids=tuple(leader.tokens),
            delivered=len(leader.tokens) - len(request.prompt),
            n=1 + len(leader.followers),
            remaining=request.deadline - now,
        )
        self.effects.append(start)

    # --- what the prefill node says ---------------------------------------------------------------------

    def receive(self, address: str, message: PrefillOutput, now: float) -> None:
        handoff = self._by_name.get(message.name)
        if handoff is None or handoff.address != address:
            if message.name not in self._ended:
                self.counters.unknown += 1
                if not isinstance(message, LeaseFinished | PrefillFailed):
                    self.effects.append(CancelPrefill(address, message.name))
            elif isinstance(message, PrefillFailed):
                self._failed_late(message.name, address, message.reason)
            return
        handoff.heard = now
        if isinstance(message, ChunkAnnounced):
            self._announced(handoff, message, now)
        elif isinstance(message, FirstSampled):
            self._first(handoff, message, now)
        elif isinstance(message, PrefillFailed):
            self._lose(handoff, message.reason, message.message, tell=False)
        elif handoff.released and message.stood:
            self._arrive(handoff)
        else:
            # The peer gets a cancel: after a wrong `finished` it might still hold the pages.
            self._lose(handoff, "LEASE_LOST", "the lease did not stand until the pages had been copied")

    def peer_down(self, address: str, reason: str) -> None:
        """The peer's pages are lost, and its step numbers start again."""
        self._heard.pop(address, None)
        for handoff in [h for h in self._by_leader.values() if h.address == address]:
            self._lose(handoff, "PEER_LOST", reason, tell=False)

    def _announced(self, handoff: Handoff, chunk: ChunkAnnounced, now: float) -> None:
        announced, most = chunk.groups, self._scheduler.rows(len(self._prefix(handoff)))
        expected = not handoff.announced_all and [each.first for each in announced] == handoff.announced
        if not expected or any(each.first + len(each.pages) > most for each in announced if each.pages):
            spans = ", ".join(f"{each.first} to {each.first + len(each.pages)}" for each in announced)
            text = f"pages {spans} were announced out of turn, or the prompt has fewer"
            self._lose(handoff, "PROTOCOL", text)
            return
        named, known = [page for each in announced for page in each.pages], len(handoff.named)
        handoff.named.update(named)
        if len(handoff.named) < known + len(named):
            self._lose(handoff, "PROTOCOL", "a page was announced twice")
            return
        for each, pages, generations in zip(announced, handoff.pages, handoff.generations, strict=True):
            pages.extend(each.pages)
            generations.extend(each.generations)
        handoff.announced_all = chunk.last
        handoff.step = max(handoff.step, chunk.step)
        self._advance(handoff, now)

    def _first(self, handoff: Handoff, message: FirstSampled, now: float) -> None:
        leader = handoff.leader
        if handoff.first or len(message.tokens) != 1 + len(leader.followers):
            self._lose(handoff, "PROTOCOL", "first tokens came twice, or not one for each choice")
            return
        handoff.first = True
        if handoff.pull is not None:
            self._pulls.wait_no_more(handoff.pull, now)
        request = leader.request
        if request.cached_tokens is None:
            request.cached_tokens = min(message.cached_tokens, len(leader.tokens))
        if request.wants_prompt_logprobs:
            request.prompt_logprobs = list(message.prompt_logprobs)
        self._scheduler.first_tokens(leader, list(message.tokens))
        if leader in self._by_leader:
            self._advance(handoff, now)

    # --- pulling ----------------------------------------------------------------------------------------

    def _advance(self, handoff: Handoff, now: float) -> None:
        """Starts the next pull, or releases the lease when all pages have arrived."""
        if handoff.pull is not None:
            return
        scheduler, leader = self._scheduler, handoff.leader
        if handoff.here is None and any(handoff.pages):
            cached = scheduler.adopt_cached(leader, len(self._prefix(handoff)))
            handoff.here = [max(cached, begin) for begin in handoff.begins]
        here, stop = handoff.here or handoff.begins, handoff.announced
        waiting = any(first < behind for first, behind in zip(here, stop, strict=True))
        if waiting and (handoff.first or not self._one_token(leader)):
            rows = max(behind for first, behind in zip(here, stop, strict=True) if first < behind)
            if not scheduler.extend(leader, rows):
                # Reserved pages can always be taken: the announced prompt is larger than the admitted one.
                self._lose(handoff, "NO_PAGES", "no pages left to pull into")
                return
            self._pull(handoff, here, stop, now)
        elif handoff.announced_all and handoff.first and not handoff.released:
            self._confirm(handoff)

    def _pull(self, handoff: Handoff, here: Seq[int], stop: list[int], now: float) -> None:
        """Starts to pull, of each group, the pages from `here` to `stop`."""
        holding = handoff.leader.holding
        assert holding is not None
        sources: list[int] = []
        targets: list[int] = []
        generations: list[int] = []
        for group, (first, behind) in enumerate(zip(here, stop, strict=True)):
            begin = handoff.begins[group]
            part = slice(first - begin, behind - begin) if first < behind else slice(0)
            sources += handoff.pages[group][part]
            generations += handoff.generations[group][part]
            targets += holding.tables[group][first:behind]
        pull = Pull(
            handoff=handoff,
            address=handoff.address,
            holding=holding,
            targets=tuple(targets),
            stop=stop,
            generations=tuple(generations),
            due=now + self._pulls.seconds if handoff.first or not handoff.step else inf,
        )
        handoff.pull = self._pulls.begin(pull)
        pairs = tuple(zip(sources, targets, strict=True))
        self.effects.append(StartPull(handoff.address, handoff.pull, pairs, handoff.step))
        self._record(EventKind.PULL_BEGUN, handoff.name, handoff.address, len(pairs), handoff.step, None)

    @staticmethod
    def _one_token(leader: Sequence) -> bool:
        """Whether the first token is also the last: then the pages are not needed here."""
        return leader.num_output + 1 >= leader.request.params.max_tokens

    def _prefix(self, handoff: Handoff) -> list[int]:
        """The tokens whose KV the announced pages hold: all but the first tokens sampled there."""
        tokens = handoff.leader.tokens
        return tokens[:-1] if handoff.first else tokens

    def pull_ended(self, number: int, error: str | None, generations: Seq[int] | None, now: float) -> None:
        """The transport reports that no copy of this pull is running any more."""
        pull = self._pulls.end(number)
        if pull is None:
            return
        handoff = pull.handoff
        if self._by_name.get(handoff.name) is not handoff:
            return  # the request continued without it; its pages are free now
        handoff.pull = None
        self._record(EventKind.PULL_ENDED, handoff.name, pull.address, len(pull.targets), 0, error)
        if error is not None:
            self._lose(handoff, "PULL_FAILED", error)
        elif generations is not None and tuple(generations) != pull.generations:
            self._lose(handoff, "STALE_PAGES", "pages were overwritten before they had been copied")
        else:
            handoff.seen = handoff.seen and generations is not None
            count = len(pull.targets)
            assert handoff.here is not None
            handoff.here = [max(pair) for pair in zip(handoff.here, pull.stop, strict=True)]
            self.counters.pulled_pages += count
            self._pulled(handoff.leader, count)
            self._advance(handoff, now)

    def _confirm(self, handoff: Handoff) -> None:
        if min(handoff.announced) < self._scheduler.rows(len(self._prefix(handoff))):
            self._lose(handoff, "PROTOCOL", "fewer pages were announced than the prompt has")
            return
        handoff.released = True
        self.effects.append(ReleaseLease(handoff.address, handoff.name, awaited=not handoff.seen))
        if handoff.seen:
            self._arrive(handoff)

    def _arrive(self, handoff: Handoff) -> None:
        self._forget(handoff)
        self._scheduler.arrive(handoff.leader)

    # --- ends -------------------------------------------------------------------------------------------

    def abandon(self, leader: Sequence) -> tuple[AttemptName, str] | None:
        """Ends the hand-off of a sequence that was cancelled, retracted, or finished by its first token.
        Returns its name and the address of its node if that will say how it ended there."""
        handoff = self._by_leader.get(leader)
        if handoff is None:
            return None
        self._forget(handoff)
        if handoff.released:
            return None
        self.effects.append(CancelPrefill(handoff.address, handoff.name))
        return handoff.name, handoff.address

    def _lose(self, handoff: Handoff, reason: str, message: str, tell: bool = True) -> None:
        """This try has failed: requeues the sequence, so that another node is tried."""
        self._forget(handoff)
        self.counters.count_retry(reason)
        if tell:
            self.effects.append(CancelPrefill(handoff.address, handoff.name))
        self._failed(handoff.leader, handoff.address, reason, message)
        if tell and not handoff.first and reason != "SILENT":
            self._unanswered(handoff.leader, handoff.name, handoff.address)
        self._scheduler.requeue(handoff.leader)

    def _forget(self, handoff: Handoff) -> None:
        del self._by_leader[handoff.leader]
        del self._by_name[handoff.name]
        self._ended.add(handoff.name)
        if handoff.pull is not None:
            self._stop(handoff.pull, handoff.address)

    def _stop(self, pull: int, address: str) -> None:
        """Stops a pull: its step may be far away, and a pull pins its destination pages."""
        for effect in self.effects:
            if isinstance(effect, StartPull) and effect.pull == pull:
                self.effects.remove(effect)
                self._pulls.end(pull)
                return
        self._pulls.abandon(pull)
        self.effects.append(StopPull(address, pull))

    def note_alive(self, address: str, now: float) -> None:
        """The peer's step thread has sent something, perhaps only the answer to a heartbeat."""
        self._heard[address] = now

    def shorten_beat(self, grace: float) -> None:
        """A peer's leases end `grace` seconds after a heartbeat: heartbeats must be much more frequent."""
        self._beat = min(self._beat, grace / 4)

    def tick(self, now: float) -> None:
        for pull in self._pulls.expire(now):
            if self._by_name.get(pull.handoff.name) is pull.handoff:
                self._lose(
                    pull.handoff, "PULL_STUCK", f"pages did not arrive within {self._pulls.seconds:g} s"
                )
        for handoff in list(self._by_leader.values()):
            if now - max(handoff.heard, self._heard.get(handoff.address, 0.0)) > self._silence:
                self._lose(handoff, "SILENT", f"nothing heard for {self._silence:g} s")
        if now >= self._next_beat:
            self._next_beat = now + self._beat
            self.effects.extend(
                Beat(address) for address in sorted({h.address for h in self._by_leader.values()})
            )
