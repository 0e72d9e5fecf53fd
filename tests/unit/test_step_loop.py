"""engine.step_loop: what other threads may ask of it at any moment."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from baton.engine.plan import StepPlan, StepResult
from baton.engine.step_loop import CALLS_SECONDS, REST_SECONDS, WARM_SECONDS, StepLoop


def test_the_age_of_a_turn_that_begins_meanwhile_is_not_negative():
    now = [10.0]
    loop = StepLoop(object(), object(), name="steps", clock=lambda: now[0], crashed=lambda error: None)

    def begins_a_turn() -> float:
        looked = now[0]
        now[0] = loop._last_begin = now[0] + 1.0  # the step thread, while the caller reads its clock
        return looked

    loop._clock = begins_a_turn
    assert loop.step_age >= 0.0


class Device:
    """A runner whose steps end when they are told to."""

    max_slots = vocab_size = 1

    def __init__(self):
        self.end = threading.Event()
        self.launched = threading.Semaphore(0)

    def launch(self, plan):
        self.launched.release()
        return plan

    def done(self, launched_step):
        return self.end.is_set()

    def read(self, launched_step):
        assert self.end.wait(10.0)
        return StepResult(launched_step.number)


class Step:
    def __init__(self, number):
        self.plan = StepPlan(number, ())


class Core:
    """Always has a step to do."""

    pressing = True

    def __init__(self):
        self.committed = 0
        self.flushed = []
        self.planned = 0

    def tick(self, now):
        pass

    def admit(self, now):
        pass

    def plan(self, now):
        self.planned += 1
        return Step(self.planned)

    def launched(self, step, launched):
        pass

    def commit(self, step, result, now):
        self.committed += 1

    def fail_step(self, step, message):
        raise AssertionError(message)

    def flush(self, step):
        self.flushed.append(step)


def running(overlap):
    core, device = Core(), Device()
    loop = StepLoop(core, device, name="steps", overlap=overlap, crashed=lambda error: None)
    loop.start()
    for _ in range(1 + overlap):
        assert device.launched.acquire(timeout=10.0)
    return core, device, loop


@pytest.mark.parametrize("overlap", [False, True])
def test_a_call_is_made_while_a_step_is_under_way_if_another_waits_behind_it(overlap):
    core, device, loop = running(overlap)
    try:
        for _ in range(3):
            called = threading.Event()
            loop.call(lambda core, now, called=called: called.set())
            assert called.wait(10.0 if overlap else 0.1) == overlap
            assert core.committed == 0
    finally:
        device.end.set()
        assert loop.stop()
    assert core.flushed.count(0) >= core.planned


def test_a_device_that_hangs_gives_no_sign_of_life():
    _, device, loop = running(overlap=True)
    try:
        time.sleep(CALLS_SECONDS + 0.2)
        called = threading.Event()
        loop.call(lambda core, now: called.set())
        assert not called.wait(0.3)
        assert loop.step_age > CALLS_SECONDS
    finally:
        device.end.set()
        assert loop.stop()


def test_a_step_that_has_ended_is_read_at_once():
    core, device, loop = running(overlap=True)
    device.end.set()
    deadline = time.monotonic() + 10.0
    while core.committed < 50 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert loop.stop() and core.committed >= 50


def test_a_loop_that_waits_for_its_device_stops_when_that_has_ended():
    _, device, loop = running(overlap=True)
    assert not loop.stop(0.1)
    device.end.set()
    assert loop.stop()


class Handing(Core):
    """What a step yields, another thread takes."""

    def __init__(self):
        super().__init__()
        self.yielded = threading.Event()
        self.taken = threading.Event()
        self.before_plan = []

    def plan(self, now):
        self.before_plan.append(self.taken.is_set())
        return super().plan(now)

    def flush(self, step):
        if step:
            self.taken.clear()
            self.yielded.set()


class Steady(Device):
    """Steps of 30 ms, one after the other."""

    free = 0.0

    def launch(self, plan):
        self.free = max(self.free, time.monotonic()) + 0.03
        return self.free, plan

    def done(self, launched_step):
        return time.monotonic() >= launched_step[0]

    def read(self, launched_step):
        return StepResult(launched_step[1].number)


def test_what_a_step_yields_goes_out_before_the_next_is_planned(monkeypatch):
    """The loop rests in between; here as long as a busy machine may need for it."""
    core, rests = Handing(), []

    def rest(seconds):
        rests.append(seconds)
        core.taken.wait(1.0)

    monkeypatch.setattr("baton.engine.step_loop.time", SimpleNamespace(monotonic=time.monotonic, sleep=rest))
    loop = StepLoop(core, Steady(), name="steps", overlap=True, crashed=lambda error: None)
    loop.start()
    for _ in range(40):
        assert core.yielded.wait(10.0)
        core.yielded.clear()
        core.taken.set()
    assert loop.stop()
    found = core.before_plan[5:35]
    assert sum(found) > 0.8 * len(found)
    assert 0 < min(rests) <= max(rests) <= REST_SECONDS


def test_the_way_to_a_launch_is_kept_warm_while_a_step_is_expected():
    core, turns, warmed = SimpleNamespace(expecting=False), [], []
    core.tick = core.admit = core.flush = lambda _: None
    core.plan = lambda now: turns.append(now)
    crashed = []
    loop = StepLoop(
        core, Device(), name="steps", crashed=crashed.append, warm=lambda: warmed.append(len(turns))
    )
    loop.start()
    while not turns:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(turns) == 1 and not warmed
    core.expecting, began = True, time.monotonic()
    loop.call(lambda core, now: None)
    while len(warmed) <= 10:
        time.sleep(0.01)
    core.expecting = False
    took = time.monotonic() - began
    time.sleep(0.1)
    most = len(turns)
    assert len(warmed) <= took / WARM_SECONDS + 1, "the last may end a little later"
    assert warmed == sorted(set(warmed)), "more than once between two turns"
    time.sleep(0.1)
    assert len(turns) == most, "it turns on, though nothing is expected"
    assert loop.stop() and not crashed


def test_an_idle_turn_is_told_when_the_thread_is_wanted():
    """By a call, or by the end of the node."""
    turns, crashed, called = threading.Semaphore(0), [], threading.Event()
    core = SimpleNamespace(expecting=False, plan=lambda now: None)
    core.tick = core.admit = core.flush = lambda _: None

    def spare(wanted):
        turns.release()
        last = time.monotonic() + 20.0
        while not wanted() and time.monotonic() < last:
            time.sleep(0.001)

    loop = StepLoop(core, Device(), name="steps", crashed=crashed.append, spare=spare)
    loop.start()
    assert turns.acquire(timeout=10.0)
    loop.call(lambda core, now: called.set())
    assert called.wait(10.0) and turns.acquire(timeout=10.0)
    assert loop.stop() and not crashed


def test_a_warm_turn_that_fails_ends_nothing():
    """A step would say what is wrong with the device; there is none."""
    told: list[Exception] = []
    core, tried, crashed, called = SimpleNamespace(expecting=True), [], [], threading.Event()
    core.tick = core.admit = core.flush = lambda _: None
    core.plan = lambda now: None

    def warm():
        tried.append(1)
        raise RuntimeError("out of pinned memory")

    loop = StepLoop(core, Device(), name="steps", crashed=crashed.append, warm=warm, cooled=told.append)
    loop.start()
    while not tried:
        time.sleep(0.01)
    time.sleep(20 * WARM_SECONDS)
    loop.call(lambda core, now: called.set())
    assert called.wait(10.0) and loop.stop()
    assert tried == [1] and not crashed
    assert [str(error) for error in told] == ["out of pinned memory"]
