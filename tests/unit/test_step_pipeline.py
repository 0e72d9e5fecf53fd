"""engine.pipeline: what the step loop does, without its thread."""

from __future__ import annotations

import pytest
from hash_runner import HashRunner, reference

from baton.engine.request import EngineRequest, FailedEvent, TokenEvent
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import PromptRoute, SchedulerConfig
from baton.engine.step_loop import StepPipeline
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.page_allocator import PageState

SIZE = 4


class Runner(HashRunner):
    def __init__(self, pages):
        super().__init__(pages, SIZE, 4)
        self.fail_launch = self.fail_read = False

    def launch(self, plan):
        if self.fail_launch:
            self.fail_launch = False
            raise MemoryError("no memory left")
        return super().launch(plan)

    def done(self, launched_step):
        if self.fail_read:
            raise RuntimeError("no answer")
        return super().done(launched_step)

    def read(self, launched_step):
        result = super().read(launched_step)
        if self.fail_read:
            self.fail_read = False
            raise RuntimeError("no answer")
        return result


class Core:
    """A scheduler as a node's core."""

    pressing = True

    def __init__(self, pages=32):
        self.allocator = PageAllocator(pages)
        config = SchedulerConfig(context_length=pages * SIZE, token_budget=32, max_rows=4)
        self.scheduler = Scheduler(KvCacheManager(self.allocator, PrefixTree(SIZE)), config)
        self.events = []
        self.calls = []
        self.admissions = 0

    def tick(self, now):
        self.calls.append(now)

    def admit(self, now):
        self.admissions += 1
        self.scheduler.admit_elsewhere()

    def plan(self, now):
        return self.scheduler.plan()

    def launched(self, step, launched):
        pass

    def commit(self, step, result, now):
        self.scheduler.commit(step, result)

    def fail_step(self, step, message):
        self.scheduler.fail_step(step, message)

    def flush(self, step):
        self.events += self.scheduler.take_events()


def make(overlap):
    core, runner = Core(), Runner(32)
    pipeline = StepPipeline(core, runner, overlap, lambda: 7.0)
    request = EngineRequest("a", tuple(range(10)), SamplingParams(max_tokens=6, seed=1))
    pipeline.inbox.append(lambda core, now: core.scheduler.submit(request))
    return core, runner, pipeline


def run(pipeline):
    for _ in range(30):
        due = pipeline.begin()
        if due is not None:
            pipeline.finish(due)
        if pipeline.idle and not pipeline.inbox:
            return
    raise AssertionError("never idle")


@pytest.mark.parametrize("overlap", [False, True])
def test_turns_go_on_until_there_is_nothing_to_do(overlap):
    core, _, pipeline = make(overlap)
    run(pipeline)
    tokens = [event.token for event in core.events if isinstance(event, TokenEvent)]
    assert tokens == reference(list(range(10)), 1, 6)
    assert set(core.calls) == {7.0}
    core.scheduler.cache.check(idle=True)


@pytest.mark.parametrize(("pressing", "overlap"), [(True, True), (False, True), (False, False)])
def test_what_presses_is_flushed_before_a_launch_and_the_rest_behind_it(pressing, overlap):
    """But before one that may be the whole step."""
    core, runner, pipeline = make(overlap)
    core.pressing = pressing
    order, flush, launch = [], core.flush, runner.launch
    core.flush = lambda step: (order.append("flush"), flush(step))
    runner.launch = lambda plan: (order.append("launch"), launch(plan))[1]
    pipeline.begin()
    assert order == (["launch", "flush"] if overlap and not pressing else ["flush", "launch"])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["fail_launch", "fail_read"])
@pytest.mark.parametrize("turn", range(5))
def test_a_step_that_fails_fails_its_requests_and_frees_everything(overlap, where, turn):
    core, runner, pipeline = make(overlap)
    for _ in range(turn):
        due = pipeline.begin()
        if due is not None:
            pipeline.finish(due)
    setattr(runner, where, True)
    run(pipeline)
    failed = [event for event in core.events if isinstance(event, FailedEvent)]
    assert [event.reason for event in failed] == ["STEP_FAILED"]
    core.scheduler.cache.check(idle=True)
    assert core.scheduler.slots.in_use == core.scheduler.reservations.total == 0


def test_a_launch_that_fails_frees_nothing_that_the_step_in_flight_uses():
    core, runner, pipeline = make(overlap=True)
    assert pipeline.begin() is None  # the prompt's step is launched
    pipeline.finish(pipeline.begin())
    assert pipeline.begin() is None  # step 2 is launched; its read is due after step 3's launch
    pages = runner.steps[1].rows[0].tables[0]
    runner.fail_launch = True
    due = pipeline.begin()
    assert due is not None and due[0].plan.number == 2 and not runner.fail_launch
    assert all(core.allocator.state(page) is not PageState.FREE for page in pages), "freed in flight"
    assert not core.scheduler.slots.is_free(runner.steps[1].rows[0].slot)
    pipeline.finish(due)
    assert any(isinstance(event, FailedEvent) for event in core.events)
    run(pipeline)
    core.scheduler.cache.check(idle=True)


def test_calls_between_launch_and_read_are_made_and_told():
    """At every turn another request; and all tokens as if nobody had come."""
    core, _, pipeline = make(overlap=True)
    for number in range(30):
        due = pipeline.begin()
        if due is None:
            continue
        if number < 12:
            prompt, params = tuple(range(number, number + 9)), SamplingParams(max_tokens=3, seed=number)
            request = EngineRequest(number, prompt, params)
            pipeline.inbox.append(lambda core, now, request=request: core.scheduler.submit(request))
            before = core.admissions
            pipeline.between()
            assert not pipeline.inbox and core.admissions == before + 1
        pipeline.finish(due)
    run(pipeline)
    tokens = {}
    for event in core.events:
        if isinstance(event, TokenEvent):
            tokens.setdefault(event.sequence.request.key, []).append(event.token)
    assert len(tokens) > 8
    for key, found in tokens.items():
        prompt, seed, count = (range(10), 1, 6) if key == "a" else (range(key, key + 9), key, 3)
        assert found == reference(list(prompt), seed, count), key
    core.scheduler.cache.check(idle=True)


def test_a_prompt_that_comes_between_finds_what_the_step_under_way_computes():
    _, _, pipeline = make(overlap=True)
    pipeline.begin()
    assert pipeline.ahead
    due = pipeline.begin()
    again = EngineRequest("b", tuple(range(10)), SamplingParams(max_tokens=2, seed=1))
    pipeline.inbox.append(lambda core, now: core.scheduler.submit(again))
    pipeline.between()
    pipeline.finish(due)
    run(pipeline)
    assert again.cached_tokens == 8
    assert not pipeline.ahead


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_what_is_computed_elsewhere_is_admitted_between_if_it_comes_first(policy):
    where = {"a": PromptRoute.REMOTE, "b": PromptRoute.LOCAL, "c": PromptRoute.REMOTE}
    config = SchedulerConfig(context_length=128, token_budget=32, max_rows=4, policy=policy)
    cache = KvCacheManager(PageAllocator(32), PrefixTree(SIZE))
    scheduler = Scheduler(cache, config, route=lambda sequence, uncached: where[sequence.request.key])
    for key in where:
        scheduler.submit(EngineRequest(key, tuple(range(10)), SamplingParams(max_tokens=2)))
    scheduler.admit_elsewhere()
    admitted = [sequence.request.key for sequence in scheduler.handoffs]
    assert admitted == ([] if policy == "lpm" else ["a"])
    scheduler.plan()
    assert sorted(sequence.request.key for sequence in scheduler.handoffs) == ["a", "c"]


def test_what_fails_between_is_told_before_the_step_has_ended():
    core, _, pipeline = make(overlap=True)
    pipeline.begin()
    due = pipeline.begin()
    pipeline.inbox.append(lambda core, now: core.scheduler.fail(core.scheduler.requests["a"], "WHY", "why"))
    pipeline.between()
    assert [event.reason for event in core.events if isinstance(event, FailedEvent)] == ["WHY"]
    pipeline.finish(due)
    run(pipeline)
    core.scheduler.cache.check(idle=True)


def test_a_step_that_cannot_be_looked_at_is_read():
    _, runner, pipeline = make(overlap=True)
    pipeline.begin()
    due = pipeline.begin()
    assert pipeline.ended(due)
    runner.fail_read = True
    assert pipeline.ended(due)
