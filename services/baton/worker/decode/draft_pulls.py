"""Pages of a drafter that come with hand-offs: pulled under the prompt's lease, into the drafter's own pool.

A hand-off waits for them, but not for long, and goes on without them if they fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.engine.draft.kv_slots import DraftKv
from baton.engine.draft.paged_drafter import PagedDrafter
from baton.engine.draft.planner import DraftPlanner
from baton.handoff.fetch import Fetches
from baton.handoff.messages import DraftsAnnounced, Peer, StartPull, StopPull
from baton.handoff.pulls import Pull, Pulls

if TYPE_CHECKING:
    from baton.worker.decode.remote_prefill import Handoff

WAIT_SECONDS = 0.2
"""How long a prompt whose own pages have come waits for those of the drafter."""


@dataclass(slots=True, eq=False)
class PulledDrafts:
    """The drafter's pages of one hand-off."""

    kv: DraftKv
    entries: int
    pull: int | None = None
    """The running one."""


class DraftPulls:
    def __init__(
        self,
        planner: DraftPlanner,
        drafter: PagedDrafter,
        fetches: Fetches[Handoff],
        peers: Mapping[str, Peer],
        seconds: float,
    ) -> None:
        """`drafter`: the planner's. `seconds`: how long a copy may take."""
        self._planner, self._drafter, self._fetches, self._peers = planner, drafter, fetches, peers
        self.pulls: Pulls[Handoff] = Pulls(drafter.slots.cache, seconds)
        self.pulled_pages = 0

    def expected_from(self, address: str) -> bool:
        """Whether the node there will announce such pages, if only none, and they are of use."""
        peer = self._peers.get(address)
        return peer is not None and peer.drafts and not self._planner.broken

    def announced(self, handoff: Handoff, message: DraftsAnnounced, now: float) -> None:
        if not handoff.waits or handoff.drafts is not None:
            return
        cache, entries = self._drafter.slots.cache, message.entries
        rows = -(-entries // cache.page_size)
        fits = len(message.groups) == len(cache.groups) and 0 < entries <= handoff.tokens
        fits = fits and all(len(each.pages) == len(each.generations) == rows for each in message.groups)
        kv = self._drafter.room(handoff.leader, entries, handoff.tokens) if fits else None
        if kv is None:
            self._go_on(handoff, now)
            return
        handoff.drafts = PulledDrafts(kv, entries)
        part = slice(kv.found, rows)
        sources = [page for each in message.groups for page in each.pages[part]]
        generations = tuple(each for group in message.groups for each in group.generations[part])
        targets = tuple(page for table in kv.block_table.tables for page in table[part])
        due = now + self.pulls.seconds
        pull = Pull(handoff, handoff.address, kv.block_table, targets, [], generations, due)
        number = handoff.drafts.pull = self.pulls.begin(pull)
        pairs = tuple(zip(sources, targets, strict=True))
        self._fetches.effects.append(StartPull(handoff.address, number, pairs, drafts=True))

    def pull_ended(self, number: int, error: str | None, generations: Seq[int] | None, now: float) -> None:
        """See Fetches.pull_ended."""
        pull = self.pulls.end(number)
        if pull is None or pull.fetch.drafts is None or pull.fetch.drafts.pull != number:
            return  # its hand-off has gone on without it
        handoff, drafts = pull.fetch, pull.fetch.drafts
        drafts.pull = None
        if error is None and generations in (None, list(pull.generations)):
            self.pulled_pages += len(pull.targets)
            handoff.seen = handoff.seen and generations is not None
        else:
            self._drop(handoff)
        self._go_on(handoff, now)

    def arrived(self, handoff: Handoff) -> None:
        """The lease stood: what has come is good."""
        drafts, handoff.drafts = handoff.drafts, None
        if drafts is not None:
            self._drafter.arrived(handoff.leader, drafts.kv, drafts.entries, handoff.tokens)

    def forget(self, handoff: Handoff) -> None:
        """It has failed, or is not wanted any more."""
        if handoff.drafts is not None:
            self._drop(handoff)

    def tick(self, now: float) -> None:
        late = {pull.fetch for pull in self.pulls.expire(now)}
        for handoff in list(self._fetches.running.values()):
            complete = handoff.complete
            if handoff.waits and (
                handoff in late or (complete is not None and now - complete > WAIT_SECONDS)
            ):
                self.forget(handoff)
                self._go_on(handoff, now)

    def _go_on(self, handoff: Handoff, now: float) -> None:
        handoff.waits = False
        self._fetches.advance(handoff, now)

    def _drop(self, handoff: Handoff) -> None:
        """The pages are free once no copy into them is running."""
        drafts, handoff.drafts = handoff.drafts, None
        assert drafts is not None
        if drafts.pull is not None:
            self.pulls.abandon(drafts.pull)
            self._fetches.effects.append(StopPull(handoff.address, drafts.pull, drafts=True))
        self._drafter.slots.drop(drafts.kv)
