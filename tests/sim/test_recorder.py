"""What nodes record of requests is in order, under all faults of the simulator."""

from __future__ import annotations

from itertools import pairwise

import pytest

from baton.sim.cluster import SimCluster
from baton.sim.scenario import make_scenario
from baton.sim.worker import Worker
from baton.tracing.recorder import Event, EventKind
from baton.worker.prefill.core import PrefillCore

SEEDS = range(12)


def stories(worker: Worker) -> list[list[Event]]:
    """Events of each attempt, at a prefill node of each try. There a name may come again after it has ended,
    from a caller that uses another's."""
    found: dict[tuple[int, ...], list[Event]] = {}
    prefill = isinstance(worker.core, PrefillCore)
    for event in worker.recorder.all():
        name = (event.gateway, event.request, event.attempt, event.decode_try if prefill else 0)
        found.setdefault(name, []).append(event)
    return [life for story in found.values() for life in lives(story)]


def lives(story: list[Event]) -> list[list[Event]]:
    found: list[list[Event]] = [[]]
    for event in story:
        if not found[-1] and event.kind is not EventKind.RECEIVED:  # the name came again before it had ended
            found[-1].append(
                found[-2].pop(max(i for i, e in enumerate(found[-2]) if e.kind is EventKind.RECEIVED))
            )
        found[-1].append(event)
        if event.kind is EventKind.ENDED:
            found.append([])
    return [life for life in found if life]


def check(story: list[Event]) -> None:
    kinds = [event.kind for event in story]
    assert all(one.at <= other.at for one, other in pairwise(story)), story
    assert kinds[0] is EventKind.RECEIVED and kinds[-1] is EventKind.ENDED, kinds
    assert kinds.count(EventKind.QUEUED) <= 1, kinds  # more RECEIVED: a name in use, refused
    assert kinds.count(EventKind.FIRST_TOKEN) <= 1, kinds
    for later, earlier in (
        (EventKind.ADMITTED, EventKind.QUEUED),
        (EventKind.CHUNK_BEGUN, EventKind.ADMITTED),
    ):
        if later in kinds:
            assert kinds.index(earlier) < kinds.index(later), kinds
    steps = [event.step for event in story if event.kind is EventKind.CHUNK_BEGUN]
    for event in story:
        if event.kind is EventKind.CHUNK_ENDED:
            assert event.step in steps, story
    pulls = 0
    for kind in kinds:
        pulls += (kind is EventKind.PULL_BEGUN) - (kind is EventKind.PULL_ENDED)
        assert pulls >= 0, kinds


@pytest.mark.parametrize("seed", SEEDS)
def test_events_are_in_order(seed):
    cluster = SimCluster(make_scenario(seed))
    cluster.run()
    told = 0
    for worker in [process for process in cluster.processes.values() if isinstance(process, Worker)]:
        for story in stories(worker):
            check(story)
            told += 1
    assert told
