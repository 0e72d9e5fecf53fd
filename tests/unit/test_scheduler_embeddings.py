"""Prompts whose embedding is wanted, beside others: whole, cached, in chunks, and under memory pressure."""

from __future__ import annotations

import random

import pytest
from hash_runner import VOCAB, HashRunner, embedding
from test_scheduler import Engine, check_outputs, request

from baton.engine.plan import Pooling, RowResult
from baton.engine.request import EmbeddedEvent, FailedEvent, Refused


def embed(key, prompt, pooling=Pooling.LAST):
    made = request(key, prompt, max_tokens=1)
    made.pooling = pooling
    return made


def check(engine, requests):
    ended = {event.request.key: event for event in engine.scheduler.take_embedded()}
    assert ended.keys() == {r.key for r in requests}
    for r in requests:
        assert isinstance(ended[r.key], EmbeddedEvent)
        assert r.pooled.tolist() == [embedding(list(r.prompt), r.pooling)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("length", [1, 4, 40, 70, 199, 200])
def test_one_prompt(overlap, pooling, length):
    engine = Engine(overlap=overlap)
    r = embed("a", range(length), pooling)
    engine.scheduler.submit(r)
    engine.run()
    check(engine, [r])
    assert not engine.tokens and not engine.ended and not engine.prompts
    assert not any(row.sample for plan in engine.runner.steps for row in plan.rows)


@pytest.mark.parametrize("pooling", Pooling)
def test_a_cached_prefix(pooling):
    """The last token needs the rest of the prompt alone; the mean all of it."""
    engine = Engine()
    first = request("a", range(40), max_tokens=2)
    engine.scheduler.submit(first)
    engine.run()
    before = len(engine.runner.steps)
    second = embed("b", [*range(40), 7, 8, 9], pooling)
    engine.scheduler.submit(second)
    engine.run()
    check(engine, [second])
    computed = sum(row.count for plan in engine.runner.steps[before:] for row in plan.rows)
    assert computed == (3 if pooling is Pooling.LAST else 43)
    third = request("c", [*range(40), 7, 8, 9, 10, 11], max_tokens=2)
    engine.scheduler.submit(third)
    engine.run()
    check_outputs(engine, [first, third])
    assert third.cached_tokens == 40


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prompt_only", [False, True])
def test_beside_others_and_under_memory_pressure(overlap, prompt_only):
    """They share steps with other prompts; some are retracted and computed again."""
    rng = random.Random(5)
    engine = Engine(pages=30, budget=24, overlap=overlap, watermark=0, output_margin=0)
    generated, embedded = [], []
    for number in range(60):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
        if number % 2 or prompt_only:
            embedded.append(embed(number, prompt, rng.choice(list(Pooling))))
        else:
            generated.append(request(number, prompt, max_tokens=rng.randrange(1, 30), seed=number))
        engine.scheduler.submit((embedded if number % 2 or prompt_only else generated)[-1])
        if number % 5 == 0:
            engine.turn()
    engine.run()
    check(engine, embedded)
    check_outputs(engine, generated)
    mixed = [{row.pooling is None for row in plan.rows} for plan in engine.runner.steps]
    assert prompt_only or {True, False} in mixed, "no step held both"
    assert prompt_only or any(r.retractions for r in embedded), "none was computed again"


def test_cancelled_and_refused():
    engine = Engine(budget=8)
    r = embed("a", range(40), Pooling.MEAN)
    engine.scheduler.submit(r)
    engine.turn()
    engine.scheduler.close(r)
    engine.run()
    assert engine.scheduler.take_embedded() == []
    with pytest.raises(Refused) as refused:
        engine.scheduler.submit(embed("b", range(201)))
    assert refused.value.field == "token_ids"


def test_a_runner_that_computes_none():
    engine = Engine()

    class Without(HashRunner):
        def launch(self, plan):
            launched_step = super().launch(plan)
            launched_step.result = type(launched_step.result)(
                plan.number, tuple(RowResult() for _ in plan.rows)
            )
            return launched_step

    engine.runner = Without(64, 4, 8)
    engine.scheduler.submit(embed("a", range(10)))
    engine.run()
    (failed,) = engine.scheduler.take_embedded()
    assert isinstance(failed, FailedEvent) and failed.reason == "NO_EMBEDDINGS"


def test_a_failed_step_fails_it():
    engine = Engine()
    engine.scheduler.submit(embed("a", range(10)))
    engine.scheduler.fail_step(engine.scheduler.plan(), "the device is gone")
    (failed,) = engine.scheduler.take_embedded()
    assert isinstance(failed, FailedEvent) and failed.reason == "STEP_FAILED"
    assert engine.scheduler.take_events() == []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pooling", Pooling)
def test_one_that_is_retracted_half_way_begins_anew(overlap, pooling):
    engine = Engine(budget=8, overlap=overlap)
    r = embed("a", range(40), pooling)
    engine.scheduler.submit(r)
    while r.pooled is None:
        engine.turn()
    engine.scheduler.requeue(r.sequences[0])
    engine.run()
    check(engine, [r])
