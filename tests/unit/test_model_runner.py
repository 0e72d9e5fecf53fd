"""Ragged plans against transformers: chunked prompts, cached prefixes, shuffled pages, overlap."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from random_checkpoints import (
    GREEDY,
    VARIANTS,
    VOCAB,
    Driver,
    check_greedy,
    greedy_reference,
    largest_difference,
    random_prompts,
    saved_on_demand,
)

from baton.engine.model_runner import pool_states
from baton.engine.plan import PlanRow, Pooling, StepPlan
from baton.engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return saved_on_demand(tmp_path_factory)


def run_mixed(driver, prompts, chunk, outputs):
    """Sequences arrive one step apart; each runs its prompt in chunks, then decodes beside the others."""
    waiting = [driver.add(slot, prompt, outputs) for slot, prompt in enumerate(prompts)]
    goals = [len(prompt) + outputs - 1 for prompt in prompts]
    arrived = 0
    while any(track.computed < goal for track, goal in zip(waiting, goals, strict=True)):
        arrived = min(arrived + 1, len(waiting))
        rows, inits = [], []
        for track, prompt, goal in zip(waiting[:arrived], prompts, goals, strict=False):
            if track.computed >= goal:
                continue
            if track.computed >= len(prompt):
                rows.append(driver.decode(track))
            else:
                count = min(chunk, len(prompt) - track.computed)
                last = track.computed + count == len(prompt)
                if last:
                    inits.append(driver.init(track))
                rows.append(driver.chunk(track, count, sample=last))
        driver.step(rows, inits)
    driver.finish()
    return waiting


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [16, pytest.param(1000, marks=pytest.mark.thorough)])
def test_logits_and_greedy_tokens_equal_transformers(checkpoints, variant, chunk):
    path, model = checkpoints(variant)
    prompts = random_prompts(5, 16, 33, 70, 1)
    for track, prompt in zip(run_mixed(Driver(path), prompts, chunk, 16), prompts, strict=True):
        assert largest_difference(model, track) < 1e-4
        check_greedy(model, prompt, track.tokens[len(prompt) :])


@pytest.mark.parametrize("variant", ["gemma3", "gemma4-shared", "gpt-oss", "llama4", "mistral-window"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 3), (4, 4), (8, 5), (16, 16)])
def test_window_groups_with_page_tables_of_what_is_seen(checkpoints, variant, page_size, chunk):
    """Around the borders of windows and chunks of 24 and 32, and of pages."""
    path, model = checkpoints(variant)
    driver = Driver(path, page_size=page_size, num_pages=512 // page_size)
    assert any(group.spec.window for group in driver.pool.layout.groups)
    for track in run_mixed(driver, random_prompts(23, 24, 25, 31, 33, 70), chunk, 12):
        assert largest_difference(model, track) < 1e-4


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 3), (4, 4), (16, 7), (64, 23)])
def test_page_size_and_chunks_do_not_matter(checkpoints, page_size, chunk):
    path, model = checkpoints("qwen3")
    driver = Driver(path, page_size=page_size, num_pages=512 // page_size)
    for track in run_mixed(driver, random_prompts(40, 9, 65), chunk, 8):
        assert largest_difference(model, track) < 1e-4


@pytest.mark.parametrize("variant", ["qwen3", "llama3"])
def test_bfloat16(checkpoints, variant):
    """Within 4 % of the largest logit: bfloat16 keeps 8 bits, and rounding adds up over a few layers."""
    path, model = checkpoints(variant)
    driver = Driver(path, dtype=torch.bfloat16)
    for track in run_mixed(driver, random_prompts(5, 33, 70), 16, 8):
        scale = max(logits.abs().max().item() for logits in track.logits.values())
        assert largest_difference(model, track) < 0.04 * scale


def test_cached_prefix_and_copied_page(checkpoints):
    path, model = checkpoints("qwen2")
    driver = Driver(path)
    (prompt,) = random_prompts(50)
    first = driver.add(0, prompt, 20)
    driver.step([driver.chunk(first, 50, sample=True)], [driver.init(first)])
    driver.step([driver.decode(first)])
    # Shares two pages and continues differently, beside the first.
    second = driver.add(1, prompt[:32] + random_prompts(21, seed=5)[0], 20, cached=first, prefix=32)
    # Shares three pages' worth of tokens, the last of them as a copy that it goes on writing.
    third = driver.add(2, prompt, 20, cached=first, prefix=48)
    third.computed = 50 - 1
    copy = (first.tables[0][3], third.tables[0][3])
    driver.step(
        [driver.decode(first), driver.chunk(second, 21, sample=True), driver.chunk(third, 1, sample=True)],
        [driver.init(second), driver.init(third)],
        [copy],
    )
    for _ in range(6):
        driver.step([driver.decode(third), driver.decode(first), driver.decode(second)])
    driver.finish()
    for track in (first, second, third):
        assert largest_difference(model, track) < 1e-4
    assert third.tokens == first.tokens[: len(third.tokens)]


def test_last_token_from_init(checkpoints):
    """A pulled prompt: KV is there, the first token comes from the token log."""
    path, model = checkpoints("qwen3")
    driver = Driver(path)
    (prompt,) = random_prompts(20)
    track = driver.add(3, prompt, 10)
    driver.step([driver.chunk(track, 20)])
    driver.finish()
    track.tokens.append(7)
    init = dataclasses.replace(driver.init(track, prompt=20), last_token=7)
    driver.step([driver.decode(track)], [init])
    driver.step([driver.decode(track)])
    driver.finish()
    assert largest_difference(model, track) < 1e-4
    assert track.tokens[21:] == greedy_reference(model, [*prompt, 7], 2)


def test_several_samples_of_one_row_and_prompt_logprobs(checkpoints):
    path, model = checkpoints("mistral")
    driver = Driver(path, slots=4)
    (prompt,) = random_prompts(37)
    track = driver.add(0, prompt, 4)
    for slot in (1, 2):
        driver.tracks[slot] = dataclasses.replace(track, slot=slot, tokens=list(prompt))
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    params = [SamplingParams(seed=s, logprobs=3) for s in (5, 6)]
    seen = []
    for start, count in ((0, 16), (16, 21)):
        row = PlanRow(
            0,
            tuple(prompt[start : start + count]),
            start,
            tuple(track.tables),
            (1, 2) if start else (),
            tuple(prompt[start + 1 : start + 1 + count]),
            2,
        )
        inits = [driver.init(driver.tracks[s + 1], p) for s, p in enumerate(params)] if start else []
        driver.number += 1
        result = driver.runner.read(driver.runner.launch(StepPlan(driver.number, (row,), tuple(inits)))).rows[
            0
        ]
        seen += result.prompt_logprobs
    assert [entry.token for entry in seen] == prompt[1:]
    for at, entry in enumerate(seen):
        assert entry.logprob == pytest.approx(expected[at, entry.token].item(), abs=1e-4)
        values, _ = expected[at].topk(2)
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert len(result.tokens) == 2
    for token, logprobs in result.sampled():
        assert logprobs is not None and len(logprobs.top) == 3
        assert logprobs.token == token
        assert logprobs.logprob == pytest.approx(expected[-1, token].item(), abs=1e-4)


PENALIZED = SamplingParams(
    temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, top_p=0.95, seed=11
)


@pytest.mark.parametrize("params", [SamplingParams(seed=3), SamplingParams(top_k=9, min_p=0.02), PENALIZED])
def test_sampled_tokens_are_the_same_alone_and_in_a_batch(checkpoints, params):
    path, _ = checkpoints("qwen3")
    prompts = random_prompts(21, 40, 7, 33)

    def run(slots, overlap):
        driver = Driver(path)
        tracks = [driver.add(slot, prompts[slot], 24) for slot in slots]
        kinds = {0: params, 1: GREEDY, 2: SamplingParams(temperature=2.0, seed=9), 3: PENALIZED}
        driver.step(
            [driver.chunk(t, len(t.tokens), sample=True) for t in tracks],
            [driver.init(t, kinds[t.slot]) for t in tracks],
        )
        for _ in range(23):
            if not overlap:
                driver.finish()
            driver.step([driver.decode(t) for t in reversed(tracks)])
        driver.finish()
        return next(t.tokens for t in tracks if t.slot == 0)

    alone = run([0], overlap=False)
    assert run([0], overlap=True) == alone
    assert run([0, 1, 2, 3], overlap=True) == alone
    assert run([3, 0, 2], overlap=False) == alone


def test_resumed_elsewhere_continues_the_same_sequence(checkpoints):
    """A retry knows the token log alone, penalties and seed included."""
    path, _ = checkpoints("qwen3")
    (prompt,) = random_prompts(20)

    def run(tokens, count, slot):
        driver = Driver(path)
        track = driver.add(slot, tokens, 40)
        init = driver.init(track, PENALIZED, prompt=len(prompt))
        driver.step([driver.chunk(track, len(tokens), sample=True)], [init])
        for _ in range(count - 1):
            driver.step([driver.decode(track)])
        driver.finish()
        return track.tokens

    whole = run(prompt, 20, 0)
    assert run(whole[:29], 11, 5) == whole


def test_logits_that_are_not_finite_are_an_error_of_their_row_alone(checkpoints):
    path, model = checkpoints("qwen3")
    driver = Driver(path)
    prompts = random_prompts(20, 30)
    good, bad = (driver.add(slot, prompt, 8) for slot, prompt in enumerate(prompts))
    driver.step(
        [driver.chunk(t, len(t.tokens), sample=True) for t in (good, bad)],
        [driver.init(good), driver.init(bad, SamplingParams(top_p=0.9))],
    )
    driver.finish()
    driver.pool.raw[bad.tables[0][0]].view(torch.float32)[5] = math.nan
    plan = StepPlan(9, (driver.decode(bad), driver.decode(good)))
    rows = driver.runner.read(driver.runner.launch(plan)).rows
    assert rows[0].error is not None and "not finite" in rows[0].error
    assert rows[1].error is None
    assert rows[1].tokens[0] == greedy_reference(model, prompts[0], 2)[1]


def test_vocab_and_empty_plan(checkpoints):
    driver = Driver(checkpoints("qwen3")[0])
    assert driver.runner.vocab_size == VOCAB
    assert driver.runner.read(driver.runner.launch(StepPlan(1, ()))).rows == ()


def test_an_embedding_keeps_no_other_hidden_states_in_memory():
    for dtype in (torch.float32, torch.bfloat16):
        states = torch.randn(50, 8).to(dtype)
        for pooling, expected in ((Pooling.LAST, states[-1]), (Pooling.MEAN, states.float().sum(0))):
            found = pool_states(pooling, states)
            assert torch.equal(found, expected.float()) and found.untyped_storage().nbytes() == 8 * 4
