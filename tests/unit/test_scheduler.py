"""The scheduler against a model whose output betrays every wrong page (hash_runner)."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hash_runner import HashRunner, reference
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.plan import RowResult, StepResult
from baton.engine.request import (
    EngineFinishReason,
    EngineRequest,
    FailedEvent,
    FinishedEvent,
    PromptEvent,
    Refused,
    TokenEvent,
)
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import PromptRoute, SchedulerConfig
from baton.engine.step_builder import divide_budget
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.page_allocator import PageState
from baton.sim.scheduler_rules import check_scheduler


class Engine:
    """Drives a scheduler and a HashRunner as engine.step_loop.StepPipeline does, with or without overlap."""

    def __init__(self, pages=64, size=4, rows=8, budget=32, overlap=False, drafter=None, **config):
        self.allocator = PageAllocator(pages)
        self.cache = KvCacheManager(self.allocator, PrefixTree(size))
        self.runner = HashRunner(pages, size, rows)
        config = {"output_margin": 4, "watermark": 1, "context_length": 200, **config}
        limits = SchedulerConfig(token_budget=budget, max_rows=rows, **config)
        self.scheduler = Scheduler(self.cache, limits, drafter=drafter)
        self.overlap = overlap
        self.pending = None
        self.tokens = defaultdict(list)
        self.finish = {}
        self.prompts = defaultdict(int)
        self.ended = []

    def turn(self) -> bool:
        step = self.scheduler.plan()
        assert step is None or step.plan.num_tokens <= self.scheduler.config.token_budget
        launched = (step, self.runner.launch(step.plan)) if step else None
        if self.pending:
            self.finish_step(*self.pending)
        if launched:
            self.check_in_use(launched[0].plan)
        self.pending = launched
        if launched and not self.overlap:
            self.finish_step(*launched)
            self.pending = None
        self.cache.check()
        check_scheduler(self.scheduler)
        assert self.scheduler.reservations.total <= self.cache.available, "promised more than there is"
        return step is not None or launched is not None

    def check_in_use(self, plan):
        """Design rule 5: what a launched step uses is not free before it has retired."""
        for row in plan.rows:
            used = row.tables[0][: -(-(row.start + row.count) // self.cache.page_size)]
            assert not any(self.allocator.state(page) is PageState.FREE for page in used)
            assert not {row.slot, *row.sample} & set(self.scheduler.slots._free)
        for page in (page for pair in plan.copies for page in pair):
            assert self.allocator.state(page) is not PageState.FREE

    def finish_step(self, step, launched_step):
        self.scheduler.commit(step, self.runner.read(launched_step))
        for event in self.scheduler.take_events():
            if isinstance(event, TokenEvent):
                name = (event.sequence.request.key, event.sequence.index)
                assert name not in self.finish, "a token after the last"
                self.tokens[name].append(event.token)
                if event.finish:
                    self.finish[name] = event.finish
            elif isinstance(event, PromptEvent):
                self.prompts[event.request.key] += 1
            elif isinstance(event, FinishedEvent | FailedEvent):
                self.ended.append(event.request.key)

    def run(self, limit=5000):
        for _ in range(limit):
            if not self.turn() and not self.scheduler.requests:
                break
        else:
            raise AssertionError("the scheduler does not come to an end")
        while self.pending:
            self.turn()
        self.cache.check(idle=True)
        assert self.scheduler.slots.in_use == 0
        assert self.scheduler.reservations.total == 0


def request(key, prompt, max_tokens=8, seed=1, n=1, **options):
    params = SamplingParams(max_tokens=max_tokens, seed=seed, **options)
    return EngineRequest(key=key, prompt=tuple(prompt), params=params, n=n)


def check_outputs(engine, requests, cancelled=()):
    for r in requests:
        for i in range(r.n):
            expected = reference(
                list(r.prompt),
                r.params.seed + i,
                r.params.max_tokens,
                r.params.stop_token_ids,
                penalized=r.params.penalized,
            )
            got = engine.tokens[(r.key, i)]
            if r.key in cancelled:
                assert got == expected[: len(got)]
            else:
                assert got == expected, (r.key, i)
                assert engine.finish[(r.key, i)]


@pytest.mark.parametrize("overlap", [False, True])
def test_one_request(overlap):
    engine = Engine(overlap=overlap)
    r = request("a", range(10))
    engine.scheduler.submit(r)
    engine.run()
    check_outputs(engine, [r])
    assert engine.finish[("a", 0)] is EngineFinishReason.LENGTH
    assert engine.ended == ["a"] and engine.prompts["a"] == 1
    # The prompt, and a step a token behind the first: none for what the last one in flight would end.
    assert engine.scheduler.step_number == r.params.max_tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_token_ends_the_output_and_nothing_follows(overlap):
    expected = reference(list(range(10)), 1, 20)
    engine = Engine(overlap=overlap)
    r = request("a", range(10), max_tokens=20, stop_token_ids=frozenset({expected[5]}))
    engine.scheduler.submit(r)
    engine.run()
    check_outputs(engine, [r])
    assert engine.finish[("a", 0)] is EngineFinishReason.STOP
    assert len(engine.tokens[("a", 0)]) == expected.index(expected[5]) + 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
def test_choices_share_the_prompt(overlap, length):
    engine = Engine(overlap=overlap, pages=128)
    requests = [request("a", range(length), n=4), request("b", range(100, 117), n=2, seed=9)]
    for r in requests:
        engine.scheduler.submit(r)
    engine.run()
    check_outputs(engine, requests)
    computed = sum(len(row.tokens) for plan in engine.runner.steps for row in plan.rows if row.tokens)
    assert computed == length + 17


def test_a_page_is_not_copied_for_a_choice_that_has_ended():
    """Its target may be another sequence's by then."""
    engine = Engine()
    r = request("a", range(10), n=2)
    engine.scheduler.submit(r)
    while not engine.scheduler.copies:
        engine.turn()
    engine.scheduler.close(r)
    assert engine.scheduler.plan() is None
    engine.cache.check(idle=True)


def test_a_choice_without_room_for_its_copy_is_computed_by_itself():
    engine = Engine(pages=4, watermark=0)
    r = request("a", range(10), max_tokens=5, n=3)
    engine.scheduler.submit(r)
    engine.run()
    check_outputs(engine, [r])


def test_a_cached_prefix_is_not_computed_again():
    engine = Engine()
    first = request("a", range(40), max_tokens=2)
    engine.scheduler.submit(first)
    engine.run()
    before = len(engine.runner.steps)
    second = request("b", [*range(40), 7, 8, 9], max_tokens=2)
    engine.scheduler.submit(second)
    engine.run()
    check_outputs(engine, [first, second])
    assert second.cached_tokens == 40
    assert sum(len(r.tokens) for p in engine.runner.steps[before:] for r in p.rows if r.tokens) == 3


def test_many_long_prompts_do_not_hold_up_short_ones():
    """They share one half of each step: a short prompt is computed in the first step that it could be in."""
    engine = Engine(pages=600, rows=16, context_length=1200)
    long = [request(f"long {number}", range(1000 * number, 1000 * number + 200)) for number in range(10)]
    for each in long:
        engine.scheduler.submit(each)
    for _ in range(3):
        engine.turn()
    short = request("short", range(50_000, 50_012), max_tokens=1)
    engine.scheduler.submit(short)
    engine.turn()
    assert engine.ended == ["short"]
    while len(engine.ended) < 11:
        engine.turn()
    check_outputs(engine, [*long, short])


def test_long_prompt_does_not_hold_up_short_ones():
    engine = Engine(pages=256, budget=16, context_length=800)
    long, short = request("long", range(600)), request("short", range(5))
    engine.scheduler.submit(long)
    engine.turn()
    engine.scheduler.submit(short)
    for _ in range(12):
        engine.turn()
    assert "short" in engine.ended and "long" not in engine.ended
    engine.run()
    check_outputs(engine, [long, short])


def test_prompts_that_fit_are_computed_one_after_the_other():
    engine = Engine(budget=32)
    requests = [request(key, tuple(range(10 * key, 10 * key + 20)), max_tokens=1) for key in range(3)]
    for each in requests:
        engine.scheduler.submit(each)
    engine.run()
    counts = [[row.count for row in plan.rows] for plan in engine.runner.steps]
    assert counts == [[20, 12], [8, 20]]
    check_outputs(engine, requests)


def test_retraction_recomputes_and_spares_the_oldest():
    engine = Engine(pages=12, rows=8, output_margin=1, watermark=0)
    requests = [request(i, [i * 10 + j for j in range(6)], max_tokens=30) for i in range(4)]
    for r in requests:
        engine.scheduler.submit(r)
    engine.run()
    check_outputs(engine, requests)
    assert requests[0].retractions == 0 and max(r.retractions for r in requests) > 1
    assert engine.scheduler.retractions == sum(r.retractions for r in requests)


def test_nobody_is_retracted_while_pages_are_about_to_be_freed():
    """A running request needs a page, and one that has been closed has some until its step has retired."""
    engine = Engine(output_margin=0, watermark=0)
    requests = [request(key, range(10 * key, 10 * key + length), 9) for key, length in enumerate((8, 8, 9))]
    for r in requests:
        engine.scheduler.submit(r)
    for _ in range(4):
        engine.turn()
    step = engine.scheduler.plan()
    launched_step = engine.runner.launch(step.plan)
    engine.scheduler.close(requests[2])
    others = engine.cache.hold([])
    engine.cache.extend(others, engine.scheduler.reservations.headroom)
    assert [r.sequences[0].computed for r in requests[:2]] == [12, 12] and engine.cache.pending
    assert engine.scheduler.plan() is None and not engine.scheduler.retractions
    engine.finish_step(step, launched_step)
    assert len(engine.scheduler.plan().plan.rows) == 2 and not engine.scheduler.retractions


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_lower_priority_is_retracted_before_a_younger_request(policy):
    engine = Engine(pages=12, rows=8, output_margin=1, watermark=0, policy=policy)
    requests = [request(i, [i * 10 + j for j in range(6)], max_tokens=30) for i in range(4)]
    for r, priority in zip(requests, (0, -5, 7, 7), strict=True):
        r.priority = priority
        engine.scheduler.submit(r)
    engine.run()
    check_outputs(engine, requests)
    assert requests[1].retractions > 0, "the least important one, though it is the second oldest"
    assert requests[2].retractions == 0, "the oldest of the most important ones"


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_higher_priority_is_served_earlier(policy):
    engine = Engine(rows=1, policy=policy)
    requests = [request(i, [i * 10 + j for j in range(6)], max_tokens=3) for i in range(5)]
    for r, priority in zip(requests, (0, -5, 0, 7, 0), strict=True):
        r.priority = priority
        engine.scheduler.submit(r)
    engine.run()
    check_outputs(engine, requests)
    assert engine.ended == [3, 0, 2, 4, 1]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_of_those_that_wait_lpm_takes_the_best_cached_behind_the_oldest(policy):
    engine = Engine(pages=128, rows=2, policy=policy)
    for key, prompt in enumerate((range(8), range(100, 120)), 10):
        engine.scheduler.submit(request(key, prompt, max_tokens=1))
    engine.run()
    engine.ended.clear()
    prompts = [range(200, 230), range(210, 240), [*range(8), 7], [*range(100, 120), 7], [*range(8), 8]]
    requests = [request(key, prompt, max_tokens=2) for key, prompt in enumerate(prompts)]
    for r in requests:
        engine.scheduler.submit(r)
    engine.run()
    check_outputs(engine, requests)
    assert engine.ended == ([0, 3, 1, 2, 4] if policy == "lpm" else [0, 1, 2, 3, 4])


class CountingTree(PrefixTree):
    """Counts how often token ids are encoded, and how often the tree is searched."""

    encoded = searched = 0

    def encode(self, tokens, max_pages=None):
        self.encoded += not isinstance(tokens, bytes)
        return super().encode(tokens, max_pages)

    def _descend(self, *arguments):
        self.searched += 1
        return super()._descend(*arguments)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_prompt_that_waits_is_encoded_once_and_searched_for_when_the_tree_has_changed(policy):
    engine = Engine(pages=32, rows=4, output_margin=40, watermark=0, policy=policy)
    engine.cache._tree = tree = CountingTree(4)
    first = request("first", range(40), max_tokens=40)
    engine.scheduler.submit(first)
    engine.turn()
    waiting = [request(key, range(key, key + 60), max_tokens=9) for key in (100, 200)]
    for r in waiting:
        engine.scheduler.submit(r)
    for _ in range(3):
        engine.turn()
    tree.encoded = tree.searched = 0
    for _ in range(20):
        engine.turn()
    assert len(engine.scheduler.waiting) == 2, "they wait for pages"
    assert (tree.encoded, tree.searched) == (0, 0)
    engine.run()
    check_outputs(engine, [first, *waiting])


def test_a_retracted_request_finds_the_pages_of_its_own_output():
    engine = Engine(pages=12, rows=8, output_margin=1, watermark=0)
    requests = [request(i, [i * 10 + j for j in range(6)], max_tokens=20) for i in range(2)]
    for r in requests:
        engine.scheduler.submit(r)
    while not engine.scheduler.retractions:
        engine.turn()
    retracted = requests[1].sequences[0]
    assert engine.scheduler.cached_pages(retracted) > len(requests[1].prompt) // 4
    engine.run()
    check_outputs(engine, requests)


def test_an_output_is_cached_although_its_prompt_was_cached_meanwhile():
    """Two equal prompts in one step: the first request has ended when the pages of the second are final."""
    engine = Engine()
    first, second = request("a", range(16), max_tokens=1), request("b", range(16), max_tokens=12, seed=2)
    engine.scheduler.submit(first)
    engine.scheduler.submit(second)
    engine.run()
    check_outputs(engine, [first, second])
    third = request("c", [*range(16), *engine.tokens[("b", 0)], 1, 2, 3])
    engine.scheduler.submit(third)
    engine.run()
    assert third.cached_tokens == 24, "27 tokens of the second had entries"


@pytest.mark.parametrize("size", [1, 4])
def test_pages_of_logits_that_are_no_numbers_are_not_cached(size):
    """Neither choice's: they may hold what nobody may reuse."""
    engine = Engine(size=size)
    first = request("a", range(16), n=2)
    engine.scheduler.submit(first)
    read = engine.runner.read

    def damaged(launched_step):
        result = read(launched_step)
        return StepResult(result.number, tuple(RowResult(error="not finite") for _ in result.rows))

    engine.runner.read = damaged
    engine.run()
    assert engine.ended == ["a"]
    engine.runner.read = read
    second = request("b", [*range(16), 1])
    engine.scheduler.submit(second)
    engine.run()
    check_outputs(engine, [second])
    assert second.cached_tokens == 0


def test_pages_of_earlier_chunks_leave_the_cache_when_the_last_one_fails():
    """Chunks that sample nothing have no logits to fail by, and are cached at once."""
    engine = Engine(budget=8)
    read = engine.runner.read

    def damaged(launched_step):
        result = read(launched_step)
        rows = (RowResult(error="not finite") if row.tokens else row for row in result.rows)
        return StepResult(result.number, tuple(rows))

    engine.runner.read = damaged
    engine.scheduler.submit(request("a", range(32)))
    while not engine.scheduler.cached_pages(request("", range(32)).sequences[0]):
        assert not engine.ended
        engine.turn()
    engine.run()
    assert engine.ended == ["a"]
    engine.runner.read = read
    engine.scheduler.submit(second := request("b", [*range(32), 1]))
    engine.run()
    check_outputs(engine, [second])
    assert second.cached_tokens == 0
    engine.scheduler.submit(third := request("c", [*range(32), 2]))
    engine.run()
    assert third.cached_tokens == 32, "what has been computed anew"


def test_a_hand_off_keeps_others_from_the_last_pages():
    """The watermark is for what is admitted: it grows beyond its reservation."""
    cache = KvCacheManager(PageAllocator(20), PrefixTree(4))
    config = SchedulerConfig(token_budget=32, max_rows=8, context_length=80, output_margin=4, watermark=3)
    scheduler = Scheduler(
        cache,
        config,
        route=lambda leader, _: PromptRoute.REMOTE if leader.request.key == "a" else PromptRoute.LOCAL,
    )
    scheduler.submit(request("a", range(20)))
    assert scheduler.plan() is None
    assert len(scheduler.handoffs) == 1 and scheduler.reservations.headroom == 14
    fits, too_long = request("b", range(100, 140)), request("c", range(100, 144))
    scheduler.submit(too_long)
    assert scheduler.plan() is None and scheduler.waiting, "12 pages leave two"
    scheduler.close(too_long)
    scheduler.submit(fits)
    assert scheduler.plan() is not None and not scheduler.waiting, "11 pages leave three"


def test_choices_of_a_request_that_may_make_steps_fail_are_computed_together():
    scheduler = Engine().scheduler
    params = SamplingParams(max_tokens=8)
    suspect = EngineRequest("a", (1, 2, 3), params, delivered=((4,), (5,)), n=2, failed_steps=1)
    scheduler.submit(suspect)
    scheduler.plan()
    assert scheduler.prompts == suspect.sequences


@pytest.mark.parametrize("overlap", [False, True])
def test_penalties_know_the_whole_output_after_a_retraction_and_a_resume(overlap):
    engine = Engine(pages=12, rows=8, output_margin=1, watermark=0, overlap=overlap)
    requests = [
        request(i, [i * 10 + j for j in range(6)], max_tokens=30, frequency_penalty=0.5) for i in range(4)
    ]
    for r in requests:
        engine.scheduler.submit(r)
    engine.run()
    assert engine.scheduler.retractions > 0
    check_outputs(engine, requests)
    full = engine.tokens[(0, 0)]
    again = EngineRequest("again", requests[0].prompt, requests[0].params, delivered=(tuple(full[:7]),))
    engine.scheduler.submit(again)
    engine.run()
    assert engine.tokens[("again", 0)] == full[7:]


def test_prompt_logprobs_come_once_each_when_the_prompt_is_queued_again():
    engine = Engine(budget=8)
    r = request("a", range(100, 120), prompt_logprobs=0)
    engine.scheduler.submit(r)
    engine.turn()
    assert r.prompt_logprobs, "a part of the prompt has been computed"
    engine.scheduler.requeue(r.sequences[0])
    engine.run()
    check_outputs(engine, [r])
    assert [(entry.token, entry.logprob) for entry in r.prompt_logprobs] == [
        (token, position) for position, token in enumerate(range(101, 120), 1)
    ]


def test_prompt_logprobs_that_have_been_reported_are_not_computed_again():
    engine = Engine()
    r = request("a", range(100, 120), prompt_logprobs=0)
    engine.scheduler.submit(r)
    while not engine.tokens[("a", 0)]:
        engine.turn()
    engine.scheduler.requeue(r.sequences[0])
    step = engine.scheduler.plan()
    assert [row.prompt_logprobs for row in step.plan.rows] == [None]
    assert len(step.plan.rows[0].tokens) < 20, "cached pages are used"


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request("a", []), "token_ids"),
        (request("a", range(500)), "token_ids"),
        (request("a", range(10), max_tokens=10_000), "sampling.max_tokens"),
        (request("a", range(10), n=9), "n"),
    ],
)
def test_what_can_never_run_is_refused_at_the_door(bad, field):
    engine = Engine()
    with pytest.raises(Refused) as refusal:
        engine.scheduler.submit(bad)
    assert refusal.value.field == field
    engine.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_may_fill_the_context_or_the_pool_for_one_token(overlap):
    for context, pages in (40, 64), (40, 10):
        engine = Engine(overlap=overlap, context_length=context, pages=pages)
        full = request("a", range(context), max_tokens=1)
        engine.scheduler.submit(full)
        for wrong in request("b", range(context), 2), request("c", range(context + 1), 1):
            with pytest.raises(Refused):
                engine.scheduler.submit(wrong)
        engine.run()
        check_outputs(engine, [full])


def test_the_queue_is_bounded():
    engine = Engine(max_waiting=2)
    engine.scheduler.submit(request(1, range(5)))
    engine.scheduler.submit(request(2, range(5)))
    with pytest.raises(Refused) as refusal:
        engine.scheduler.submit(request(3, range(5)))
    assert refusal.value.field is None
    engine.run()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    overlap=st.booleans(),
    pages=st.integers(10, 40),
    policy=st.sampled_from(["fcfs", "lpm", "priority"]),
)
def test_any_mix_of_arrivals_cancels_and_pressure(seed, overlap, pages, policy):
    rng = random.Random(seed)
    engine = Engine(
        pages=pages,
        budget=rng.choice([8, 16, 64]),
        overlap=overlap,
        policy=policy,
        output_margin=rng.choice([0, 4, 16]),
        watermark=rng.choice([0, 2]),
        context_length=min(200, pages * 4),
    )
    requests, cancelled = [], set()
    prefixes = [[rng.randrange(900) for _ in range(rng.randrange(1, 20))] for _ in range(3)]
    for key in range(rng.randrange(1, 16)):
        prompt = rng.choice(prefixes) + [rng.randrange(900) for _ in range(rng.randrange(0, 6))]
        n = rng.choice([1, 1, 1, 2, 3])
        stop = frozenset(rng.sample(range(1000), rng.choice([0, 0, 50])))
        r = request(
            key,
            prompt,
            max_tokens=rng.randrange(1, 15),
            seed=rng.randrange(99),
            n=n,
            stop_token_ids=stop,
            presence_penalty=rng.choice([0.0, 0.5]),
        )
        r.priority = rng.randrange(3)
        try:
            engine.scheduler.submit(r)
        except Refused:
            continue
        requests.append(r)
        for _ in range(rng.randrange(4)):
            engine.turn()
        if rng.random() < 0.25:
            victim = rng.choice(requests)
            if victim.key in engine.scheduler.requests:
                engine.scheduler.close(victim)
                cancelled.add(victim.key)
    engine.run()
    check_outputs(engine, requests, cancelled)


@pytest.mark.parametrize(
    ("lengths", "budget", "full_step", "counts"),
    [
        ((10, 6, 5), 64, 16, [10, 6]),  # a full step, exactly
        ((10, 5, 5), 64, 16, [10, 5, 5]),
        ((100,), 30, 1000, [28]),  # to a page's border
        ((3, 100), 6, 1000, [3, 3]),  # no whole page
        ((100, 100), 32, 1000, [16, 16]),  # long prompts alone have it all
        ((100, 4), 32, 1000, [28, 4]),  # half of it, and what the short one leaves
        ((100, 100, 2), 8, 1000, [4, 2]),  # a page at least for the first
        ((100, 100, 4), 64, 1000, [44, 16, 4]),  # half of that half, later what is left
    ],
)
def test_a_budget_is_divided_among_prompts(lengths, budget, full_step, counts):
    prompts = []
    for order, length in enumerate(lengths):
        r = request(order, range(length))
        r.order = order
        prompts += r.sequences
    chunks = divide_budget(prompts[::-1], budget, 4, full_step)
    assert [count for _, count in chunks] == counts


def test_prompts_that_keep_the_device_busy_do_not_wait_for_younger_ones():
    """With a full step of 16 tokens: two prompts end in it, the third waits; a long one is not held up."""
    engine = Engine(budget=64, full_step=16, prompt_only=True)
    for key, length in enumerate((10, 8, 12, 150, 20)):
        engine.scheduler.submit(request(key, range(length)))
    taken = []
    while (step := engine.scheduler.plan()) is not None:
        taken.append([row.count for row in step.plan.rows])
        engine.scheduler.commit(step, engine.runner.read(engine.runner.launch(step.plan)))
    assert taken[0] == [10, 8]
    # The 12 end short of a full step; the long one takes half of what is left, the young one ends beside it.
    assert taken[1][0] == 12 and 20 in taken[1]
    assert sum(map(sum, taken)) == 10 + 8 + 12 + 150 + 20


@pytest.mark.parametrize(("asked", "expected"), [(None, (None, 0)), (0, (19, 0)), (3, (19, 3))])
def test_a_chunk_asks_for_the_log_probabilities_of_its_tokens(asked, expected):
    engine = Engine()
    engine.scheduler.submit(request("a", range(100, 120), prompt_logprobs=asked))
    (row,) = engine.scheduler.plan().plan.rows
    wanted = row.prompt_logprobs
    assert (wanted if wanted is None else len(wanted), row.prompt_top) == expected


def test_what_is_recorded_of_requests_and_of_a_retraction():
    engine, notes = Engine(pages=14, budget=16), defaultdict(list)
    engine.scheduler.record = lambda request, kind, number, step: notes[request.key].append(
        (kind.name, number, step)
    )
    requests = [request("a", range(20), max_tokens=20), request("b", range(20, 30), max_tokens=24)]
    for each in requests:
        engine.scheduler.submit(each)
    engine.run()
    check_outputs(engine, requests)
    first = [("CHUNK_BEGUN", 8, 1), ("CHUNK_ENDED", 0, 1)]
    running = [("CHUNK_ENDED", 0, 2), ("FIRST_TOKEN", 0, 0), ("RUNNING", 0, 0)]
    assert notes["a"] == [("QUEUED", 20, 0), ("ADMITTED", 0, 0), *first, ("CHUNK_BEGUN", 12, 2), *running]
    assert notes["b"] == [
        *(("QUEUED", 10, 0), ("ADMITTED", 0, 0), *first, ("CHUNK_BEGUN", 2, 2), *running),
        ("RETRACTED", 13, 0),
        ("ADMITTED", 16, 0),  # found in the cache
        *(("CHUNK_BEGUN", 7, 22), ("CHUNK_ENDED", 0, 22), ("RUNNING", 0, 0)),
    ]


@pytest.mark.parametrize(
    ("n", "prompt_only", "pages"), [(1, False, 4), (3, False, 8), (1, True, 3), (3, True, 3)]
)
def test_an_admission_reserves_what_the_prompt_and_a_margin_take(n, prompt_only, pages):
    """10 tokens and 4 more, in pages of 4. Each further choice: its copy of the last page, and a margin."""
    engine = Engine(prompt_only=prompt_only)
    engine.scheduler.submit(request("a", range(10), n=n))
    assert engine.scheduler.plan() is not None
    assert engine.scheduler.reservations.total + engine.cache.counts().owned == pages
