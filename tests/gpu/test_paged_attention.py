"""Attention kernels over the paged pool against the torch backend in float32, for random ragged batches."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from attention_rows import Row, planned
from baton.attention.base import AttentionRows
from baton.attention.fa3 import Fa3Attention
from baton.attention.mixed import FEW_ROWS, MixedAttention
from baton.attention.registry import BACKENDS, resolve
from baton.attention.torch_sdpa import TorchAttention
from baton.attention.triton_paged import TritonAttention
from baton.kvcache.kv_pool import KvLayout, KvPool
from baton.layers.attention import AttentionOptions
from rig import CUDA

USUAL = (16, 8, 128)
OTHERS = ((8, 2, 64), (32, 8, 128), (16, 2, 128), (40, 1, 64), (4, 4, 128), (6, 2, 64))
PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    *((name, BF16, USUAL, size) for name in ("fa3", "triton", "mixed") for size in PAGES),
    *(
        (name, BF16, shape, size)
        for name in ("fa3", "triton", "mixed")
        for shape in OTHERS
        for size in (16, 64)
    ),
    *(("triton", FP16, shape, 64) for shape in (USUAL, (8, 2, 64))),
    *(("triton", FP32, USUAL, size) for size in (1, 16, 64, 256)),
    *(("triton", FP32, shape, 16) for shape in ((8, 2, 64), (6, 2, 64))),
]
"""Backend, dtype, (heads, kv heads, head_dim), page size. Not all products: kernels compile for each."""


def random_rows(rng, page_size, singles, chunks):
    shapes = [(rng.choice([0, rng.randrange(1, 700)]), 1) for _ in range(singles)]
    shapes += [(rng.choice([0, rng.randrange(500)]), rng.randrange(2, 300)) for _ in range(chunks)]
    needed = [-(-(start + count) // page_size) + rng.randrange(2) for start, count in shapes]
    free = list(range(sum(needed) + 3))
    rng.shuffle(free)
    rows = [
        Row(start, count, tuple(free.pop() for _ in range(n)))
        for (start, count), n in zip(shapes, needed, strict=True)
    ]
    return rows, sum(needed) + 3


@pytest.mark.parametrize(("singles", "chunks"), [(1, 0), (3, 1), (17, 0), (0, 5), (9, 4)])
@pytest.mark.parametrize(("name", "dtype", "shape", "page_size"), CASES)
def test_equals_the_torch_backend(name, dtype, shape, page_size, singles, chunks):
    heads, kv_heads, dim = shape
    rng = random.Random(f"{heads} {page_size} {singles} {chunks}")
    torch.manual_seed(page_size)
    rows, pages = random_rows(rng, page_size, singles, chunks)
    layer = 1
    pools = [
        KvPool(KvLayout(2, kv_heads, dim, page_size, kind), pages, CUDA) for kind in (dtype, torch.float32)
    ]
    # What a sequence has computed is there. What it has not may hold anything; values to FA3 anything finite,
    # unless pages are smaller than its tiles.
    pools[0].pages.fill_(math.nan)
    if name != "triton" and page_size >= 128:
        pools[0].pages[:, :, :, 1] = 1e4
    for row in rows:
        for p in range(0, row.start, page_size):
            used = min(page_size, row.start - p)
            pools[0].pages[row.pages[p // page_size], :, :, :, :used].normal_()
    pools[1].pages.copy_(pools[0].pages)
    total = sum(row.count for row in rows)
    q, k, v = (torch.randn(total, h, dim, device=CUDA).to(dtype) for h in (heads, kv_heads, kv_heads))
    tested, reference = BACKENDS[name](pools[0], heads), TorchAttention(pools[1], heads)
    out, want = torch.full_like(q, math.nan), torch.full_like(q, math.nan, dtype=torch.float32)
    with torch.inference_mode():
        for part in ("single", "chunk"):
            mine = [row for row in rows if (row.count == 1) == (part == "single")]
            if not mine:
                continue
            count = sum(row.count for row in mine)
            at = slice(0, count) if part == "single" else slice(total - count, total)
            for backend, target, kind in ((tested, out, dtype), (reference, want, torch.float32)):
                planned_rows = planned(backend, mine)
                backend.forward(layer, *(x[at].to(kind) for x in (q, k, v)), target[at], planned_rows)
    assert torch.isfinite(out).all()
    relative, largest = {
        BF16: (5e-3, 3e-2),
        FP16: (1e-3, 5e-3),
        FP32: (1e-5, 1e-4),
    }[dtype]
    assert ((out.float() - want).norm() / want.norm()).item() < relative
    assert (out.float() - want).abs().max().item() < largest
    for row in rows:
        for p in (row.start, row.start + row.count - 1):
            at = row.pages[p // page_size], slice(None), layer, slice(None), p % page_size
            assert torch.equal(pools[0].pages[at].float(), pools[1].pages[at])


WINDOWED = [
    *(
        (name, 64, AttentionOptions(scale=scale, window=window, sinks=sinks))
        for name in ("fa3", "triton")
        for scale in (None, 0.2)
        for window in (None, 1, 100, 128)
        for sinks in (None, torch.linspace(-3, 5, 16))
    ),
    *(
        ("triton", dim, AttentionOptions(scale=0.1, window=window, softcap=5.0))
        for dim in (128, 256)
        for window in (None, 77)
    ),
]


@pytest.mark.parametrize(("name", "dim", "option"), WINDOWED)
def test_windows_sinks_scales_and_softcaps(name, dim, option):
    """Against the torch backend in float32."""
    heads, kv_heads, page_size = 16, 4, 128
    torch.manual_seed(7)
    rows, pages = random_rows(random.Random(7), page_size, 9, 4)
    sinks = None if option.sinks is None else option.sinks.to(CUDA, BF16)
    options = [dataclasses.replace(option, sinks=sinks)] * 2
    pools = [KvPool(KvLayout(2, kv_heads, dim, page_size, kind), pages, CUDA) for kind in (BF16, FP32)]
    pools[0].pages.normal_()
    pools[1].pages.copy_(pools[0].pages)
    total = sum(row.count for row in rows)
    q, k, v = (torch.randn(total, h, dim, device=CUDA).to(BF16) for h in (heads, kv_heads, kv_heads))
    tested = BACKENDS[name](pools[0], heads, options)
    reference = TorchAttention(pools[1], heads, options)
    out, want = torch.full_like(q, math.nan), torch.full_like(q, math.nan, dtype=FP32)
    with torch.inference_mode():
        for mine, at in ((rows[:9], slice(0, 9)), (rows[9:], slice(9, total))):
            for backend, target, kind in ((tested, out, BF16), (reference, want, FP32)):
                planned_rows = planned(backend, mine)
                backend.forward(1, *(x[at].to(kind) for x in (q, k, v)), target[at], planned_rows)
    assert ((out.float() - want).norm() / want.norm()).item() < 6e-3


@pytest.mark.parametrize("name", ["triton", "fa3"])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [16, 32])
def test_long_rows(name, rows, heads):
    """Few rows of very different lengths, up to 32k keys; again and again, with the same result each time."""
    torch.manual_seed(rows)
    pool = KvPool(KvLayout(2, 8, 128, 64, BF16), 520 * rows, CUDA)
    pool.pages.normal_()
    backend = BACKENDS[name](pool, heads)
    table = torch.randperm(520 * rows, device=CUDA, dtype=torch.int32).view(rows, 520)
    q = torch.randn(rows, heads + 16, 128, device=CUDA, dtype=BF16)[:, :heads]
    for longest in (129, 1024, 4097, 33000):
        lengths = torch.tensor([max(1, longest // 3**i) for i in range(rows)], device=CUDA, dtype=torch.int32)
        paged = AttentionRows(None, tables=(table,), lengths=lengths)
        backend.plan(paged)
        results = [torch.full((rows, heads, 128), math.nan, device=CUDA, dtype=BF16) for _ in range(3)]
        with torch.inference_mode():
            for result in results:
                backend.attend(0, q, result, paged)
                backend.attend(1, q, result, paged)
        for row, length in enumerate(lengths.tolist()):
            used = table[row, : -(-length // 64)].long()
            keys, values = (x[used].flatten(0, 1)[:length].float() for x in pool.layer(1))
            keys, values = (x.repeat_interleave(heads // 8, 1) for x in (keys, values))
            weights = (torch.einsum("hd,khd->hk", q[row].float(), keys) / 128**0.5).softmax(-1)
            want = torch.einsum("hk,khd->hd", weights, values)
            assert ((results[0][row].float() - want).norm() / want.norm()).item() < 6e-3, (longest, row)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", ["fa3", "triton", "mixed"])
@pytest.mark.parametrize("rows", [1, 24])
def test_a_plan_made_once_and_a_wide_table_change_nothing(name, rows):
    torch.manual_seed(0)
    pool = KvPool(KvLayout(3, 8, 128, 64, BF16), 300, CUDA)
    pool.pages.normal_()
    backend = BACKENDS[name](pool, 32)
    lengths = torch.randint(1, 2000, (rows,), device=CUDA, dtype=torch.int32)
    table = torch.randint(0, 300, (rows, 640), device=CUDA, dtype=torch.int32)
    q = torch.randn(rows, 48, 128, device=CUDA, dtype=BF16)[:, :32]
    out = [torch.full((rows, 32, 128), math.nan, device=CUDA, dtype=BF16) for _ in range(3)]
    with torch.inference_mode():
        narrow, wide = (
            AttentionRows(None, tables=(part,), lengths=lengths)
            for part in (table[:, :32].contiguous(), table)
        )
        backend.plan(narrow)
        backend.attend(2, q, out[0], narrow)
        backend.plan(wide)
        for result in out[1:]:
            for layer in (0, 1, 2):
                backend.attend(layer, q, result, wide)
    assert torch.equal(out[1], out[2])
    assert ((out[1] - out[0]).float().norm() / out[0].float().norm()).item() < 3e-3


def test_mixed_takes_the_triton_kernel_for_few_rows_alone():
    pool = KvPool(KvLayout(1, 2, 64, 16, BF16), 40, CUDA)
    pool.pages.normal_()
    mixed, parts = MixedAttention(pool, 8), (TritonAttention(pool, 8), Fa3Attention(pool, 8))
    for rows, expected in ((1, 0), (FEW_ROWS, 0), (FEW_ROWS + 1, 1)):
        q = torch.randn(rows, 8, 64, device=CUDA, dtype=BF16)
        table = torch.arange(40, device=CUDA, dtype=torch.int32)[None].expand(rows, 40).contiguous()
        out = []
        for backend in (mixed, *parts):
            lengths = torch.full((rows,), 500, device=CUDA, dtype=torch.int32)
            paged = AttentionRows(None, tables=(table,), lengths=lengths)
            backend.plan(paged)
            out.append(torch.empty_like(q))
            backend.attend(0, q, out[-1], paged)
        assert torch.equal(out[0], out[1 + expected])
        assert not torch.equal(out[1], out[2])


def test_auto_prefers_what_works_and_says_why_not():
    assert resolve("auto", CUDA, BF16, [128])[0] is MixedAttention
    assert resolve("auto", CUDA, BF16, [96])[0] is Fa3Attention
    backend, reason = resolve("auto", CUDA, torch.float32, [128])
    assert backend is TritonAttention and "not fa3: computes bfloat16" in reason
    backend, reason = resolve("auto", CUDA, torch.float32, [80])
    assert backend is TorchAttention and "heads of 80" in reason
