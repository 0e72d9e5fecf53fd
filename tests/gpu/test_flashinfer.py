"""FlashInfer behind the interface of all backends: it alone plans on the host."""

from __future__ import annotations

import math
import random

import pytest
import torch
from test_paged_attention import OTHERS, USUAL, random_rows
from test_runner import LENGTHS, SAMPLED, assert_greedy, greedy

from attention_rows import Row, planned
from baton.attention.flashinfer_paged import FlashInferAttention
from baton.attention.torch_sdpa import TorchAttention
from baton.kvcache.kv_pool import KvLayout, KvPool
from rig import CUDA, generate, make, prompts_of, save_checkpoint, strictly

problem = FlashInferAttention.available(CUDA)
pytestmark = [
    pytest.mark.skipif(problem is not None, reason=f"flashinfer: {problem}"),
    pytest.mark.timeout(300),  # its kernels are compiled at first use
]
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model"))


def attended(backend, rows, dtype, seed):
    """The output for rows, single ones or chunks, of layer 1."""
    torch.manual_seed(seed)
    layout, heads = backend._layout, backend._num_heads
    total = sum(row.count for row in rows)
    q, k, v = (
        torch.randn(total, h, layout.head_dim, device=CUDA).to(dtype=BF16).to(dtype)
        for h in (heads, layout.num_kv_heads, layout.num_kv_heads)
    )
    out = torch.full_like(q, math.nan)
    backend.forward(1, q, k, v, out, planned(backend, rows))
    return out


@pytest.mark.parametrize(("singles", "chunks"), [(1, 0), (17, 0), (0, 1), (0, 5)])
@pytest.mark.parametrize(
    ("shape", "page_size"), [*((USUAL, size) for size in (1, 8, 16, 64, 128)), *((s, 16) for s in OTHERS)]
)
@torch.inference_mode()
def test_equals_the_torch_backend(shape, page_size, singles, chunks):
    heads, kv_heads, dim = shape
    rows, pages = random_rows(random.Random(f"{shape} {page_size}"), page_size, singles, chunks)
    pools = [
        KvPool(KvLayout(2, kv_heads, dim, page_size, kind), pages, CUDA) for kind in (BF16, torch.float32)
    ]
    torch.manual_seed(1)
    pools[0].pages.normal_()
    pools[1].pages.copy_(pools[0].pages)
    got = attended(FlashInferAttention(pools[0], heads), rows, BF16, 2)
    want = attended(TorchAttention(pools[1], heads), rows, torch.float32, 2)
    assert ((got.float() - want).norm() / want.norm()).item() < 5e-3
    assert (got.float() - want).abs().max().item() < 3e-2


@pytest.mark.parametrize("heads", [(64, 8), (16, 2)])
@torch.inference_mode()
def test_rows_that_are_divided_among_as_many_tiles_as_can_be(heads):
    """Whose parts take all of the workspace, or nearly."""
    for count in (120, 248, 500):
        pool = KvPool(KvLayout(2, heads[1], 128, 128, BF16), 80, CUDA)
        pool.pages.normal_()
        backend = FlashInferAttention(pool, heads[0])
        for start in (2048, 5000, 8064):
            rows = [Row(start, count, tuple(range(80)))]
            assert torch.isfinite(attended(backend, rows, BF16, 4)).all()


@torch.inference_mode()
def test_steps_planned_while_others_have_not_begun():
    """A plan is written to pinned memory, which must not be written again before the device has read it."""
    rng = random.Random(5)
    pool = KvPool(KvLayout(2, 8, 128, 16, BF16), 600, CUDA)
    pool.pages.normal_()
    before = pool.pages.clone()
    backend = FlashInferAttention(pool, 16)
    steps = []
    for count in (1, 4, 2, 7, 3, 5, 1, 6):
        rows, _ = random_rows(rng, 16, count, 0)
        steps.append([row for row in rows if max(row.pages) < 600])
    one_by_one = []
    for step in steps:
        one_by_one.append(attended(backend, step, BF16, 3))
        torch.cuda.synchronize()
    pool.pages.copy_(before)
    busy = torch.randn(8192, 8192, device=CUDA)
    for _ in range(20):  # some hundreds of milliseconds before which nothing below begins
        busy = busy @ busy
    at_once = [attended(backend, step, BF16, 3) for step in steps]
    assert all(torch.equal(one, other) for one, other in zip(one_by_one, at_once, strict=True))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pair", ["flashinfer/flashinfer", "flashinfer/mixed", "mixed/flashinfer"])
def test_greedy_by_float32_logits(checkpoint, pair, overlap):
    prompts = prompts_of(*LENGTHS)
    params = greedy(len(prompts))
    runner, cache = make(checkpoint, f"graphs:{pair}", BF16)
    assert (runner.graphs is None) == pair.endswith("flashinfer")
    assert (runner.chunk_graphs is None) == ("flashinfer" in pair)
    got = generate(runner, cache, prompts, params, overlap=overlap)
    assert [len(o) for o in got] == [p.max_tokens for p in params]
    assert_greedy(checkpoint, prompts, got, 0.3)


def test_launching_waits_for_nothing_but_the_plan_before(checkpoint):
    runner, cache = make(checkpoint, "graphs:flashinfer/flashinfer", BF16)
    prompts = prompts_of(*LENGTHS[: len(SAMPLED)])
    generate(runner, cache, prompts, SAMPLED, around=strictly, budget=64)
