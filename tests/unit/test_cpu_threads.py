"""The numbers of threads for small steps are measured, and used for small steps only."""

import pytest
import torch

from baton.engine.cpu_threads import TunedRunner
from baton.engine.plan import PlanRow, StepPlan, StepResult


class Costly:
    """A runner whose steps take as long as `cost` says for the threads in use; of many rows, `many_rows`.
    Its time passes in its steps only."""

    max_slots, vocab_size = 16, 10

    def __init__(self, cost, many_rows=None):
        self.cost = cost
        self.many_rows = many_rows or cost
        self.used = []
        self.time = 0.0

    def launch(self, plan):
        self.used.append(torch.get_num_threads())
        self.time += (self.many_rows if len(plan.rows) > 1 else self.cost)[self.used[-1]]
        return plan.number

    def clock(self):
        return self.time

    def read(self, launched_step):
        return StepResult(launched_step)


@pytest.fixture
def four_threads(monkeypatch):
    monkeypatch.setattr("baton.cgroups.cores", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def plan(tokens):
    return StepPlan(1, (PlanRow(0, tuple(range(tokens)), 0, (tuple(range(tokens)),)),))


@pytest.mark.parametrize(
    ("cost", "chosen"),
    [
        ({1: 0.008, 2: 0.004, 4: 0.002}, 4),
        ({1: 0.008, 2: 0.002, 4: 0.004}, 2),
        ({1: 0.003, 2: 0.003, 4: 0.003}, 1),
        ({1: 0.1, 2: 0.097, 4: 0.098}, 1),
    ],
)
def test_the_fastest_is_chosen_and_the_fewest_of_equals(four_threads, cost, chosen):
    runner = Costly(cost)
    tuned = TunedRunner(runner, runner.clock)
    assert tuned.small_steps == {4: chosen, 32: chosen}
    assert (tuned.max_slots, tuned.vocab_size) == (runner.max_slots, runner.vocab_size)
    runner.used.clear()
    for tokens in (1, 33, 4):
        tuned.read(tuned.launch(plan(tokens)))
    assert runner.used == [chosen, 4, chosen]


def test_steps_of_many_rows_have_a_number_of_their_own(four_threads):
    runner = Costly({1: 0.002, 2: 0.002, 4: 0.002}, many_rows={1: 0.008, 2: 0.004, 4: 0.002})
    tuned = TunedRunner(runner, runner.clock)
    runner.used.clear()
    for tokens in (4, 5, 32):
        tuned.read(tuned.launch(plan(tokens)))
    assert runner.used == [1, 4, 4]


def test_measuring_ends_in_time(four_threads):
    runner = Costly({1: 8.0, 2: 4.0, 4: 2.0})
    assert TunedRunner(runner, runner.clock).small_steps == {4: 1, 32: 1}
    assert set(runner.used) == {1}


@pytest.mark.parametrize("groups", [1, 3])
def test_rows_have_a_table_for_each_group(four_threads, groups):
    runner, tables = Costly({1: 0.008, 2: 0.004, 4: 0.002}), set()
    launch = runner.launch

    def looked_at(plan):
        tables.update(row.tables for row in plan.rows)
        return launch(plan)

    runner.launch = looked_at
    TunedRunner(runner, runner.clock, groups=groups)
    assert tables == {((0,),) * groups}


def test_one_core_is_left_to_others(four_threads, monkeypatch):
    monkeypatch.setattr("baton.cgroups.cores", lambda: 2)
    runner = Costly({1: 0.008, 2: 0.002, 4: 0.001})
    tuned = TunedRunner(runner, runner.clock)
    assert tuned.small_steps == {4: 1, 32: 1} and tuned.threads == 4


def test_one_thread_is_not_measured(four_threads):
    torch.set_num_threads(1)
    runner = Costly({1: 1.0})
    assert TunedRunner(runner).small_steps == {4: 1, 32: 1} and not runner.used
