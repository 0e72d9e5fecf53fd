"""The scheduler's state: its sequences, what each of them holds, and the moves between the queues.

Queues, batch slots, page reservations and page tables change only in `SchedulerState`. Scheduler
(scheduler.py) decides when they change.

        enqueue            place (here)              last chunk retired
    -> WAITING ---------------> PROMPT ---------------------------> RUNNING -> ENDED
         ^  |                                                        ^  |
         |  +---- place (elsewhere) ----> HANDOFF --- arrive --------+  |
         +------------- retract, requeue -----------+-------------------+

Reservations are numbers, not pages: `KvCacheManager.available` (free or evictable pages) never falls below
the sum of all reservations, so an admitted prompt always finds its pages and two pools cannot deadlock on
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from baton.engine.capacity import BatchSlots, Reservations
from baton.engine.image_waits import forget_images
from baton.engine.request import (
    EmbeddedEvent,
    EngineEvent,
    EngineRequest,
    FailedEvent,
    FinishedEvent,
    RecordEvent,
    Sequence,
    SequencePhase,
    nothing,
)
from baton.engine.step_builder import Copy
from baton.engine.waiting_queue import WaitingQueue
from baton.kvcache import BlockTable, KvCacheManager, OutOfPages
from baton.tracing.recorder import EventKind


class SchedulerState:
    """`abandon` is called before a sequence in HANDOFF loses its pages."""

    def __init__(
        self,
        cache: KvCacheManager,
        policy: str,
        max_rows: int,
        abandon: Callable[[Sequence], None],
        record: RecordEvent = nothing,
    ) -> None:
        self.cache = cache
        self.slots = BatchSlots(max_rows)
        self.reservations = Reservations(cache)
        self.requests: dict[Hashable, EngineRequest] = {}
        self.waiting = WaitingQueue(policy, self.cached_pages)
        self.prompts: list[Sequence] = []
        self.running: list[Sequence] = []
        """In the order of their rank: see `extend_or_retract`."""
        self.handoffs: list[Sequence] = []
        self.copies: list[Copy] = []
        self.events: list[EngineEvent] = []
        self.embedded: list[EmbeddedEvent | FailedEvent] = []
        """Ends of requests whose embedding was wanted; the others' are in `events`."""
        self.retractions = 0
        self.retired_step = 0
        """The last step that has retired."""
        self.abandon = abandon
        self.record = record
        self._arrivals = 0
        self._uncached: list[Sequence] = []
        """Sequences whose prompt is final and not yet in the prefix tree."""

    # --- requests ---------------------------------------------------------------------------------------

    def enqueue(self, request: EngineRequest) -> None:
        self._arrivals += 1
        request.order = self._arrivals
        request.forked = request.n == 1 or bool(request.delivered)
        self.requests[request.key] = request
        self.record(request, EventKind.QUEUED, len(request.sequences[0].tokens), 0)
        for sequence in request.sequences if request.forked else request.sequences[:1]:
            if sequence.phase is SequencePhase.WAITING:
                self.waiting.add(sequence)

    def close(self, request: EngineRequest) -> None:
        """Ends the request wherever it is (cancelled, out of time, lease over); no event follows."""
        for sequence in request.sequences:
            if sequence.phase is SequencePhase.HANDOFF and sequence in self.handoffs:
                self.abandon(sequence)
            self.end(sequence)
        self.forget(request)

    def forget(self, request: EngineRequest) -> bool:
        """All its sequences have ended. Removes their references to it, so that it is freed with its last
        reference and not by the garbage collector. Returns whether it had been submitted."""
        request.sequences.clear()
        submitted = self.requests.get(request.key) is request
        if submitted:
            del self.requests[request.key]
        return submitted

    def fail(self, request: EngineRequest, reason: str, message: str) -> None:
        self.close(request)
        events = self.events if request.pooling is None else self.embedded
        events.append(FailedEvent(request, reason, message))

    def take_events(self) -> list[EngineEvent]:
        events, self.events = self.events, []
        return events

    def take_embedded(self) -> list[EmbeddedEvent | FailedEvent]:
        embedded, self.embedded = self.embedded, []
        return embedded

    def in_flight(self, sequence: Sequence) -> bool:
        """Whether a step with the sequence has not retired, even if the sequence waits again since."""
        return sequence.last_step > self.retired_step

    # --- pages ------------------------------------------------------------------------------------------

    def rows(self, tokens: int) -> int:
        """Page indexes that `tokens` tokens need."""
        return -(-tokens // self.cache.page_size)

    def cached_pages(self, sequence: Sequence) -> int:
        """Leading page indexes of a waiting sequence's tokens that it can take from the prefix tree: at least
        one token is computed, for its logits. The tokens are encoded once, and searched for again only when
        the tree has changed."""
        if sequence.encoded is None:
            sequence.encoded = self.cache.encode(sequence.tokens)
        if sequence.match is None or sequence.match[0] != self.cache.version:
            size, limit = self.cache.page_size, (len(sequence.tokens) - 1) // self.cache.page_size
            tokens = self.cache.match_length(sequence.encoded, sequence.request.namespace, limit)
            sequence.match = self.cache.version, tokens // size
        return sequence.match[1]

    def promotable(self, leader: Sequence, cached: int) -> tuple[int, float]:
        """Leading page indexes that the leader can take from the prefix tree, having waited for lower tiers,
        and for how many seconds it waits."""
        tier, request = self.cache.tier, leader.request
        if tier is None or leader.promotion is not None or request.wants_all_positions:
            return cached, 0.0
        assert leader.encoded is not None
        limit = (len(leader.tokens) - 1) // tier.cache.page_size
        disk = leader.disk_read is None
        return tier.promotable(leader.encoded, request.namespace, cached, limit, disk=disk)

    def promote(self, leader: Sequence, rows: int) -> bool:
        """Whether the leader now waits for pages of lower tiers."""
        assert self.cache.tier is not None and leader.encoded is not None
        tier, room, namespace = self.cache.tier, max(0, self.reservations.headroom), leader.request.namespace
        if tier.disk is not None and leader.disk_read is None:
            leader.disk_read = tier.disk.read(leader.encoded, namespace, rows)
            if leader.disk_read is not None:
                self._record_rows(leader, EventKind.READ, rows)
                return True
        leader.promotion = tier.promote(leader.encoded, namespace, rows, room)
        if leader.promotion is not None:
            self._record_rows(leader, EventKind.PROMOTED, len(leader.promotion.sources))
        return leader.promotion is not None

    def _record_rows(self, leader: Sequence, kind: EventKind, rows: int) -> None:
        self.record(leader.request, kind, rows * self.cache.page_size, 0)

    def extend(self, sequence: Sequence, rows: int) -> bool:
        """Extends an admitted sequence's page tables to `rows` page indexes; returns False if there are not
        enough pages now.

        A sequence takes from its own reservation first, and beyond it only unreserved pages.
        """
        assert sequence.block_table is not None
        if rows <= len(sequence.block_table.tables[0]):  # not len(block_table): for every row of every step
            return True
        count = self.cache.lacking(sequence.block_table, rows)
        if count > sequence.reserved + max(0, self.reservations.headroom):
            return False
        try:
            self.cache.extend(sequence.block_table, rows)
        except OutOfPages:
            return False
        self.reservations.use(sequence, count)
        return True

    def extend_or_retract(self, sequence: Sequence, rows: int) -> bool:
        """Like `extend`, but may retract sequences of later rank: of lower priority, or younger. Returns
        False if the sequence gets no row in this step."""
        while not self.extend(sequence, rows):
            if self.cache.pending:
                return False  # pages are about to be freed; do not retract more
            if self.retract_last() is sequence:
                return False
        return True

    def retract_last(self) -> Sequence:
        """Retracts the sequence of the last rank, and returns it. There must be one."""
        victim = max([*self.running, *self.prompts, *self.handoffs], key=lambda s: s.rank)
        self.retractions += 1
        victim.request.retractions += 1
        self.record(victim.request, EventKind.RETRACTED, victim.num_read, 0)
        self.requeue(victim)
        return victim

    def drop_unseen(self, sequence: Sequence) -> None:
        """Gives up what no later position of the sequence sees, and reserves for it as many pages as that
        frees; none once its prompt is leased. Where another sequence shares them they are not free: its next
        pages are then no longer promised."""
        assert sequence.block_table is not None
        freed = self.cache.drop(sequence.block_table, sequence.retired)
        if freed and sequence.phase is not SequencePhase.LEASED:
            self.reservations.set(sequence, sequence.reserved + freed)

    def adopt_cached(self, sequence: Sequence, tokens: int) -> int:
        """Gives a sequence in HANDOFF the pages that the prefix tree holds of its first `tokens` tokens, the
        whole prompt.

        Returns the number of page indexes; what they cost is taken out of the reservation, which covers the
        prompt.
        """
        self.cache_pending_prefixes()
        known, namespace = sequence.tokens[:tokens], sequence.request.namespace
        sequence.block_table = self.cache.hold(
            known, namespace, tokens // self.cache.page_size, position=tokens
        )
        self.reservations.use(sequence, sequence.block_table.held)
        return len(sequence.block_table)

    def cache_prefix(self, sequence: Sequence) -> None:
        """Inserts the full pages of the sequence's final tokens into the prefix tree: all of them, or none
        while that would lock pages reserved for others. Then gives up those that it no longer sees."""
        assert sequence.block_table is not None
        tokens, spare = sequence.tokens[: sequence.retired], max(0, self.reservations.headroom)
        self.cache.commit(sequence.block_table, tokens, sequence.request.namespace, spare)
        self.drop_unseen(sequence)

    def cache_prefix_later(self, sequence: Sequence) -> None:
        """Like `cache_prefix`, but at the next `cache_pending_prefixes`: neither first tokens nor a launch
        wait for it."""
        self._uncached.append(sequence)

    def cache_pending_prefixes(self) -> None:
        """Called before the tree is searched, and before results are committed."""
        uncached, self._uncached = self._uncached, []
        for sequence in uncached:
            self.cache_prefix(sequence)

    def retire(self, step: int, pinned: tuple[BlockTable, ...]) -> None:
        """The step has retired: frees what it was the last to use."""
        self.cache_pending_prefixes()
        self.retired_step = step
        self.cache.retire(step)
        self.slots.retire(step)
        for block_table in pinned:
            self.cache.unpin(block_table)

    # --- from one queue to another ----------------------------------------------------------------------

    def admit(
        self, leader: Sequence, followers: list[Sequence], reserved: int, block_table: BlockTable | None
    ) -> None:
        """Admits a waiting sequence and the choices that will fork from it. `reserved`: pages reserved.
        `block_table`: the cached pages of a prompt computed here; None: it is computed elsewhere."""
        self.waiting.remove(leader)
        leader.diverges = 0
        if self.cache.has_states and block_table is not None and leader.encoded is not None:
            leader.diverges = self.cache.known_length(leader.encoded, leader.request.namespace)
        if block_table is not None and leader.request.cached_tokens is None:
            leader.request.tiers = leader.tiers(len(block_table), self.cache.page_size)
        leader.encoded = leader.match = leader.promotion = leader.disk_read = None
        leader.block_table = block_table
        if block_table is not None:
            leader.computed = leader.retired = len(block_table) * self.cache.page_size
        self.reservations.set(leader, reserved)
        leader.followers = followers
        for sequence in (leader, *followers):
            sequence.phase = SequencePhase.HANDOFF if block_table is None else SequencePhase.PROMPT
            sequence.slot = self.slots.take()
        (self.handoffs if block_table is None else self.prompts).append(leader)
        self.record(leader.request, EventKind.ADMITTED, leader.computed, 0)

    def requeue(self, leader: Sequence) -> None:
        """Takes an admitted sequence's pages and slot away and queues it to be admitted and computed
        again."""
        if leader.phase is SequencePhase.HANDOFF:
            self.abandon(leader)
        group = [leader, *leader.followers]
        if not leader.request.reported:
            leader.request.prompt_logprobs.clear()
        leader.request.pooled = None
        for sequence in group:
            self._vacate(sequence)
            sequence.phase = SequencePhase.WAITING
        # Before the fork the followers are not scheduled.
        for sequence in group if leader.request.forked else [leader]:
            if sequence.finish is not None:
                sequence.phase = SequencePhase.ENDED
            else:
                self.waiting.add(sequence)

    def lease(self, leader: Sequence) -> None:
        """The prompt is complete: keeps its pages, frees its slots and its reservation."""
        self.prompts.remove(leader)
        self.cache_prefix_later(leader)
        for sequence in (leader, *leader.followers):
            self._give_slot_back(sequence)
            self.reservations.set(sequence, 0)
            sequence.phase = SequencePhase.LEASED
        forget_images(leader.request)

    def start_decoding(self, leader: Sequence, output_margin: int) -> None:
        """The prompt is computed and the first tokens are known: forks the followers, which take a share of
        the reservation for up to `output_margin` tokens each, and lets all choices run."""
        (self.handoffs if leader.phase is SequencePhase.HANDOFF else self.prompts).remove(leader)
        self.record(leader.request, EventKind.RUNNING, 0, 0)
        group = [leader, *leader.followers]
        prefix = leader.tokens[: leader.retired]
        if leader.followers:
            self.cache_prefix(leader)  # they share the tree's pages
        else:
            self.cache_prefix_later(leader)
        for follower in leader.followers:
            if follower.finish is None:
                self._fork(leader, follower, prefix, output_margin)
        leader.followers = []
        if leader.finish is None:
            leader.phase = SequencePhase.RUNNING
            self.running.append(leader)
        self.running.sort(key=lambda s: s.rank)
        self.end_finished(group)
        forget_images(leader.request)

    def _fork(self, leader: Sequence, follower: Sequence, prefix: list[int], output_margin: int) -> None:
        """Gives the follower the shared full pages and a copy of the last, partial one."""
        assert leader.block_table is not None
        full = len(prefix) // self.cache.page_size
        follower.phase = SequencePhase.RUNNING
        namespace, position = leader.request.namespace, len(prefix)
        locked = self.cache.unlocked(prefix, namespace, full, position)
        if leader.block_table.committed < full or locked > max(0, self.reservations.headroom):
            # Not from the tree: that would lock pages outside its reservation.
            self.requeue(follower)
            return
        block_table = self.cache.hold(prefix, namespace, full, position)
        follower.block_table = block_table
        # Each choice takes its own page for the tail and its share of the output margin.
        share = min(leader.reserved, len(self.cache.groups) * (1 + self.rows(output_margin)))
        self.reservations.set(leader, leader.reserved - share)
        self.reservations.set(follower, share)
        partial = len(prefix) % self.cache.page_size != 0
        if len(block_table) < full or (partial and not self.extend(follower, full + 1)):
            self.requeue(follower)
            return
        if partial:
            self.cache.pin(leader.block_table)
            pairs = zip(leader.block_table.tables, block_table.tables, strict=True)
            copied = tuple((source[full], target[full]) for source, target in pairs)
            self.copies.append(Copy(leader.block_table, follower, copied))
        follower.computed = follower.retired = len(prefix)
        self.running.append(follower)

    def end_finished(self, sequences: list[Sequence]) -> None:
        """Ends finished sequences; reports a request whose choices have all finished."""
        for sequence in sequences:
            if sequence.finish is not None:
                self.end(sequence)
        request = sequences[0].request
        if request.ended and self.forget(request):
            self.events.append(FinishedEvent(request))

    def end(self, sequence: Sequence) -> None:
        if sequence.phase is SequencePhase.ENDED:
            return
        if sequence.phase is SequencePhase.WAITING and sequence in list(self.waiting):
            self.waiting.remove(sequence)
        self._vacate(sequence)
        sequence.phase = SequencePhase.ENDED
        sequence.drafting = None  # which may know the sequence

    def _vacate(self, sequence: Sequence) -> None:
        for queue in (self.prompts, self.running, self.handoffs):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.block_table is not None:
            if sequence.phase is not SequencePhase.HANDOFF and sequence.retired:
                self.cache_prefix(sequence)
            if sequence in self._uncached:
                self._uncached.remove(sequence)
            self.cache.release(sequence.block_table, sequence.last_step)
            sequence.block_table = None
        self._give_slot_back(sequence)
        self.reservations.set(sequence, 0)
        sequence.slot_ready = False
        sequence.computed = sequence.retired = sequence.unread = sequence.drafted = sequence.replay = 0
        sequence.epoch += 1

    def _give_slot_back(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self.slots.give_back(sequence.slot, sequence.last_step)
            sequence.slot = None
