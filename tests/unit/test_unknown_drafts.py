"""Drafts that only the device knows may be stop tokens: nothing behind one counts."""

from __future__ import annotations

import pytest

from baton.engine.draft.base import Drafter
from baton.engine.plan import RowResult, StepResult
from baton.engine.request import EngineFinishReason, EngineRequest, FailedEvent, TokenEvent
from baton.engine.sampler import KeptToken, row_results
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree

STOP = 9


class Names(Drafter):
    name, computes = "names", True

    def draft(self, sequence, most):
        return [-1 - place for place in range(most)]


def step_of(*sampled, finite=True, numbers=True):
    """A scheduler that has committed a step with three drafts, and what came of it. `sampled`: its first
    token, and those behind right drafts, of which all but the first come of no numbers unless `finite`;
    without `numbers` the first does, too."""
    cache = KvCacheManager(PageAllocator(40), PrefixTree(16))
    limits = SchedulerConfig(context_length=256, token_budget=64, max_rows=4, draft_tokens=3)
    scheduler = Scheduler(cache, limits, drafter=Names())
    params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=frozenset({STOP}))
    scheduler.submit(EngineRequest("a", (1, 2, 3), params))
    step = scheduler.plan()
    scheduler.commit(step, StepResult(step.plan.number, (RowResult((4,)),)))
    scheduler.take_events()
    step = scheduler.plan()
    (row,) = step.plan.rows
    assert row.drafts == (-1, -2, -3)
    first, *rest = sampled
    kept = {0: [KeptToken(token, None, finite or at == 0, "") for at, token in enumerate(rest)]}
    rows = row_results(step.plan.rows, [first], [numbers], {}, {}, {}, kept)
    scheduler.commit(step, StepResult(step.plan.number, rows))
    return scheduler, [each for each in scheduler.take_events() if isinstance(each, TokenEvent | FailedEvent)]


@pytest.mark.parametrize(
    ("sampled", "tokens", "drafted", "accepted"),
    [
        ((5, 6, 7, 8), [5, 6, 7, 8], [1, 1, 1], [1, 1, 1]),
        ((5, 6), [5, 6], [1, 1, 1], [1, 0, 0]),
        ((5, STOP), [5, STOP], [1, 1, 1], [1, 0, 0]),
        ((5, STOP, 6, 7), [5, STOP], [1, 1, 0], [1, 1, 0]),
        ((STOP, 5, 6, 7), [STOP], [1, 0, 0], [1, 0, 0]),
    ],
)
def test_what_counts(sampled, tokens, drafted, accepted):
    scheduler, events = step_of(*sampled)
    assert [event.token for event in events] == tokens
    assert (events[-1].finish is EngineFinishReason.STOP) == (STOP in tokens)
    assert scheduler.drafts.drafted == drafted and scheduler.drafts.accepted == accepted


def test_what_is_no_number_behind_a_stop_token_fails_nothing():
    _, events = step_of(5, STOP, 6, 7, finite=False)
    assert [event.token for event in events] == [5, STOP]


@pytest.mark.parametrize("sampled", [(5, 6, STOP, 7), (5, 6, 7)])
def test_what_is_no_number_before_it_does(sampled):
    _, events = step_of(*sampled, finite=False)
    assert [type(event) for event in events] == [FailedEvent]


def test_a_token_that_comes_of_no_numbers_stops_nothing():
    _, events = step_of(STOP, numbers=False)
    assert [type(event) for event in events] == [FailedEvent]
