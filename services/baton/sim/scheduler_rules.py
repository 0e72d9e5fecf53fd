"""Rules that a scheduler's state keeps between any two calls: who is where, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from baton.engine.request import Sequence, SequencePhase
from baton.engine.scheduler import Scheduler
from baton.sim.world import Violation

_COMPUTED_HERE = (SequencePhase.PROMPT, SequencePhase.RUNNING)
_WITH_SLOT = (SequencePhase.HANDOFF, *_COMPUTED_HERE)


def check_scheduler(scheduler: Scheduler) -> None:
    """Raises Violation."""
    sequences = [s for request in scheduler.requests.values() for s in request.sequences]
    follow = {f for s in (*scheduler.prompts, *scheduler.handoffs) for f in s.followers}
    for sequence in sequences:
        leads = sequence not in follow and (sequence.request.forked or sequence.index == 0)
        wrong = _wrong(scheduler, sequence, leads)
        if wrong:
            name = f"choice {sequence.index} of {sequence.request.key}, {sequence.phase.name}"
            raise Violation(f"scheduler: {name}: {wrong}")
    known = set(sequences)
    queues = [list(scheduler.waiting), scheduler.prompts, scheduler.running, scheduler.handoffs]
    if not all(known.issuperset(queue) and len(set(queue)) == len(queue) for queue in queues):
        raise Violation("scheduler: a queue has a sequence twice, or one that has ended")
    for queue in (queues[0], scheduler.running):
        if any(a.rank > b.rank for a, b in pairwise(queue)):
            raise Violation("scheduler: a queue is not in the order of its ranks")
    reserved = sum(sequence.reserved for sequence in sequences)
    if scheduler.reservations.total != reserved:
        raise Violation(f"scheduler: {scheduler.reservations.total} pages reserved, {reserved} by sequences")
    slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
    if len(set(slots)) < len(slots) or any(map(scheduler.slots.is_free, slots)):
        raise Violation("scheduler: a slot is used twice, or free")


def _wrong(scheduler: Scheduler, sequence: Sequence, leads: bool) -> str:
    """`leads`: it is not one that will fork from another, which is not scheduled and holds its slot only."""
    phase, block_table = sequence.phase, sequence.block_table
    queues: dict[SequencePhase, Iterable[Sequence]] = {
        SequencePhase.WAITING: scheduler.waiting,
        SequencePhase.PROMPT: scheduler.prompts,
        SequencePhase.RUNNING: scheduler.running,
        SequencePhase.HANDOFF: scheduler.handoffs,
    }
    for queue_of, queue in queues.items():
        if (sequence in list(queue)) is not (phase is queue_of and leads):
            return f"the queue of {queue_of.name} is wrong about it"
    if (sequence.slot is not None) is not (phase in _WITH_SLOT):
        return f"slot {sequence.slot}"
    if sequence.reserved < 0 or (sequence.reserved and not (phase in _WITH_SLOT and leads)):
        return f"{sequence.reserved} pages reserved"
    if phase not in (*_WITH_SLOT, SequencePhase.LEASED) or not leads:
        if block_table is not None:
            return "pages are held"
    elif phase in _COMPUTED_HERE:
        if block_table is None or len(block_table) < scheduler.rows(sequence.computed):
            return "pages are lacking"
        if block_table.committed * scheduler.cache.page_size > sequence.retired:
            return "pages are in the tree that are not final"
    counts = (sequence.retired, sequence.computed, len(sequence.tokens) + sequence.unread)
    if sequence.unread < 0 or sorted(counts) != list(counts):
        return f"retired, computed, known and launched: {counts}, {sequence.unread} not read"
    if phase is SequencePhase.WAITING and (sequence.computed or sequence.slot_ready):
        return "something is said to be computed of it"
    if phase is not SequencePhase.WAITING and (sequence.encoded is not None or sequence.match is not None):
        return "its tokens are still kept encoded"
    return ""
