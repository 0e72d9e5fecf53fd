"""The scheduler over several KV groups, on a "model" whose tokens depend on every byte that they see."""

from __future__ import annotations

import random

import pytest

from baton.engine.plan import Pooling
from baton.engine.request import EngineRequest, FailedEvent, SequencePhase, TokenEvent
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.kvcache import KvCacheManager, KvGroup, PageAllocator, PageCounts, PrefixTree
from baton.kvcache.kv_groups import peak
from baton.layers.cache_spec import State, attention_cache
from baton.sim.model import STATE, SimPool, reference
from baton.sim.runner import SimLaunchedStep, SimRunner
from baton.sim.scheduler_rules import check_scheduler

SIZE = 4


def groups_of(windows):
    """STATE is a group of states."""
    specs = (State(((1,),)) if window == STATE else attention_cache(window) for window in windows)
    return tuple(map(KvGroup, specs))


class Engine:
    def __init__(self, windows, pages, *, overlap=False, budget=8, rows=4, size=SIZE, **config):
        self.windows = windows
        groups = groups_of(windows)
        pool = SimPool(pages, size)
        self.cache = KvCacheManager(PageAllocator(pages, pool.generations), PrefixTree(size, groups=groups))
        limits = {"context_length": 1000, "output_margin": 4, **config}
        self.scheduler = Scheduler(self.cache, SchedulerConfig(token_budget=budget, max_rows=rows, **limits))
        self.runner = SimRunner(pool, rows, lambda launched_step: None, lambda plan, page: None, windows)
        self.overlap = overlap
        self.pending = None
        self.tokens: dict[tuple[object, int], list[int]] = {}
        self.failed: list[FailedEvent] = []
        self.counts: list[PageCounts] = []

    def submit(self, key, prompt, outputs, **options):
        request = EngineRequest(key, tuple(prompt), SamplingParams(max_tokens=outputs, seed=3), **options)
        self.scheduler.submit(request)
        return request

    def step(self):
        """Plans and launches a step; with overlap commits the one before it. Whether there was any."""
        step = self.scheduler.plan()
        launched = None
        if step is not None:
            launched = step, self.runner.launch(step.plan)
        due = launched
        if self.overlap:
            due, self.pending = self.pending, launched
        if due is not None:
            launched_step: SimLaunchedStep = due[1]
            self.runner.execute(launched_step)
            self.scheduler.commit(due[0], self.runner.read(launched_step))
        self.cache.check()
        check_scheduler(self.scheduler)
        assert self.scheduler.reservations.total <= self.cache.available
        self.counts.append(self.cache.counts())
        for event in self.scheduler.take_events():
            if isinstance(event, TokenEvent):
                choice = event.sequence.request.key, event.sequence.index
                self.tokens.setdefault(choice, []).append(event.token)
            elif isinstance(event, FailedEvent):
                self.failed.append(event)
        return step is not None or due is not None

    def run(self, steps=5000):
        for _ in range(steps):
            if not self.step() and not self.scheduler.requests:
                break
        assert not self.scheduler.requests
        self.cache.check(idle=True)
        counts = self.cache.counts()
        assert counts.free + counts.cached == counts.total

    def expect(self, key, prompt, outputs, n=1):
        for index in range(n):
            expected = reference(prompt, 3 + index, outputs, windows=self.windows)
            assert tuple(self.tokens[key, index]) == expected


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows", [(9,), (1, 6), (None, 9), (None, 5, 8)])
def test_window_pages_come_back_while_the_sequence_runs(windows, overlap):
    engine = Engine(windows, 400, overlap=overlap)
    prompt = range(50)
    engine.submit(1, prompt, 150)
    taken = []
    while engine.scheduler.requests:
        engine.step()
        taken.append(engine.counts[-1].owned)
    engine.run()
    engine.expect(1, prompt, 150)
    full = 50 * windows.count(None)
    assert max(taken) < full + (len(windows) - windows.count(None)) * 9, "200 tokens are 50 pages of a group"
    assert sum(engine.cache.generation(page) for page in range(400)) >= 50 * len(windows), "taken in all"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("windows", "pages"), [((9,), 9), ((None, 5, 8), 68)])
def test_a_pool_too_small_for_the_whole_history_serves_a_long_sequence(windows, pages, overlap):
    assert pages >= peak(groups_of(windows), 200, SIZE, 16)
    assert pages < 50 * len(windows)
    engine = Engine(windows, pages, overlap=overlap)
    engine.submit(1, range(60), 140)
    engine.run()
    engine.expect(1, range(60), 140)
    assert not engine.scheduler.retractions


def test_what_could_never_fit_is_refused():
    engine = Engine((None, 8), 30)
    room = engine.scheduler._room
    assert 60 < room < 30 * SIZE
    engine.submit(1, range(room - 5), 5)
    with pytest.raises(Exception, match=f"exceed {room} tokens"):
        engine.submit(2, range(room - 5), 6)
    with pytest.raises(Exception, match=f"{room + 1} tokens; this node holds at most {room}"):
        engine.submit(3, range(room + 1), 1)
    engine.run()
    engine.expect(1, range(room - 5), 5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows", [(9,), (None, 5), (None, 8, 13), (4, 12)])
def test_many_requests_with_common_prefixes_in_a_tight_pool(windows, overlap):
    draw = random.Random(f"{windows} {overlap}")
    engine = Engine(windows, (24 if None in windows else 10) * len(windows), overlap=overlap, output_margin=2)
    asked = {}
    prefixes = [tuple(draw.randrange(900) for _ in range(30)) for _ in range(3)]
    for key in range(60):
        prompt = (*draw.choice(prefixes)[: draw.randrange(31)], *range(draw.randrange(1, 30)))
        outputs = draw.randrange(1, 30)
        n = draw.choice((1, 1, 1, 2))
        asked[key] = prompt, outputs, n
        engine.submit(key, prompt, outputs, n=n, priority=draw.randrange(2))
        for _ in range(draw.randrange(4)):
            engine.step()
    engine.run()
    assert not engine.failed
    for key, (prompt, outputs, n) in asked.items():
        engine.expect(key, prompt, outputs, n)
    if None in windows:
        assert engine.scheduler.retractions, "a pool in which nothing is retracted is not tight"


def test_a_prompt_that_shares_window_pages_gets_its_pages_in_the_end():
    """An idle request that shares a prompt's window pages keeps them from becoming free: it is retracted."""
    engine = Engine((16,), 24, output_margin=0)
    first = engine.submit(1, range(100), 2)
    engine.step()
    engine.step()
    other = engine.submit(2, [*range(16), 990], 40)
    while other.sequences[0].phase is not SequencePhase.RUNNING:
        engine.step()
    other.paused = True
    squeeze = engine.cache.hold([])
    engine.cache.extend(squeeze, engine.scheduler.reservations.headroom)
    while first.sequences and first.sequences[0].phase is SequencePhase.PROMPT:
        assert engine.step()
    assert other.retractions
    engine.cache.release(squeeze, 0)
    other.paused = False
    engine.run()
    engine.expect(1, range(100), 2)
    engine.expect(2, [*range(16), 990], 40)


def test_a_session_goes_on_where_its_last_turn_ended():
    """Also when the turn ended at a page border, and when most window pages of the turn are gone."""
    for length in range(60, 69):
        engine = Engine((None, 9), 60)
        engine.submit(1, range(length), 13)
        engine.run()
        turn = [*range(length), *engine.tokens[1, 0]]
        again = engine.submit(2, [*turn, 7, 8], 5)
        engine.run()
        assert again.cached_tokens == (len(turn) - 1) // SIZE * SIZE
        engine.expect(2, [*turn, 7, 8], 5)


def test_an_embedding_that_lacks_pages_on_a_prefill_node_waits_for_them():
    """Nothing of it was announced: it need not fail."""
    engine = Engine((None,), 30, prompt_only=True)
    first = engine.submit(1, range(8), 1, pooling=Pooling.LAST)
    asked = engine.submit(2, range(100, 180), 1, pooling=Pooling.LAST)
    assert engine.scheduler.plan() is not None
    squeeze = engine.cache.hold([])
    engine.cache.extend(squeeze, engine.cache.available)
    assert engine.scheduler.plan() is None
    assert asked.retractions == 1 and asked.sequences[0].phase is SequencePhase.WAITING
    assert first.retractions == 0, "the last gives up its own"
    assert not engine.scheduler.take_embedded()


def test_a_prompt_that_lacks_pages_is_not_retracted_while_some_are_about_to_be_freed():
    engine = Engine((None,), 30, prompt_only=True)
    closed = engine.submit(1, range(8), 1, pooling=Pooling.LAST)
    asked = engine.submit(2, range(100, 180), 1, pooling=Pooling.LAST)
    step = engine.scheduler.plan()
    engine.scheduler.close(closed)
    squeeze = engine.cache.hold([])
    engine.cache.extend(squeeze, engine.cache.available)
    assert engine.cache.pending and engine.scheduler.plan() is None
    assert asked.retractions == 0
    engine.scheduler.retire(step.plan.number, step.pinned)
    assert engine.scheduler.plan() is not None and asked.retractions == 0


def test_of_prompts_that_lack_pages_on_a_prefill_node_the_last_fails():
    """Its pages have been announced."""
    engine = Engine((None,), 60, prompt_only=True)
    for number in (1, 2):
        engine.submit(number, range(100 * number, 100 * number + 100), 1)
    assert engine.scheduler.plan() is not None
    squeeze = engine.cache.hold([])
    engine.cache.extend(squeeze, engine.cache.available)
    assert len(engine.scheduler.prompts) == 2 and engine.scheduler.plan() is None
    (failed,) = engine.scheduler.take_events()
    assert (failed.request.key, failed.reason) == (2, "NO_PAGES")
    assert [sequence.request.key for sequence in engine.scheduler.prompts] == [1]


def test_a_prompt_that_lacks_pages_waits_while_another_goes_on():
    engine = Engine((None,), 60, budget=16, prompt_only=True)
    for number in (1, 2):
        engine.submit(number, range(100 * number, 100 * number + 100), 1)
    assert engine.scheduler.plan() is not None
    squeeze = engine.cache.hold([])
    engine.cache.extend(squeeze, engine.cache.available - 2)  # each needs two more
    step = engine.scheduler.plan()
    assert step is not None and [record.sequence.request.key for record in step.records] == [1]
    assert not engine.scheduler.take_events() and len(engine.scheduler.prompts) == 2


def test_a_prefill_node_reserves_nothing_for_an_output():
    engine = Engine((None,), 50, prompt_only=True, watermark=0)
    for number in (1, 2):  # of 25 pages
        engine.submit(number, range(100 * number, 100 * number + 100), 50)
    assert engine.scheduler.plan() is not None and len(engine.scheduler.prompts) == 2
