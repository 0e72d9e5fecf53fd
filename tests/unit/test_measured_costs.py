"""What steps and pulls cost: measured at a worker's start, and kept true while it works."""

import random
from collections import Counter
from dataclasses import astuple

import pytest

from baton.engine.idle_steps import AGAIN_SECONDS, STEP_SECONDS, TURN_SECONDS, IdleSteps
from baton.engine.plan import step_load
from baton.engine.timed_runner import TimedRunner
from baton.engine.warmup import BUDGET_SECONDS, ENOUGH, ROUNDS, StepLimits, measure_step_cost
from baton.handoff.pull_cost import PullCost, PullMeter
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.step_cost import CostCalibration, StepCost, StepLoad

COST = StepCost(fixed=4e-3, row=5e-5, key=2e-8, token=2e-5, pair=1e-9)
LIMITS = StepLimits(token_budget=2048, context_length=4096, page_size=16, pages=1024)
LOADS = [
    StepLoad(decode_sequences=7, context_tokens=900),
    StepLoad(decode_sequences=48, context_tokens=48 * 700),
    StepLoad(prefill_tokens=700, attention_pairs=700 * 701 // 2),
    StepLoad(decode_sequences=20, context_tokens=9000, prefill_tokens=400, attention_pairs=400 * 600),
]


class Machine:
    """A device and a clock: time passes while a step is read."""

    def __init__(self, cost=COST, warm_up=0.0, slots=64):
        self.now, self.warm_up, self.plans = 100.0, warm_up, []
        self.runner = TimedRunner(
            cost, max_slots=slots, vocab_size=100, clock=lambda: self.now, sleep=self._sleep
        )
        self.max_slots, self.vocab_size = slots, 100

    def _sleep(self, seconds):
        self.now += seconds

    def launch(self, plan):
        if step_load(plan.rows) not in {step_load(each.rows) for each in self.plans}:
            self.now += self.warm_up  # the first step of a size
        self.plans.append(plan)
        return self.runner.launch(plan)

    def read(self, launched_step):
        return self.runner.read(launched_step)

    def measure(self, **options):
        return measure_step_cost(self, options.pop("limits", LIMITS), clock=lambda: self.now, **options)


def test_what_is_measured_is_what_steps_cost():
    machine = Machine()
    found = machine.measure()
    for load in LOADS:
        assert found.seconds(load) == pytest.approx(COST.seconds(load), rel=0.02)


def test_steps_that_are_short_are_run_a_few_times_only():
    machine = Machine(StepCost(*(value / 50 for value in astuple(COST))))
    machine.measure()
    times = Counter(step_load(plan.rows) for plan in machine.plans)
    assert set(times.values()) == {ENOUGH}


def test_what_a_first_step_takes_longer_does_not_count():
    """Kernels that are compiled, caches that are cold: for so long that not all sizes can be had."""
    found = Machine(warm_up=0.1).measure()
    for load in LOADS:
        assert found.seconds(load) == pytest.approx(COST.seconds(load), rel=0.05)


def test_a_slow_machine_is_not_measured_for_long():
    machine = Machine(StepCost(fixed=0.1, row=1e-3, key=0, token=2e-3, pair=0))
    found = machine.measure()
    assert machine.now - 100.0 < ROUNDS * BUDGET_SECONDS + 0.3
    # What has to be told apart in any case is.
    assert found.seconds(StepLoad(decode_sequences=1)) == pytest.approx(0.101, rel=0.1)
    assert found.seconds(StepLoad(prefill_tokens=32)) == pytest.approx(0.164, rel=0.1)
    machine = Machine(StepCost(fixed=5.0, row=0, key=0, token=1.0, pair=0))
    found = machine.measure()
    assert len(machine.plans) == 4 and found.token > 0
    # One that only the first round had time for has no time that counts.
    machine = Machine()
    took = machine.runner.read

    def read(launched_step):
        result = took(launched_step)
        machine.now += 0.3 if len(machine.plans) == 6 else 0.0
        return result

    machine.read = read
    found = machine.measure()
    assert found.seconds(LOADS[0]) == pytest.approx(COST.seconds(LOADS[0]), rel=0.05)


def test_a_busy_machine_is_measured_when_it_is_free():
    """Something else takes the processor while the first steps are taken."""
    machine = Machine()
    took = machine.runner.read

    def read(launched_step):
        result = took(launched_step)
        machine.now += 0.2 if len(machine.plans) <= 4 else 0.0
        return result

    machine.read = read
    found = machine.measure()
    for load in LOADS:
        assert found.seconds(load) == pytest.approx(COST.seconds(load), rel=0.05)


@pytest.mark.parametrize(
    ("slots", "limits", "decodes", "prompts"),
    [
        (64, LIMITS, [(1, 0), (16, 0), (64, 0), (64, 1024)], [(0, 32), (0, 256), (1024, 32), (0, 2048)]),
        (8, StepLimits(16, 32, 16, 2), [(1, 0), (2, 0), (8, 0), (8, 15)], [(0, 16), (15, 16)]),
        (1, StepLimits(16, 32, 16, 1), [(1, 0)], [(0, 15)]),
    ],
)
def test_what_is_measured_are_few_and_many_rows_and_short_and_long_chunks(slots, limits, decodes, prompts):
    """Rows and their start, of chunks their start and length. All of them, on a machine that is fast."""
    machine = Machine(StepCost(*(value / 50 for value in astuple(COST))), slots=slots)
    machine.measure(limits=limits)
    sizes = list({step_load(plan.rows): plan.rows for plan in machine.plans}.values())
    assert [(len(rows), rows[0].start) for rows in sizes if rows[0].tokens is None] == decodes
    assert [(rows[0].start, rows[0].count) for rows in sizes if rows[0].tokens is not None] == prompts
    first, second, *_ = sizes
    assert first[0].tokens is None and second[0].tokens is not None, "what tells the two costs apart"
    for rows in sizes:
        assert [row.slot for row in rows] == list(range(len(rows)))
        assert all(len(row.tables[0]) == -(-(row.start + row.count) // 16) for row in rows)


def test_a_round_takes_as_many_steps_as_end_in_its_time():
    machine = Machine(StepCost(fixed=0.25, row=0, key=0, token=0, pair=0))
    machine.measure(budget=1.0)
    loads = [step_load(plan.rows) for plan in machine.plans]
    assert loads.index(loads[0], 1) == 4


@pytest.mark.parametrize("groups", [1, 3])
def test_a_row_has_a_table_for_each_group(groups):
    limits = StepLimits(token_budget=64, context_length=128, page_size=16, pages=8, groups=groups)
    row = limits.row(0, (1, 2), 0, (5,))
    assert row.tables == ((5,),) * groups


class Idle:
    """A worker with nothing to do, on a machine that others used while it was measured."""

    def __init__(self, factor=2.0, pages=1024):
        self.machine = Machine()
        self.allocator = PageAllocator(pages)
        cache = KvCacheManager(self.allocator, PrefixTree(16))
        self.turns = IdleSteps(self.machine, LIMITS, cache, lambda: self.machine.now)
        self.calibration = CostCalibration(StepCost(*(factor * value for value in astuple(COST))))

    def run(self, turns, interrupted=lambda: False):
        """The longest one, in seconds."""
        longest = 0.0
        for _ in range(turns):
            self.machine.now += 0.5
            began = self.machine.now
            self.turns.turn(self.calibration, interrupted)
            longest = max(longest, self.machine.now - began)
            assert self.allocator.counts().owned == 0
        return longest


@pytest.mark.parametrize("factor", [0.5, 2.0, 8.0])
def test_what_a_busy_start_got_wrong_is_found_out_when_nothing_is_to_be_done(factor):
    """A decode node that takes its prompts for slow gets none: steps in operation would never correct it."""
    idle = Idle(factor)
    for _ in range(200):
        idle.calibration.add(LOADS[0], COST.seconds(LOADS[0]))
    prompt = LOADS[2]
    assert idle.calibration.cost.token == factor * COST.token, "rows say nothing of prompts"
    assert idle.run(9) == 0.0, "others may still load"
    longest = idle.run(60)
    assert idle.calibration.cost.seconds(prompt) == pytest.approx(COST.seconds(prompt), rel=0.2)
    assert 0 < longest <= TURN_SECONDS + STEP_SECONDS


def test_prompts_that_a_disturbed_fit_took_for_free_are_found_to_cost():
    idle = Idle()
    idle.calibration = CostCalibration(StepCost(3 * COST.fixed, COST.row, 0.0, 0.0, 0.0))
    idle.run(60)
    assert idle.calibration.cost.seconds(LOADS[2]) == pytest.approx(COST.seconds(LOADS[2]), rel=0.25)


def test_they_rest_and_what_comes_waits_for_one_of_them():
    idle = Idle()
    idle.run(100)
    before = len(idle.machine.plans)
    rows = [row.tokens is None for plan in idle.machine.plans for row in plan.rows]
    assert 2 * sum(rows) == pytest.approx(before, abs=before / 20), "decode rows and prompt chunks in turn"
    idle.run(100)
    assert len(idle.machine.plans) == before
    idle.machine.now += AGAIN_SECONDS
    asked = iter([False, True] * 20)
    longest = idle.run(20, lambda: next(asked))
    assert len(idle.machine.plans) == before + 20 and longest < 2 * STEP_SECONDS


def test_a_slow_node_runs_one_and_rests():
    idle = Idle()
    idle.machine.runner._cost = StepCost(*(100 * value for value in astuple(COST)))
    idle.run(100)
    assert len(idle.machine.plans) == 1


def test_they_take_no_page_that_holds_anything():
    idle = Idle(pages=60)
    taken = idle.allocator.take(30)
    idle.allocator.to_cached(taken)
    idle.run(100)
    used = {page for plan in idle.machine.plans for row in plan.rows for page in row.tables[0]}
    assert used and not used & set(taken)
    counts = idle.allocator.counts()
    assert (counts.cached, counts.free) == (30, 30)
    rest = idle.allocator.take(30)
    idle.machine.now += AGAIN_SECONDS
    before = len(idle.machine.plans)
    idle.allocator.to_cached(rest)
    idle.run(10)
    assert len(idle.machine.plans) == before, "nothing is evicted for them"


@pytest.mark.parametrize(
    "limits", [StepLimits(16, 32, 16, 2), StepLimits(512, 4096, 16, 3), StepLimits(8, 64, 16, 64)]
)
def test_steps_stay_within_what_an_engine_holds(limits):
    machine = Machine(slots=8)
    machine.measure(limits=limits)
    for plan in machine.plans:
        assert plan.num_tokens <= max(limits.token_budget, 8)
        for row in plan.rows:
            assert row.slot < 8 and row.start + row.count <= limits.context_length
            assert len(row.tables[0]) * limits.page_size >= row.start + row.count
            assert all(page < limits.pages for page in row.tables[0])


def steps(count, seed=1):
    draw = random.Random(seed)
    return [draw.choice(LOADS) for _ in range(count)]


def test_a_pace_finds_how_much_longer_rows_and_prompts_take():
    """Rows three times, prompts half as long as measured: told apart although steps have both."""
    truth = StepCost(3 * COST.fixed, 3 * COST.row, 3 * COST.key, COST.token / 2, COST.pair / 2)
    calibration = CostCalibration(COST)
    for load in steps(800):
        calibration.add(load, truth.seconds(load))
    for load in LOADS:
        assert calibration.cost.seconds(load) == pytest.approx(truth.seconds(load), rel=0.05)


def test_a_pace_follows_and_is_not_thrown_by_an_outlier():
    calibration = CostCalibration(COST)
    for number, load in enumerate(steps(300)):
        calibration.add(load, COST.seconds(load) * (1000.0 if number % 50 == 49 else 1.0))
        for each in LOADS:
            assert calibration.cost.seconds(each) < 1.15 * COST.seconds(each)


def test_steps_without_prompts_say_nothing_of_prompts():
    calibration = CostCalibration(COST)
    for _ in range(200):
        calibration.add(LOADS[0], 2 * COST.seconds(LOADS[0]))
    assert calibration.cost.token == COST.token and calibration.cost.fixed == pytest.approx(
        2 * COST.fixed, rel=0.01
    )


def test_a_pace_has_bounds():
    calibration = CostCalibration(COST)
    for _ in range(1000):
        calibration.add(LOADS[0], 1e9)
        calibration.add(LOADS[2], 1e-9)
    assert calibration.cost.fixed <= 33 * COST.fixed
    for seconds in (1e9, 1e-9):
        calibration = CostCalibration(COST)
        for _ in range(1000):
            calibration.add(LOADS[2], seconds)
        assert COST.token / 33 < calibration.cost.token < 33 * COST.token
    CostCalibration(StepCost(0, 0, 0, 0, 0)).add(LOADS[0], 1.0)  # nothing to stretch


def test_pulls_are_a_start_and_so_much_a_token():
    meter, truth, draw = PullMeter(), PullCost(2e-3, 1e-6), random.Random(2)
    assert meter.cost is None
    for number in range(60):
        tokens = draw.randrange(16, 4096)
        slow = 100 if number > 10 and number % 20 == 0 else 1
        meter.add(tokens, slow * truth.seconds(tokens) * draw.uniform(0.95, 1.05))
    for tokens in (64, 1024, 4096):
        assert meter.cost.seconds(tokens) == pytest.approx(truth.seconds(tokens), rel=0.25)


def test_pulls_of_one_size_have_no_negative_parts():
    meter = PullMeter()
    for _ in range(5):
        meter.add(512, 4e-3)
    assert meter.cost.seconds(512) == pytest.approx(4e-3)
    meter = PullMeter()
    for tokens, seconds in ((100, 3e-3), (1000, 2e-3), (2000, 1e-3)):
        meter.add(tokens, seconds)
    assert meter.cost.fixed >= 0 and meter.cost.token >= 0
    assert 5e-4 < meter.cost.seconds(1000) < 4e-3


def test_pulls_are_forgotten():
    meter = PullMeter()
    for seconds in (1e-3, 3e-3):
        for number in range(100):
            meter.add(500 + number, seconds)
    assert meter.cost.seconds(550) == pytest.approx(3e-3, rel=0.05)
