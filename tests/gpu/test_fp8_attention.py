"""The KV pool in FP8 on a GPU: what kernels write and read, and whole models, against torch."""

from __future__ import annotations

import math
import random

import pytest
import torch
from test_paged_attention import random_rows
from test_runner import LENGTHS, greedy

from attention_rows import planned
from baton.attention.fa3 import Fa3Attention
from baton.attention.fp8 import E4M3, quantize
from baton.attention.mixed import MixedAttention
from baton.attention.registry import resolve
from baton.attention.torch_sdpa import TorchAttention
from baton.attention.triton_paged import TritonAttention
from baton.kvcache.kv_pool import KvLayout, KvPool
from baton.layers.attention import AttentionOptions
from baton.layers.kernels.rope_kv_write import write_qkv
from rig import CUDA, generate, make, prompts_of, reference_logits, save_checkpoint

BF16 = torch.bfloat16
HEADS, KV_HEADS, PAGE = 8, 2, 16
SCALES = torch.tensor([[0.37, 0.0217], [0.113, 2.93]])


def codes(pages: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return pages.view(torch.uint8)[page, offset]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(("dim", "rotary"), [(128, 128), (128, 64), (64, 64)])
def test_kernels_write_what_torch_rounds(dtype, dim, rotary):
    """Values exactly; keys are rotated in float32: a few may be a step off."""
    torch.manual_seed(dim + rotary)
    scales, tokens = SCALES.to(CUDA), 37
    pool = KvPool(KvLayout(2, KV_HEADS, dim, PAGE, E4M3), 20, CUDA)
    pool.raw.zero_()
    table = torch.randperm(20, device=CUDA).int().view(4, 5)
    where = torch.randperm(4 * 5 * PAGE, device=CUDA)[:tokens].int()
    slots, positions = where // (5 * PAGE), where % (5 * PAGE)
    at = table[slots.long(), (positions // PAGE).long()].long(), (positions % PAGE).long()
    qkv = (torch.randn(tokens, (HEADS + 2 * KV_HEADS) * dim, device=CUDA) * 3).to(dtype)
    qkv[0, -5] = 6e4
    angles = torch.randn(5 * PAGE, rotary // 2, device=CUDA)
    x = qkv.clone().view(tokens, -1, dim)
    nan_flags = torch.zeros(4, device=CUDA)
    write_qkv(
        qkv, None, torch.cat((angles.cos(), angles.sin()), 1), positions, slots, nan_flags, table,
        pool.pages[:, :, 1], HEADS, 0.0, scales,
    )  # fmt: skip
    cos, sin = (part[positions.long()][:, None] for part in (angles.cos(), angles.sin()))
    low, high = x[:, HEADS : HEADS + KV_HEADS, :rotary].float().chunk(2, -1)
    rest = x[:, HEADS : HEADS + KV_HEADS, rotary:].float()
    k, v = (
        torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1),
        x[:, HEADS + KV_HEADS :],
    )
    keys, values = pool.layer(1)
    assert torch.equal(codes(values, *at), quantize(v, scales[1]))
    differing = codes(keys, *at).int() - quantize(k, scales[0]).int()
    assert differing.abs().max() <= 1 and differing.count_nonzero() <= 3
    assert not pool.pages[:, :, 0].view(torch.uint8).any()
    assert not nan_flags.any()


@pytest.mark.parametrize(("singles", "chunks"), [(1, 0), (17, 0), (9, 4)])
@pytest.mark.parametrize(
    ("name", "dtype", "shape", "page_size", "window"),
    [
        ("triton", BF16, (16, 8, 128), 128, None),
        ("triton", BF16, (8, 2, 64), 16, 100),
        ("triton", torch.float32, (16, 8, 128), 64, None),
        ("fa3", BF16, (16, 8, 128), 128, None),
        ("fa3", BF16, (16, 8, 128), 128, 100),
    ],
)
def test_kernels_equal_torch(name, dtype, shape, page_size, window, singles, chunks):
    """FlashAttention 3 rounds queries and weights to FP8 as well."""
    heads, kv_heads, dim = shape
    torch.manual_seed(page_size)
    rows, pages = random_rows(random.Random(f"{heads} {singles} {chunks}"), page_size, singles, chunks)
    scales = torch.rand(2, kv_heads, device=CUDA) * 0.05 + 0.01
    options = [AttentionOptions(window=window, kv_scales=each) for each in (scales.flip(0), scales)]
    pools = [KvPool(KvLayout(2, kv_heads, dim, page_size, E4M3), pages, CUDA) for _ in range(2)]
    filled = (torch.randn(pools[0].pages.shape, device=CUDA) * 30).to(E4M3)
    for pool in pools:
        pool.raw.copy_(filled.view(torch.uint8).view(pool.raw.shape))
    total = sum(row.count for row in rows)
    q, k, v = (torch.randn(total, h, dim, device=CUDA).to(dtype) for h in (heads, kv_heads, kv_heads))
    backend = TritonAttention if name == "triton" else Fa3Attention
    tested, reference = backend(pools[0], heads, options), TorchAttention(pools[1], heads, options)
    out, want = torch.full_like(q, math.nan), torch.full_like(q, math.nan, dtype=torch.float32)
    with torch.inference_mode():
        for mine, at in ((rows[:singles], slice(0, singles)), (rows[singles:], slice(singles, total))):
            if mine:
                for backend, target, kind in ((tested, out, dtype), (reference, want, torch.float32)):
                    planned_rows = planned(backend, mine)
                    backend.forward(1, *(x[at].to(kind) for x in (q, k, v)), target[at], planned_rows)
    for row in rows:  # torch clears what lies behind a row's end
        page, last = divmod(row.start + row.count - 1, page_size)
        for pool in pools:
            pool.pages.view(torch.uint8)[row.pages[page], :, :, :, last + 1 :] = 0
    assert torch.equal(pools[0].raw, pools[1].raw)
    error = ((out.float() - want).norm() / want.norm()).item()
    assert error < (5e-2 if name == "fa3" else 1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("plain", 0.4),
        ("graphs:triton/triton", 0.4),
        ("graphs:mixed/mixed", 1.2),
    ],
)
def test_greedy_tokens_of_a_model(kind, tolerance, tmp_path):
    path = save_checkpoint(tmp_path, head_dim=128)
    model, _ = make(path, "cpu", torch.float32)
    layout = model._pool.layout
    layers, kv_heads = layout.layouts[0].num_layers, layout.num_kv_heads
    torch.manual_seed(1)
    scales = torch.rand(layers, 2, kv_heads) * 0.1 + 0.01
    prompts = prompts_of(*LENGTHS)
    runner, cache = make(path, kind, BF16, page_size=128, kv_scales=scales)
    outputs = generate(runner, cache, prompts, greedy(len(prompts)))
    wrong = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = reference_logits(path, prompt + output, scales)[len(prompt) - 1 : -1]
        gap = logits.amax(1) - logits.gather(1, torch.tensor(output)[:, None]).squeeze(1)
        assert gap.max().item() <= tolerance
        wrong += int((gap > 0).sum())
    assert wrong <= 0.3 * sum(map(len, outputs))


def test_auto_takes_a_backend_that_reads_fp8():
    assert resolve("auto", CUDA, BF16, [128], frozenset({"kv_scales"}))[0] is MixedAttention
    with_sinks = frozenset({"kv_scales", "sinks", "sinks and kv_scales"})
    assert resolve("auto", CUDA, BF16, [128], with_sinks)[0] is TritonAttention
