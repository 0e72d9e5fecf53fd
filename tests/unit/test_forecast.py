"""decode.overload and engine.step_stats: how long a request would wait, and who is refused for it."""

from __future__ import annotations

import pytest

from baton.engine.plan import PlanRow, StepPlan
from baton.engine.request import EngineRequest, SequencePhase
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.step_builder import Step
from baton.engine.step_stats import WATCHDOG_FACTOR, MovingAverage, StepStats
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.step_cost import CostCalibration, StepCost
from baton.worker.decode import admission_control
from baton.worker.decode.admission_control import FORECAST_SECONDS, MARGIN, AdmissionControl, Rates, forecast

RATES = Rates(step=0.01, first=0.5, output=20.0)
STOP = frozenset({0})


def sequence(max_tokens=100, done=0, deadline=1e9, stop=frozenset()):
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)
    request = EngineRequest(key=object(), prompt=(1, 2, 3), params=params, deadline=deadline)
    request.sequences[0].tokens += [7] * done
    return request.sequences[0]


def refused(found):
    return [waiting for waiting, _ in found.refused]


def test_nobody_waits_while_rows_are_free():
    hopeless = [sequence(deadline=0.0) for _ in range(3)]
    found = forecast(hopeless, [], rows=4, free=4, rates=RATES, now=1.0)
    assert found.wait == 0.0 and not found.refused


def test_nobody_is_refused_for_an_output_that_is_too_long_by_itself():
    """Partial output is better than none: here nothing is ahead, and the first prompt lacks pages only."""
    alone = sequence(100, deadline=1.0)
    assert not forecast([alone], [], rows=0, free=0, rates=RATES, now=0.0).refused


def test_a_wait_is_that_for_the_first_row_and_for_those_ahead():
    running = [sequence(100, done=40), sequence(100, done=90)]  # 60 and 10 tokens to go
    waiting = [sequence(100), sequence(50)]  # 0.5 s + 1 s, and 0.5 s + 0.5 s
    found = forecast(waiting, running, rows=2, free=0, rates=RATES, now=0.0)
    assert found.wait == pytest.approx(0.1 + (1.5 + 1.0) / 2)


def test_those_for_whom_rows_are_free_are_not_waited_for():
    running, waiting = [sequence(100, done=40)], [sequence(100), sequence(100), sequence(50)]
    found = forecast(waiting, running, rows=3, free=2, rates=RATES, now=0.0)
    assert found.wait == pytest.approx(0.6 + 1.0 / 3)
    assert forecast(waiting[:1], running, rows=3, free=2, rates=RATES, now=0.0).wait == 0.0


def test_who_would_end_too_late_is_refused_and_told_when_to_ask_again():
    running = [sequence(100, done=90)]
    first, second = sequence(100, deadline=2.0), sequence(100, deadline=3.0)
    found = forecast([first, second], running, rows=1, free=0, rates=RATES, now=0.0)
    assert refused(found) == [second]
    ((_, retry),) = found.refused
    assert retry == pytest.approx(MARGIN * (0.1 + 1.5) + 1.5 - 3.0)
    # The refused one is not in anybody's way.
    assert found.wait == pytest.approx(0.1 + 1.5)
    third = sequence(100, deadline=3.5)
    assert refused(forecast([first, second, third], running, 1, 0, RATES, now=0.0)) == [second]


def test_rows_serve_in_parallel():
    running = [sequence(100, done=99) for _ in range(8)]
    waiting = [sequence(100, deadline=3.1) for _ in range(8)]
    assert not forecast(waiting, running, rows=8, free=0, rates=RATES, now=0.0).refused
    assert len(forecast(waiting, running[:2], rows=2, free=0, rates=RATES, now=0.0).refused) > 2


def test_an_output_that_may_end_early_is_as_long_as_others_were():
    running = [sequence(100, done=99)]
    short = sequence(10_000, deadline=1.0, stop=STOP)  # 20 tokens, as others
    long = sequence(10_000, deadline=1.0)  # nothing ends it
    assert refused(forecast([short], running, 1, 0, RATES, now=0.0)) == []
    assert refused(forecast([long], running, 1, 0, RATES, now=0.0)) == [long]


def test_a_client_that_has_tokens_is_not_refused():
    started = sequence(100, done=5, deadline=0.5)
    assert not forecast([started], [sequence(100)], 1, 0, RATES, now=0.0).refused


def test_what_is_not_known_refuses_nobody():
    found = forecast([sequence(deadline=1.0)], [sequence()], 1, 0, Rates(0.0, 0.0, 0.0), now=0.0)
    assert found.wait == 0.0 and not found.refused


def step(number, *rows):
    return Step(StepPlan(number, rows), (), ())


def chunk(tokens):
    return PlanRow(0, tuple(range(tokens)), 0, ((0,),), ())


def test_the_meter_takes_each_step_for_the_time_after_the_one_before():
    stats = StepStats(token_budget=100)
    decode = PlanRow(0, None, 5, ((0,),), (0,))
    first, second, third = step(1, decode), step(2, chunk(80)), step(3, chunk(10))
    stats.planned(first, 1.0)
    stats.planned(second, 1.1)  # launched before the first was read
    stats.ended(first, 1.5)
    stats.ended(second, 1.9)
    assert stats.step.value == pytest.approx(0.5)
    assert stats.prompt_rate.value == pytest.approx(80 / 0.4)
    stats.planned(third, 9.0)
    assert stats.limit(0.0) == pytest.approx(WATCHDOG_FACTOR * 0.4), "no longer than the 80 tokens took"
    stats.ended(third, 9.1)
    assert stats.prompt_rate.value == pytest.approx(200.0), "a step that is nearly empty tells nothing"
    stats.planned(step(4, decode), 10.0)
    stats.failed(step(4, decode))
    assert not stats._planned


def test_a_first_prompt_that_stalls_is_told_by_what_it_should_cost():
    stats = StepStats(token_budget=100)
    stats.calibration = CostCalibration(StepCost(fixed=0.01, row=0.0, key=0.0, token=0.001, pair=0.0))
    stalled = step(1, chunk(80))
    stats.planned(stalled, 1.0)
    stats.ended(stalled, 11.0)
    assert 9.0 < stats.stalled < 10.0
    usual = step(2, chunk(80))
    stats.planned(usual, 20.0)
    stats.ended(usual, 20.1)
    assert 9.0 < stats.stalled < 10.0


def test_an_average_does_not_begin_with_a_first_step_that_stalls():
    stats = StepStats(token_budget=100)
    stats.calibration = CostCalibration(StepCost(fixed=0.01, row=0.0, key=0.0, token=0.0, pair=0.0))
    stats.planned(step(1, PlanRow(0, None, 7, ((0,),), (0,))), 1.0)
    stats.ended(step(1, PlanRow(0, None, 7, ((0,),), (0,))), 11.0)
    assert stats.step.value == pytest.approx(4 * 0.01)


def test_steps_correct_what_they_are_said_to_cost():
    stats = StepStats(token_budget=100)
    stats.calibration = CostCalibration(StepCost(fixed=0.01, row=0.0, key=0.0, token=0.001, pair=0.0))
    for number in range(1, 60):
        stats.planned(step(number, chunk(80)), number)
        stats.ended(step(number, chunk(80)), number + 0.18)
    assert stats.calibration.cost.token == pytest.approx(0.002, rel=0.1)


def test_an_average_begins_with_its_first_value():
    average = MovingAverage(0.5)
    average.add(4.0)
    average.add(2.0)
    assert average.value == 3.0


def test_choices_that_are_taken_up_again_are_not_refused():
    """Each waits by itself, with output or without; to refuse them would end the request once for each."""
    for delivered in [((7,), (), ()), (None, (), ())]:
        params = SamplingParams(max_tokens=100)
        resumed = EngineRequest(key=1, prompt=(1, 2), params=params, n=3, delivered=delivered, deadline=0.5)
        waiting = [each for each in resumed.sequences if each.phase is SequencePhase.WAITING]
        assert len(waiting) >= 2
        assert not forecast(waiting, [sequence(100)], 1, 0, RATES, now=0.0).refused


def test_a_forecast_is_made_now_and_then_and_when_something_has_arrived(monkeypatch):
    made = []
    monkeypatch.setattr(
        admission_control, "forecast", lambda *arguments: made.append(arguments[-1]) or forecast(*arguments)
    )
    config = SchedulerConfig(context_length=32, token_budget=8, max_rows=2)
    control = AdmissionControl(Scheduler(KvCacheManager(PageAllocator(8), PrefixTree(4)), config))
    for now in (1.0, 1.0 + 0.9 * FORECAST_SECONDS, 1.0 + FORECAST_SECONDS):
        control.late(now)
    control.arrived()
    control.late(1.0 + 1.1 * FORECAST_SECONDS)
    assert made == [1.0, 1.0 + FORECAST_SECONDS, 1.0 + 1.1 * FORECAST_SECONDS]
