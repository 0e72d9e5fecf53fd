"""FA3 over the paged pool against the torch backend in float32, for random ragged batches."""

from __future__ import annotations

import math
import random

import pytest
import torch
from rig import CUDA

from baton.attention.base import AttentionRow
from baton.attention.fa3 import Fa3Attention, Fa3Metadata
from baton.attention.registry import resolve
from baton.attention.torch_sdpa import TorchAttention
from baton.kvcache.pool import KvLayout, KvPool


def random_rows(rng, page_size, singles, chunks):
    shapes = [(rng.randrange(700), 1) for _ in range(singles)]
    shapes += [(rng.choice([0, rng.randrange(500)]), rng.randrange(2, 300)) for _ in range(chunks)]
    needed = [-(-(start + count) // page_size) + rng.randrange(2) for start, count in shapes]
    free = list(range(sum(needed) + 3))
    rng.shuffle(free)
    rows = [
        AttentionRow(start, count, tuple(free.pop() for _ in range(n)))
        for (start, count), n in zip(shapes, needed, strict=True)
    ]
    return rows, sum(needed) + 3


@pytest.mark.parametrize(("singles", "chunks"), [(17, 0), (0, 5), (9, 4)])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (16, 8, 128), (32, 8, 128), (4, 4, 128)])
def test_equals_the_torch_backend(heads, kv_heads, dim, page_size, singles, chunks):
    rng = random.Random(f"{heads} {page_size} {singles} {chunks}")
    torch.manual_seed(page_size)
    rows, pages = random_rows(rng, page_size, singles, chunks)
    layer = 1
    pools = [
        KvPool(KvLayout(2, kv_heads, dim, page_size, dtype), pages, CUDA)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    # What a sequence has computed is there; what it has not may hold anything finite, and with pages smaller
    # than the kernel's tiles anything at all.
    pools[0].pages.fill_(1e4 if page_size == 128 else math.nan)
    for row in rows:
        for p in range(0, row.start, page_size):
            used = min(page_size, row.start - p)
            pools[0].pages[row.pages[p // page_size], :, :, :used].normal_()
    pools[1].pages.copy_(pools[0].pages)
    total = sum(row.count for row in rows)
    q, k, v = (torch.randn(total, h, dim, device=CUDA).bfloat16() for h in (heads, kv_heads, kv_heads))
    fa3, reference = Fa3Attention(pools[0], heads), TorchAttention(pools[1], heads)
    out, want = torch.full_like(q, math.nan), torch.full_like(q, math.nan, dtype=torch.float32)
    with torch.inference_mode():
        for part in ("single", "chunk"):
            mine = [row for row in rows if (row.count == 1) == (part == "single")]
            if not mine:
                continue
            count = sum(row.count for row in mine)
            at = slice(0, count) if part == "single" else slice(total - count, total)
            for backend, target, dtype in ((fa3, out, torch.bfloat16), (reference, want, torch.float32)):
                backend.prepare(mine)
                backend.forward(layer, *(x[at].to(dtype) for x in (q, k, v)), target[at])
    assert torch.isfinite(out).all()
    assert ((out.float() - want).norm() / want.norm()).item() < 5e-3
    assert (out.float() - want).abs().max().item() < 3e-2
    for row in rows:
        for p in (row.start, row.start + row.count - 1):
            at = row.pages[p // page_size], layer, slice(None), p % page_size
            assert torch.equal(pools[0].pages[at].float(), pools[1].pages[at])


@pytest.mark.parametrize("num_splits", [0, 1])
def test_a_schedule_computed_once_and_a_wide_table_change_nothing(num_splits):
    torch.manual_seed(0)
    pool = KvPool(KvLayout(3, 8, 128, 64, torch.bfloat16), 300, CUDA)
    pool.pages.normal_()
    fa3 = Fa3Attention(pool, 32)
    lengths = torch.randint(1, 2000, (24,), device=CUDA, dtype=torch.int32)
    table = torch.randint(0, 300, (24, 640), device=CUDA, dtype=torch.int32)
    q = torch.randn(24, 48, 128, device=CUDA, dtype=torch.bfloat16)[:, :32]
    out = [torch.full((24, 32, 128), math.nan, device=CUDA, dtype=torch.bfloat16) for _ in range(3)]
    with torch.inference_mode():
        fa3.attend(2, q, out[0], Fa3Metadata(table[:, :32].contiguous(), lengths))
        for result in out[1:]:
            metadata = Fa3Metadata(table, lengths, num_splits=num_splits)
            metadata.schedule = fa3.schedule(metadata)
            for layer in (0, 1, 2):
                fa3.attend(layer, q, result, metadata)
    assert torch.equal(out[1], out[2])
    assert ((out[1] - out[0]).float().norm() / out[0].float().norm()).item() < 3e-3


def test_auto_prefers_it_where_it_works_and_says_why_not():
    assert resolve("auto", CUDA, torch.bfloat16, 128)[0] is Fa3Attention
    backend, reason = resolve("auto", CUDA, torch.float32, 128)
    assert backend is TorchAttention and "not fa3: computes bfloat16" in reason
    assert "heads of 80" in (Fa3Attention.available(CUDA, torch.bfloat16, 80) or "")
