"""A request gets the same logits, to the bit, alone and in any batch, however its prompt is divided."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from test_recurrent_on_gpu import FAMILIES

from baton.engine.sampler import token_logprobs
from baton.engine.sampling_params import SamplingParams
from baton.layers.attention import AttentionOptions
from baton.layers.linear import Linear
from rig import CUDA, GREEDY, generate, make, prompts_of, save_checkpoint

LENGTHS = (5, 16, 33, 300, 1, 64, 129, 80, 47, 200)
SHAPE = {"head_dim": 128}
TILES = ((64, 32, 128, 4, 4), (64, 64, 128, 4, 4), (128, 64, 64, 4, 4), (128, 256, 64, 8, 3))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("columns", "inner"), [(6144, 4096), (1024, 3072), (1000, 200)])
def test_a_row_of_a_product(columns, inner, bias):
    from baton.layers.kernels.batch_invariant_matmul import MatmulTile, matmul

    torch.manual_seed(inner)
    weight = torch.randn(columns, inner, device=CUDA).bfloat16() / inner**0.5
    linear = Linear(weight, torch.randn(columns, device=CUDA).bfloat16() if bias else None)
    x = torch.randn(2100, inner, device=CUDA).bfloat16()
    want = matmul(x, linear)
    exact = x.float() @ weight.float().t() + (0 if linear.bias is None else linear.bias.float())
    assert ((want.float() - exact).norm() / exact.norm()).item() < 4e-3
    for rows in (1, 2, 17, 64, 65, 200, 256, 257, 1024):
        assert torch.equal(matmul(x[:rows], linear), want[:rows]), rows
        assert torch.equal(matmul(x[-rows:], linear), want[-rows:]), rows
    for shape in TILES:
        assert torch.equal(matmul(x[:300], linear, tile=MatmulTile(*shape)), want[:300]), shape
    out = torch.full((70, columns), torch.nan, device=CUDA, dtype=torch.bfloat16)
    assert matmul(x[:65], linear, out[:65]) is not None
    assert torch.equal(out[:65], want[:65]) and out[65:].isnan().all()


@pytest.mark.parametrize("vocab", [4096, 4098, 151_936])
def test_log_probabilities(vocab):
    logits = torch.randn(200, vocab, generator=torch.Generator(CUDA).manual_seed(vocab), device=CUDA)
    tokens = torch.arange(200, device=CUDA)
    want = token_logprobs(logits, tokens, 3)
    exact = logits.double().log_softmax(-1)
    assert (want.chosen - exact.gather(1, tokens[:, None]).squeeze(1)).abs().max() < 1e-5
    assert torch.equal(want.top_tokens, exact.topk(3).indices)
    for rows in (1, 2, 7, 64):
        for first in (0, 3, 200 - rows):
            found = token_logprobs(logits[first : first + rows], tokens[first : first + rows], 3)
            assert torch.equal(found.chosen, want.chosen[first : first + rows]), (rows, first)
            assert torch.equal(found.top, want.top[first : first + rows]), (rows, first)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("dim", "page_size"), [(64, 128), (128, 16), (256, 128)])
def test_attention_of_a_token_wherever_its_chunk_begins(dim, page_size, window):
    from baton.layers.kernels.prefill_attention import chunk_attention

    torch.manual_seed(dim)
    rows, tokens, heads, kv_heads = 100, 256, 4, 2
    pages = tokens // page_size
    pool = torch.randn(rows * pages, kv_heads, 2, page_size, dim, device=CUDA).bfloat16()
    keys, values = (pool[:, :, part].transpose(1, 2) for part in (0, 1))
    table = torch.arange(rows * pages, dtype=torch.int32, device=CUDA).view(rows, pages)
    q = (3 * torch.randn(rows, tokens, heads, dim, device=CUDA)).bfloat16()

    def run(first, last):
        count = last - first
        starts = count * torch.arange(rows + 1, dtype=torch.int32, device=CUDA)
        lengths = torch.full((rows,), last, dtype=torch.int32, device=CUDA)
        x = q[:, first:last].reshape(-1, heads, dim).contiguous()
        out = torch.empty_like(x)
        options = AttentionOptions(window=window)
        chunk_attention(x, keys, values, table, lengths, starts, out, options, invariant=True)
        return out.view(rows, count, heads, dim)

    whole = run(0, tokens)
    for first in (1, 7, 16, 31, 64, 65, 80, 255):
        assert torch.equal(run(first, tokens), whole[:, first:]), first
    for position in (62, 63, 64, 127, 128, 191):  # as decode rows
        assert torch.equal(run(position, position + 1), whole[:, position : position + 1]), position


class Recorded:
    """The logits that a runner samples from, by seed of the request and position; seeds are unique."""

    def __init__(self, runner) -> None:
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self._runner, self._launch, self._project = runner, runner.launch, runner._body.logits
        self._seeds: dict[int, int] = {}
        self._seen = None
        runner.launch, runner._body.logits = self.launch, self.project

    def project(self, hidden, out=None):
        result = self._project(hidden, out)
        if not torch.cuda.is_current_stream_capturing():
            self._seen = result
        return result

    def launch(self, plan):
        self._seeds |= {init.slot: init.seed for init in plan.inits}
        self._seen = None
        launched_step = self._launch(plan)
        rows = [row for row in plan.rows if row.sample]
        if launched_step.row_order is not None:
            rows = [rows[launched_step.row_order.index(place)] for place in range(len(rows))]
        # A replayed graph calls nothing, and leaves its logits in its buffer.
        seen = self._runner.graphs._logits if self._seen is None else self._seen
        for row, logits in zip(rows, seen[: len(rows)].clone(), strict=True):
            self.logits[self._seeds[row.sample[0]], row.start + row.count] = logits
        return launched_step


def run(path, requests, *, slots=64, budget=256, rounds=1, **options):
    """Outputs and logits of (prompt, parameters), which share a batch; of the last of several rounds over
    the same cache."""
    runner, cache = make(path, "invariant", torch.bfloat16, slots=slots, num_pages=1200, **options)
    for _ in range(rounds):
        recorded = Recorded(runner)
        outputs = generate(
            runner, cache, [prompt for prompt, _ in requests], [own for _, own in requests], budget=budget
        )
        runner.launch, runner._body.logits = recorded._launch, recorded._project
    return outputs, recorded.logits


def assert_same(outputs, logits, want_outputs, want_logits):
    assert outputs == want_outputs
    shared = logits.keys() & want_logits.keys()
    assert len(shared) >= sum(map(len, want_outputs))
    for key in shared:
        assert torch.equal(logits[key], want_logits[key]), key


RECURRENT = [FAMILIES[name] for name in ("qwen3.5", "qwen3.5-moe", "qwen3-next", "lfm2")]


@pytest.mark.parametrize(
    ("shape", "page_size"),
    [
        *itertools.product([SHAPE, {**SHAPE, "num_key_value_heads": 4}, {"head_dim": 64}], [16, 64, 128]),
        *itertools.product(RECURRENT, [16, 128]),
    ],
)
def test_alone_in_a_batch_from_a_cache_and_by_other_chunks(tmp_path, shape, page_size):
    path = save_checkpoint(tmp_path, **shape)
    prompts = prompts_of(*LENGTHS)
    params = [
        SamplingParams(temperature=(0.0, 0.8)[i % 2], top_p=(1.0, 0.9)[i % 3 // 2], seed=i, max_tokens=24)
        for i in range(len(prompts))
    ]
    requests = list(zip(prompts, params, strict=True))
    alone, logits = [], {}
    for request in requests:
        outputs, own = run(path, [request], slots=4, page_size=page_size)
        alone += outputs
        logits |= own
    for options in ({}, {"budget": 64}, {"budget": 1000, "rounds": 2}):
        outputs, found = run(path, requests, page_size=page_size, **options)
        assert_same(outputs, found, alone, logits)
    others = [
        (prompt, dataclasses.replace(GREEDY, seed=100 + i, max_tokens=10 + i))
        for i, prompt in enumerate(prompts_of(*range(30, 84), seed=9))
    ]
    outputs, found = run(path, requests + others, page_size=page_size)
    assert_same(outputs[: len(requests)], found, alone, logits)


@pytest.mark.parametrize("shape", [SHAPE, {"head_dim": 64}, *RECURRENT])
def test_a_sequence_goes_on_from_its_own_output_as_a_prompt(tmp_path, shape):
    """What was decoded token by token is computed as a chunk, as after a retraction: nothing changes."""
    path = save_checkpoint(tmp_path, **shape)
    (prompt,) = prompts_of(70)
    params = dataclasses.replace(GREEDY, max_tokens=40)
    (whole,), logits = run(path, [(prompt, params)])
    (rest,), found = run(path, [(prompt + whole[:25], dataclasses.replace(params, max_tokens=15))])
    assert whole[25:] == rest
    shared = found.keys() & logits.keys()
    assert len(shared) >= 15
    for key in shared:
        assert torch.equal(found[key], logits[key]), key


@pytest.mark.parametrize("shape", RECURRENT)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 129, 300])
def test_what_is_cached_goes_on_as_if_it_were_computed(tmp_path, shape, length):
    """From snapshots at the border before, and where a second and a third prompt diverge."""
    path = save_checkpoint(tmp_path, **shape)
    (shared,), ends = prompts_of(length, seed=3), prompts_of(40, 70, 9, seed=4)
    params = dataclasses.replace(GREEDY, max_tokens=12)
    runner, cache = make(path, "invariant", torch.bfloat16, num_pages=600)
    for seed, end in enumerate(ends):
        own = dataclasses.replace(params, seed=seed)
        recorded = Recorded(runner)
        (output,) = generate(runner, cache, [shared + end], [own])
        runner.launch, runner._body.logits = recorded._launch, recorded._project
        fresh, logits = run(path, [(shared + end, own)])
        assert_same([output], recorded.logits, fresh, logits)


def test_drafts_of_recurrent_models_are_refused(tmp_path):
    path = save_checkpoint(tmp_path, **RECURRENT[0])
    with pytest.raises(ValueError, match="drafts"):
        make(path, "invariant", torch.bfloat16, draft_tokens=2)


def test_without_the_mode_logits_do_differ(tmp_path):
    """Else the tests above would prove nothing."""
    path = save_checkpoint(tmp_path, **SHAPE)
    prompts = prompts_of(*LENGTHS)
    found = []
    for chosen in (prompts[3:4], prompts):
        runner, cache = make(path, "graphs", torch.bfloat16)
        recorded = Recorded(runner)
        params = [
            dataclasses.replace(GREEDY, seed=0 if p is prompts[3] else i + 1, max_tokens=8)
            for i, p in enumerate(chosen)
        ]
        generate(runner, cache, chosen, params)
        found.append({key: row for key, row in recorded.logits.items() if key[0] == 0})
    keys = found[0].keys() & found[1].keys()
    assert keys and any(not torch.equal(found[0][key], found[1][key]) for key in keys)


@pytest.mark.parametrize("shape", [SHAPE, *RECURRENT])
def test_no_product_is_the_librarys(tmp_path, monkeypatch, shape):
    """The number of rows has a say in theirs, though not at sizes as small as here."""

    def refuse(*_):
        raise AssertionError("a product by the library")

    path = save_checkpoint(tmp_path, **shape)
    monkeypatch.setattr(Linear, "__call__", refuse)
    monkeypatch.setattr(Linear, "into", refuse)
    params = dataclasses.replace(GREEDY, max_tokens=8)
    outputs, _ = run(path, [(prompt, params) for prompt in prompts_of(*LENGTHS)])
    assert all(len(output) == 8 for output in outputs)
    with pytest.raises(AssertionError, match="by the library"):
        make(path, "graphs", torch.bfloat16)


def test_fa3_is_not_taken_for_heads_of_another_size():
    from baton.attention.fa3 import FixedFa3Attention

    assert FixedFa3Attention.available(CUDA, torch.bfloat16, 128) is None
    assert "depend on the batch" in str(FixedFa3Attention.available(CUDA, torch.bfloat16, 64))
