"""Choices of one request: how they share its prompt's pages, above all while pages are short."""

from __future__ import annotations

import random

import pytest
from test_scheduler import Engine, check_outputs, request

from baton.engine.request import FailedEvent, SequencePhase
from baton.kvcache.page_allocator import PageState


class Squeezed(Engine):
    """Beside another holder of the pool's pages, which takes of what nobody has reserved."""

    def __init__(self, **options):
        super().__init__(**options)
        self.others = []

    def squeeze(self, pages):
        block_table = self.cache.hold([])
        self.cache.extend(block_table, min(pages, self.scheduler.reservations.headroom))
        self.others.append(block_table)

    def relax(self):
        for block_table in self.others:
            self.cache.release(block_table, 0)
        self.others.clear()


def shared_rows(r, length):
    """Full pages of the prompt that all choices that run have in common."""
    tables = [s.block_table.tables[0] for s in r.sequences if s.phase is SequencePhase.RUNNING]
    return sum(len(set(row)) == 1 for row in zip(*(table[: length // 4] for table in tables), strict=True))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_choices_under_pressure(seed, overlap):
    """Retracted at any time, before the fork, in it or behind it: they give what each gives alone."""
    rng = random.Random(seed)
    pages = rng.randrange(9, 24)
    engine = Squeezed(
        pages=pages,
        budget=rng.choice([8, 16, 64]),
        overlap=overlap,
        policy=rng.choice(["fcfs", "lpm"]),
        output_margin=rng.choice([0, 2, 9]),
        watermark=rng.choice([0, 2]),
        context_length=pages * 4,
    )
    prefix = [rng.randrange(900) for _ in range(12)]
    requests, closed = [], set()
    for key in range(7):
        prompt = [*prefix[: rng.randrange(13)], *(rng.randrange(900) for _ in range(rng.randrange(1, 9)))]
        r = request(
            key,
            prompt,
            max_tokens=rng.randrange(1, 12),
            seed=10 * key,
            n=rng.randrange(1, 5),
            stop_token_ids=frozenset(rng.sample(range(1000), rng.choice([0, 0, 100]))),
            presence_penalty=rng.choice([0.0, 0.5]),
            prompt_logprobs=rng.choice([None, 0]),
        )
        engine.scheduler.submit(r)
        requests.append(r)
        for _ in range(rng.randrange(8)):
            what = rng.random()
            if what < 0.3:
                engine.squeeze(rng.randrange(1, pages))
            elif what < 0.5:
                engine.relax()
            elif what < 0.6 and (engine.scheduler.running or engine.scheduler.prompts):
                engine.scheduler.retract_last()
            elif what < 0.62 and r.key in engine.scheduler.requests:
                engine.scheduler.close(r)
                closed.add(r.key)
            engine.turn()
    engine.relax()
    engine.run()
    check_outputs(engine, requests, closed)
    for r in requests:
        if r.key not in closed:
            assert engine.prompts[r.key] == 1
            expected = range(1, len(r.prompt)) if r.params.prompt_logprobs == 0 else ()
            assert [entry.logprob for entry in r.prompt_logprobs] == list(expected)


@pytest.mark.parametrize("length", [3, 8, 10])
@pytest.mark.parametrize("margin", [0, 4, 5])
def test_each_choice_takes_its_share_of_what_was_reserved(length, margin):
    """A page for the copy of the partial one, which it has, and those of its output margin."""
    engine = Engine(output_margin=margin)
    r = request("a", range(length), n=3)
    engine.scheduler.submit(r)
    engine.turn()
    rows, more = engine.scheduler.rows(length + margin) - engine.scheduler.rows(length), -(-margin // 4)
    copied = length % 4 > 0
    assert [s.reserved for s in r.sequences] == [rows, 1 + more - copied, 1 + more - copied]
    assert [len(s.block_table) for s in r.sequences] == [engine.scheduler.rows(length)] * 3
    assert shared_rows(r, length) == length // 4
    assert engine.cache.counts().owned == 3 * copied and engine.cache.counts().cached == length // 4
    assert all(s.computed == s.retired == length for s in r.sequences)


def test_a_leader_gives_no_more_than_it_has():
    """8 pages are wanted, and the pool has 6: the second follower's share is what the first has left."""
    engine = Engine(pages=6, watermark=0, context_length=24)
    r = request("a", range(10), max_tokens=4, n=3)
    engine.scheduler.submit(r)
    engine.turn()
    assert [s.reserved for s in r.sequences] == [0, 1, 0]
    assert [s.phase for s in r.sequences] == [SequencePhase.RUNNING] * 3
    engine.run()
    check_outputs(engine, [r])


def test_a_copy_keeps_its_page_and_slot_until_its_step_has_retired():
    """Also if the choice has no row in the step that copies."""
    engine = Engine()
    r = request("a", range(10), n=2)
    engine.scheduler.submit(r)
    engine.turn()
    r.paused = True
    step = engine.scheduler.plan()
    ((_, page),), slot = step.plan.copies, r.sequences[1].slot
    launched_step = engine.runner.launch(step.plan)
    assert not step.plan.rows
    engine.scheduler.close(r)
    assert engine.allocator.state(page) is not PageState.FREE and not engine.scheduler.slots.is_free(slot)
    engine.finish_step(step, launched_step)
    assert engine.allocator.state(page) is PageState.FREE and engine.scheduler.slots.is_free(slot)


def test_choices_fail_with_the_step_that_was_to_copy_their_pages():
    """Also if it has no row: they would go on from pages that nobody has written."""
    engine = Engine()
    r = request("a", range(10), n=2)
    engine.scheduler.submit(r)
    engine.turn()
    r.paused = True
    step = engine.scheduler.plan()
    assert step.plan.copies and not step.plan.rows
    engine.scheduler.fail_step(step, "no device")
    failed = [event for event in engine.scheduler.take_events() if isinstance(event, FailedEvent)]
    assert [event.reason for event in failed] == ["STEP_FAILED"]
    assert not engine.scheduler.requests


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_fork_locks_no_pages_that_were_reserved_for_others(lacking):
    """An equal prompt has ended: the tree holds its pages, two of which nobody has locked yet."""
    engine = Squeezed(budget=16, watermark=0, output_margin=0)
    first, second = request("a", range(12), max_tokens=1), request("b", range(13), max_tokens=3, n=2)
    for r in (first, second):
        engine.scheduler.submit(r)
    engine.turn()
    assert engine.ended == ["a"] and second.sequences[0].block_table.committed == 1
    step = engine.scheduler.plan()
    engine.squeeze(engine.scheduler.reservations.headroom - 2 + lacking)
    engine.finish_step(step, engine.runner.launch(step.plan))
    leader, follower = second.sequences
    assert leader.phase is SequencePhase.RUNNING and leader.block_table.committed == (1 if lacking else 3)
    assert follower.phase is (SequencePhase.WAITING if lacking else SequencePhase.RUNNING)
    assert engine.scheduler.reservations.headroom == lacking
    engine.relax()
    engine.run()
    check_outputs(engine, [first, second])
