"""Both runners on a GPU against the CPU in float32; graphs, overlap, and that launching never waits."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.batch import HostBatch
from baton.engine.captured_work import CapturedWork
from baton.engine.launched_step import LaunchedStep
from baton.engine.plan import PlanRow, Pooling, SlotInit, StepPlan
from baton.engine.sampling_params import SamplingParams
from baton.engine.step_graphs import batch_sizes
from baton.layers.async_copy import to_device
from rig import CUDA, GREEDY, VOCAB, generate, make, prompts_of, reference_logits, save_checkpoint, strictly

PAIRS = ("mixed/mixed", "fa3/fa3", "fa3/triton", "triton/fa3", "triton/triton")
LENGTHS = (5, 16, 33, 300, 1, 64, 129, 80, 47, 200)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model"))


def greedy(count, tokens=24):
    return [dataclasses.replace(GREEDY, max_tokens=tokens + i % 3) for i in range(count)]


def assert_greedy(path, prompts, outputs, tolerance):
    """Each token is the reference's maximum, or is within the tolerance of it."""
    wrong = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = reference_logits(path, prompt + output)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None]).squeeze(1)
        gap = logits.amax(1) - chosen
        wrong += int((gap > 0).sum())
        assert gap.max().item() <= tolerance
    # Rounding decides between near ties alone.
    assert wrong <= 0.1 * sum(map(len, outputs))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kind", ["plain", "triton"])
def test_float32_tokens_equal_those_of_the_cpu(checkpoint, kind, page_size):
    prompts = prompts_of(*LENGTHS)
    params = greedy(len(prompts))
    want = generate(*make(checkpoint, "cpu", torch.float32), prompts, params)
    got = generate(*make(checkpoint, kind, torch.float32, page_size=page_size), prompts, params)
    assert got == want
    assert_greedy(checkpoint, prompts, got, 1e-4)


@pytest.mark.parametrize(
    "kind", ["plain", "fa3", "triton", *(f"{kind}:{pair}" for kind in ("eager", "graphs") for pair in PAIRS)]
)
@pytest.mark.parametrize("overlap", [False, True])
def test_bfloat16_is_greedy_by_float32_logits(checkpoint, kind, overlap):
    prompts = prompts_of(*LENGTHS)
    params = greedy(len(prompts))
    got = generate(*make(checkpoint, kind, torch.bfloat16), prompts, params, overlap=overlap)
    assert [len(o) for o in got] == [p.max_tokens for p in params]
    assert_greedy(checkpoint, prompts, got, 0.3)


@pytest.mark.parametrize(
    "overrides",
    [
        {"head_dim": 128, "num_key_value_heads": 8},
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 4},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
    ],
)
@pytest.mark.parametrize("page_size", [64, 128])
def test_other_shapes_and_architectures(tmp_path, overrides, page_size):
    path = save_checkpoint(tmp_path, **overrides)
    prompts = prompts_of(*LENGTHS)
    runner, cache = make(path, "graphs", torch.bfloat16, page_size=page_size, num_pages=120)
    assert_greedy(path, prompts, generate(runner, cache, prompts, greedy(len(prompts))), 0.3)


def test_a_recycled_pool_and_a_cached_prefix(checkpoint):
    """Two rounds over a small pool; the second finds the first's prompts cached."""
    prompts = prompts_of(*LENGTHS)
    runner, cache = make(checkpoint, "graphs", torch.bfloat16, num_pages=90)
    for _ in range(2):
        assert_greedy(
            checkpoint, prompts, generate(runner, cache, prompts, greedy(len(prompts)), budget=64), 0.3
        )


SAMPLED = [
    SamplingParams(temperature=0.6, seed=3, max_tokens=20),
    SamplingParams(temperature=0.0, max_tokens=30),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=4, max_tokens=25),
    SamplingParams(temperature=0.9, min_p=0.05, repetition_penalty=1.2, seed=9, max_tokens=22, logprobs=2),
    SamplingParams(temperature=1.0, logit_bias={3: 5.0}, seed=11, max_tokens=12),
    SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=frozenset({1, 2}), max_tokens=9),
]


def test_sampling_does_not_depend_on_overlap_or_on_being_launched_ahead(tmp_path):
    # Steps hold other rows with overlap than without, which must not matter to a row's logits here.
    path = save_checkpoint(tmp_path, head_dim=128)
    prompts = prompts_of(*LENGTHS[: len(SAMPLED)])
    first, second = (
        generate(*make(path, "invariant", torch.bfloat16), prompts, SAMPLED, overlap=overlap)
        for overlap in (False, True)
    )
    assert first == second
    assert [len(o) for o in first] == [p.max_tokens for p in SAMPLED]


def test_warm_turns_change_nothing(tmp_path):
    """Neither before a launch nor behind one that is still under way."""
    path = save_checkpoint(tmp_path, head_dim=128)
    prompts = prompts_of(*LENGTHS[: len(SAMPLED)])
    runs = []
    for warmed in (False, True):
        runner, cache = make(path, "graphs", torch.bfloat16)

        @contextlib.contextmanager
        def around(runner=runner, warmed=warmed):
            if warmed:
                runner.warm()
            yield
            if warmed:
                runner.warm()

        runs.append(generate(runner, cache, prompts, SAMPLED, around=around, overlap=True))
    assert runs[0] == runs[1]


def test_launching_never_waits_for_the_device(checkpoint):
    prompts = prompts_of(*LENGTHS[: len(SAMPLED)])
    for kind in ("graphs", "eager", "graphs:triton/triton", "eager:triton/triton"):
        runner, cache = make(checkpoint, kind, torch.bfloat16)
        with pytest.raises(RuntimeError, match="synchronizing"), strictly():
            torch.ones(1, device=CUDA).item()
        generate(runner, cache, prompts, SAMPLED, around=strictly, budget=64)
        with strictly():
            runner.warm()
        wanted = [dataclasses.replace(SAMPLED[0], prompt_logprobs=2)]
        generate(runner, cache, prompts_of(40, seed=5), wanted, around=strictly)


@pytest.mark.parametrize("pair", PAIRS)
def test_replay_equals_the_same_step_without_a_graph(checkpoint, pair):
    runner, _ = make(checkpoint, f"graphs:{pair}", torch.bfloat16, slots=24)
    prompts = prompts_of(*range(20, 44))
    pages = 6
    for slot, prompt in enumerate(prompts):
        row = PlanRow(slot, tuple(prompt), 0, (tuple(range(slot * pages, slot * pages + pages)),), (slot,))
        init = SlotInit(slot, SamplingParams(temperature=slot % 3 * 0.5, seed=slot), slot, (), ())
        runner.read(runner.launch(StepPlan(1, (row,), (init,))))
    graphs = runner.graphs
    work = CapturedWork(runner._body, runner._slots, runner._caches, runner._attention, runner._sampling)
    tokens = runner._slots.last_token
    last = tokens.clone()
    with torch.inference_mode():
        for count in batch_sizes(24):
            slots = np.arange(count)
            positions = np.array([len(p) for p in prompts[:count]])
            sampling = runner._sampler.simple(slots, positions + 1)
            tokens.copy_(last)
            graphs.fill(slots, positions, np.zeros(len(slots), np.int32), sampling)
            graphs.replay(count)
            logits, result = graphs.logits(count).clone(), graphs.choose(count, None).clone()
            tokens.copy_(last)
            inputs = graphs.inputs(count)
            inputs.logits.zero_()
            inputs.result.zero_()
            work.decode(inputs)
            work.sample_plain(inputs)
            assert torch.equal(inputs.logits, logits), count
            assert torch.equal(inputs.result, result), count
            assert logits.isfinite().all()


def small_step(slots=24, first=20):
    """Rows of one token and chunks of all lengths, behind prompts of `first`, `first` + 1, ... tokens."""
    rows = [PlanRow(0, tuple(prompts_of(2)[0]), 0, (tuple(range(392, 400)),), (0,))]
    for slot in range(1, slots):
        pages = tuple(range(slot * 6, slot * 6 + 6))
        tokens = None if slot % 3 else tuple(prompts_of(slot // 2 + 2, seed=slot)[0])
        rows.append(PlanRow(slot, tokens, first + slot, (pages,), (slot,)))
    return rows


@pytest.mark.parametrize("pair", PAIRS)
def test_a_small_step_by_graph_equals_the_same_without(checkpoint, pair):
    """Chunks alone and beside rows of one token, of every graph's size; the padding spoils no page."""
    runner, _ = make(checkpoint, f"graphs:{pair}", torch.bfloat16, slots=24)
    prompts = prompts_of(*range(20, 44))
    for slot, prompt in enumerate(prompts):
        row = PlanRow(slot, tuple(prompt), 0, (tuple(range(slot * 6, slot * 6 + 6)),), (slot,))
        init = SlotInit(slot, SamplingParams(temperature=0.0), slot, (), ())
        runner.read(runner.launch(StepPlan(1, (row,), (init,))))
    graphs, rows = runner.chunk_graphs, small_step()
    used = set()
    with torch.inference_mode():
        for count in (1, 2, 5, 8, 9, 14, 24):
            step = HostBatch.of(rows[:count])
            launched_step = LaunchedStep(1, tuple(rows[:count]))
            changes = runner._slots.changes(step.rows, {})
            if changes is not None:
                runner._slots.write(*(to_device(array, CUDA) for array in changes))
            want = runner._eager(runner._batch(step, every=False), step, False, launched_step).float()
            first = graphs.shape(step)
            for shape in [each for each in graphs._shapes if each >= first and each.rows >= len(step.rows)]:
                used.add(shape)
                got = graphs.run(shape, step, None).float().clone()
                torch.testing.assert_close(got, want, atol=0.2, rtol=0.05)
                assert (got - want).abs().mean() < 0.03
    assert used == set(graphs._shapes)
    assert runner._pool.groups[0].pages.isfinite().all() and runner._pool.raw.isfinite().all()


def test_small_steps_are_launched_by_graph(checkpoint, monkeypatch):
    runner, cache = make(checkpoint, "graphs", torch.bfloat16)
    seen = []
    run, eager = runner.chunk_graphs.run, runner._eager
    monkeypatch.setattr(runner.chunk_graphs, "run", lambda *a: (seen.append("graph"), run(*a))[1])
    monkeypatch.setattr(runner, "_eager", lambda *a: (seen.append("eager"), eager(*a))[1])
    generate(runner, cache, prompts_of(40), greedy(1))
    assert seen == ["graph"]
    wanted = [dataclasses.replace(GREEDY, max_tokens=3, prompt_logprobs=2)]
    generate(runner, cache, prompts_of(40, seed=5), wanted)
    assert seen == ["graph", "eager"]


def test_padding_changes_nothing_for_others(checkpoint):
    """Sequences of 3, 5 and 11 rows, all padded, and the spare page they share."""
    for count in (3, 5, 11):
        prompts = prompts_of(*LENGTHS, 71)[:count]
        runner, cache = make(checkpoint, "graphs", torch.bfloat16)
        assert_greedy(checkpoint, prompts, generate(runner, cache, prompts, greedy(count)), 0.3)


@pytest.mark.parametrize("pair", PAIRS)
def test_logits_that_are_not_finite_are_an_error_of_their_row_alone(checkpoint, pair):
    runner, _ = make(checkpoint, f"graphs:{pair}", torch.bfloat16)
    prompts = prompts_of(20, 30)
    rows = [PlanRow(s, tuple(p), 0, ((2 * s, 2 * s + 1),), (s,)) for s, p in enumerate(prompts)]
    inits = tuple(SlotInit(s, GREEDY, 0, (), ()) for s in range(2))
    runner.read(runner.launch(StepPlan(1, tuple(rows), inits)))
    runner._pool.groups[0].pages[2].fill_(math.nan)
    rows = [PlanRow(s, None, len(p), ((2 * s, 2 * s + 1),), (s,)) for s, p in enumerate(prompts)]
    good, bad = runner.read(runner.launch(StepPlan(2, tuple(rows)))).rows
    assert good.error is None and bad.error is not None


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("pair", ["fa3/fa3", "mixed/mixed", "triton/triton"])
def test_no_number_of_one_sequence_reaches_the_next_in_its_pages(tmp_path, pair, page_size):
    """FlashAttention 3 multiplies values behind a row's end by 0."""
    path = save_checkpoint(tmp_path, head_dim=128)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][VOCAB - 1] = math.nan
    save_file(tensors, path / "model.safetensors")
    runner, _ = make(path, f"graphs:{pair}", torch.bfloat16, page_size=page_size, num_pages=512 // page_size)
    each = 256 // page_size

    def run(prompts):
        """Tokens of each row and its errors, for six steps."""
        pages = [tuple(range(slot * each, slot * each + each)) for slot in range(2)]
        rows = [PlanRow(s, tuple(p), 0, (pages[s],), (s,)) for s, p in enumerate(prompts)]
        inits = tuple(SlotInit(s, GREEDY, 0, (), ()) for s in range(2))
        results = [runner.read(runner.launch(StepPlan(1, tuple(rows), inits))).rows]
        for step in range(5):
            rows = [PlanRow(s, None, len(p) + step, (pages[s],), (s,)) for s, p in enumerate(prompts)]
            results.append(runner.read(runner.launch(StepPlan(2 + step, tuple(rows)))).rows)
        return [(row.tokens, row.error) for step in results for row in step]

    prompts = [[token % (VOCAB - 1) for token in p] for p in prompts_of(140, 100)]
    wanted = run(prompts)
    assert all(error is None for _, error in wanted)
    # Of the prompts' step: FlashAttention 3 leaves out parts of a row's keys that have no numbers.
    assert all(error is not None for _, error in run([[VOCAB - 1] * 250] * 2)[:2])
    assert run(prompts) == wanted


@pytest.mark.parametrize("quantization", ["auto", "fp8", "int8", "int4"])
@pytest.mark.parametrize(
    "kind", ["graphs:fa3/fa3", "graphs:mixed/mixed", "graphs:triton/triton", "model:fa3"]
)
def test_a_model_whose_values_are_damaged_fails(tmp_path, kind, quantization):
    """One weight of one layer, of which every token's values have a number that is none."""
    path = save_checkpoint(tmp_path, head_dim=128)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 5] = math.nan
    save_file(tensors, path / "model.safetensors")
    runner, _ = make(path, kind, torch.bfloat16, page_size=128, num_pages=8, quantization=quantization)
    prompts = prompts_of(140, 1)
    inits = tuple(SlotInit(s, GREEDY, 0, (), ()) for s in range(2))
    rows = [PlanRow(s, tuple(p), 0, ((2 * s, 2 * s + 1),), (s,)) for s, p in enumerate(prompts)]
    results = [runner.read(runner.launch(StepPlan(1, tuple(rows), inits))).rows]
    for step, slots in enumerate(((0, 1), (0,), (1,))):
        rows = [PlanRow(s, None, len(prompts[s]) + step, ((2 * s, 2 * s + 1),), (s,)) for s in slots]
        inits = tuple(SlotInit(s, GREEDY, 0, (), (), 7) for s in slots)
        results.append(runner.read(runner.launch(StepPlan(2 + step, tuple(rows), inits))).rows)
    assert all(row.error is not None for step in results for row in step)
    if runner.kernels:
        row = PlanRow(0, tuple(prompts[0]), 0, ((0, 1),), (), pooling=Pooling.MEAN)
        (pooled,) = runner.read(runner.launch(StepPlan(9, (row,)))).rows
        assert pooled.error is not None
