"""What a step costs: figures of a plan, and coefficients from measured steps."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest

from baton.engine.plan import PlanRow, SlotInit, StepPlan, step_load
from baton.engine.sampling_params import SamplingParams
from baton.engine.timed_runner import TimedRunner
from baton.step_cost import StepCost, StepLoad, fit, read_cost

COST = StepCost(fixed=2e-3, row=1e-4, key=2e-8, token=5e-5, pair=1e-8)


def test_a_steps_figures():
    rows = [
        PlanRow(slot=0, tokens=None, start=9, tables=((0,),), sample=(0,)),
        PlanRow(slot=1, tokens=None, start=4, tables=((1,),), sample=(1,)),
        PlanRow(slot=2, tokens=(7, 8, 9), start=10, tables=((2,),)),
        PlanRow(slot=3, tokens=(7, 8), start=0, tables=((3,),)),
    ]
    assert step_load(rows) == StepLoad(
        decode_sequences=2, context_tokens=15, prefill_tokens=5, attention_pairs=11 + 12 + 13 + 1 + 2
    )


def test_a_fit_finds_what_the_steps_were_made_of():
    rng = random.Random(1)
    measured = []
    for _ in range(60):
        rows, tokens = rng.randrange(1, 64), rng.choice((0, 0, 100, 400))
        load = StepLoad(rows, rows * rng.randrange(10, 900), tokens, tokens * rng.randrange(1, 900))
        measured.append((load, COST.seconds(load) * rng.uniform(0.99, 1.01)))
    found = fit(measured)
    for load, seconds in measured:
        assert found.seconds(load) == pytest.approx(seconds, rel=0.03)


def test_a_fit_has_no_negative_costs():
    # Steps that get faster with their rows: noise, not a law.
    found = fit([(StepLoad(decode_sequences=rows), 1e-3 * (1 - rows / 100)) for rows in (1, 2, 4, 8)])
    assert found.row == 0 and found.fixed == pytest.approx(1e-3, rel=0.1)
    with pytest.raises(ValueError, match="no step"):
        fit([])


def test_a_profile_that_is_none_says_so(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"step": asdict(COST)}))
    assert read_cost(path) == COST
    path.write_text(json.dumps({"step": {**asdict(COST), "row": -1.0}}))
    with pytest.raises(ValueError, match="below 0"):
        read_cost(path)
    for text in ("", "[]", "{}", '{"step": {"fixed": 1}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no profile"):
            read_cost(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_cost(tmp_path / "none")


def test_a_timed_runner_takes_its_time_and_is_a_function_of_seed_and_position():
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    runner = TimedRunner(COST, max_slots=4, vocab_size=500, clock=lambda: now[0], sleep=sleep)
    params = SamplingParams(max_tokens=8)
    init = SlotInit(slot=1, params=params, seed=7, prompt=(), output=())
    chunk = PlanRow(slot=1, tokens=(1, 2, 3), start=0, tables=((0,),), sample=(1,))
    decode = PlanRow(slot=1, tokens=None, start=3, tables=((0,),), sample=(1,))
    # Two steps in flight, as with overlap: the second begins when the first has ended.
    first = runner.launch(StepPlan(1, (chunk,), (init,)))
    second = runner.launch(StepPlan(2, (decode,)))
    tokens = [runner.read(launched_step).rows[0].tokens[0] for launched_step in (first, second)]
    assert slept == pytest.approx(
        [
            COST.seconds(StepLoad(prefill_tokens=3, attention_pairs=6)),
            COST.seconds(StepLoad(decode_sequences=1, context_tokens=4)),
        ]
    )
    again = TimedRunner(COST, max_slots=4, vocab_size=500, clock=lambda: now[0], sleep=sleep)
    resumed = PlanRow(slot=2, tokens=(1, 2, 3, tokens[0]), start=0, tables=((0,),), sample=(2,))
    launched_step = again.launch(StepPlan(1, (resumed,), (SlotInit(2, params, 7, (), ()),)))
    assert again.read(launched_step).rows[0].tokens[0] == tokens[1]
    assert tokens[0] != tokens[1] and all(0 <= token < 500 for token in tokens)
