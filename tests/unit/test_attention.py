"""Attention backends against the definition, over pools of any page size and order."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
import torch

from attention_rows import Row, planned
from baton.attention.fa3 import Fa3Attention, mismatch
from baton.attention.flashinfer_paged import workspace_bytes
from baton.attention.registry import BACKENDS, NoBackend, resolve
from baton.attention.triton_paged import TritonAttention
from baton.config import WorkerConfig
from baton.kvcache.kv_pool import KvLayout, KvPool
from baton.layers.attention import AttentionOptions
from baton.layers.cache_spec import Full, State
from baton.layers.mla import MlaProjections
from baton.worker.model import attention_of

CPU = torch.device("cpu")
ON_CPU = [
    name
    for name, backend in BACKENDS.items()
    if backend.available(CPU) is None and "latent" not in backend.features
]
OF_LATENTS = [
    name
    for name, backend in BACKENDS.items()
    if backend.available(CPU) is None and "latent" in backend.features
]


def expected(q, keys, values, start):
    """q [count, heads, dim]; keys and values [end, kv heads, dim]; in float64, by the definition."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(q.shape[2])
    position = start + torch.arange(q.shape[0])
    scores.masked_fill_(torch.arange(k.shape[0])[None, :] > position[:, None], -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "heads", "kv_heads"), [(1, 4, 4), (4, 6, 2), (16, 8, 1)])
def test_any_mix_of_rows(name, dtype, page_size, heads, kv_heads):
    torch.manual_seed(page_size)
    shapes = [(0, 1), (3, 1), (90, 1), (17, 1), (16, 1), (90, 1), (0, 7), (16, 16), (31, 5), (0, 40), (64, 2)]
    layout = KvLayout(3, kv_heads, 16, page_size, dtype)
    needed = [-(-(start + count) // page_size) for start, count in shapes]
    pool = KvPool(layout, sum(needed) + 5)
    pool.pages.fill_(math.nan)
    free = torch.randperm(pool.num_pages).tolist()
    rows, history = [], []
    layer = 1
    for (start, count), pages in zip(shapes, needed, strict=True):
        row = Row(start, count, tuple(free.pop() for _ in range(pages)))
        k, v = (torch.randn(start, kv_heads, 16).to(dtype) for _ in range(2))
        keys, values = pool.layer(layer)
        for p in range(start):
            keys[row.pages[p // page_size], p % page_size] = k[p]
            values[row.pages[p // page_size], p % page_size] = v[p]
        rows.append(row)
        history.append((k, v))
    backend = BACKENDS[name](pool, heads)
    planned_rows = planned(backend, rows)
    total = sum(row.count for row in rows)
    q, k, v = (torch.randn(total, h, 16).to(dtype) for h in (heads, kv_heads, kv_heads))
    out = torch.full_like(q, math.nan)
    with torch.inference_mode():
        backend.forward(layer, q, k, v, out, planned_rows)
    first = 0
    for row, (old_k, old_v) in zip(rows, history, strict=True):
        at = slice(first, first + row.count)
        want = expected(q[at], torch.cat((old_k, k[at])), torch.cat((old_v, v[at])), row.start)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        assert (out[at].double() - want).abs().max().item() < tolerance, row
        keys, values = pool.layer(layer)
        for i, p in enumerate(range(row.start, row.start + row.count)):
            page, offset = row.pages[p // page_size], p % page_size
            assert torch.equal(keys[page, offset], k[first + i])
            assert torch.equal(values[page, offset], v[first + i])
        first += row.count
        if row.count == 1:  # what lies behind its end in its last page may have been cleared, in all layers
            for of_layer in (*pool.layer(0), *pool.layer(1), *pool.layer(2)):
                of_layer[row.pages[row.start // page_size], row.start % page_size + 1 :] = math.nan
    written = sum(start + count for start, count in shapes) * 2 * kv_heads * 16
    assert int(pool.pages.isfinite().sum()) == written


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX2", reason="looked at with AVX2 only")
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 128)])
@pytest.mark.parametrize(
    "options", [AttentionOptions(), AttentionOptions(window=40), AttentionOptions(softcap=30.0)]
)
def test_a_row_of_one_token_gets_the_same_bits_alone_and_beside_others(
    page_size, heads, kv_heads, dim, options, one_thread
):
    layout = KvLayout(1, kv_heads, dim, page_size, torch.float32)
    lengths = [1, 2, 17, 33, 40, 41, 47, 48, 49, 60, 63, 64, 95, 97, 100, 106, 107, 120, 250, 251, 300]
    needed = [-(-length // page_size) for length in lengths]
    pool = KvPool(layout, sum(needed))
    torch.manual_seed(0)
    pool.pages.copy_(torch.randn(pool.pages.shape))
    free = iter(range(pool.num_pages))
    rows = [
        Row(n - 1, 1, tuple(next(free) for _ in range(pages)))
        for n, pages in zip(lengths, needed, strict=True)
    ]
    backend = BACKENDS["torch"](pool, heads, [options])
    q, k, v = (torch.randn(len(rows), n, dim) for n in (heads, kv_heads, kv_heads))

    def attended(chosen):
        chosen_rows = planned(backend, [rows[i] for i in chosen])
        out = torch.empty(len(chosen), heads, dim)
        with torch.inference_mode():
            backend.forward(0, q[chosen], k[chosen], v[chosen], out, chosen_rows)
        return out

    alone = torch.cat([attended([i]) for i in range(len(rows))])
    for chosen in (list(range(len(rows))), [4, 5, 6, 7, 8], [16, 14, 15], [18, 20, 19]):
        assert torch.equal(attended(chosen), alone[chosen]), chosen


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "options", [AttentionOptions(), AttentionOptions(window=20), AttentionOptions(softcap=30.0)]
)
def test_steps_that_go_on_compute_what_one_prepared_anew_does(page_size, options):
    """Sequences come, go, cross page borders and lengths from which on rows are alone; memory that no
    sequence has written is NaN. One follows another in the same pages, where that one would have gone on."""
    draw, dim, heads, kv_heads, room = random.Random(page_size), 128, 4, 2, 192
    torch.manual_seed(0)
    layout = KvLayout(2, kv_heads, dim, page_size, torch.float32)
    each = -(-room // page_size)
    pool, copy = KvPool(layout, 5 * each), KvPool(layout, 5 * each)

    def begun(place, length):
        own = range(place * each, (place + 1) * each)
        for of_layer in (*pool.layer(0), *pool.layer(1)):
            tokens = torch.randn(each * page_size, kv_heads, dim)
            tokens[length:] = math.nan
            of_layer[own.start : own.stop] = tokens.view(each, page_size, kv_heads, dim)
        return Row(length, 1, tuple(own))

    backend = BACKENDS["torch"](pool, heads, [options] * 2)
    rows = {place: begun(place, length) for place, length in enumerate((3, 30, 60, 110, 122))}
    for step in range(60):
        chosen = [place for place in rows if step % 20 < 10 or draw.random() < 0.8] or [0]
        copy.pages.copy_(pool.pages)
        mine = planned(backend, [rows[place] for place in chosen])
        anew = BACKENDS["torch"](copy, heads, [options] * 2)
        others = planned(anew, [rows[place] for place in chosen])
        for layer in range(2):
            q, k, v = (torch.randn(len(chosen), n, dim) for n in (heads, kv_heads, kv_heads))
            got, want = torch.empty_like(q), torch.empty_like(q)
            with torch.inference_mode():
                backend.forward(layer, q, k, v, got, mine)
                anew.forward(layer, q, k, v, want, others)
            assert got.isfinite().all() and torch.equal(got, want), (step, layer)
        for place in chosen:
            row, chance = rows[place], draw.random()
            if chance < 0.05:
                rows[place] = begun(place, row.start + 1)
            elif chance < 0.9:  # else it is computed again
                rows[place] = replace(row, start=row.start + 1)


@pytest.mark.parametrize("name", OF_LATENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_latents_in_any_mix_of_rows(name, dtype, page_size):
    """In both forms: the plain one by the definition."""
    torch.manual_seed(page_size)
    heads, rank, plain, rotated, value = 3, 64, 16, 8, 20
    keys, values = (torch.randn(heads, n, rank) / 8 for n in (plain, value))
    projections = MlaProjections(keys.to(dtype), values.to(dtype))
    options = AttentionOptions(scale=0.3, latent=projections)
    shapes = [(0, 1), (3, 1), (90, 1), (16, 1), (0, 7), (16, 16), (31, 5), (0, 40), (30, 70), (64, 2)]
    forms = {projections.cheaper_absorbed(n, start + n, plain + rotated) for start, n in shapes if n > 1}
    assert forms == {True, False}
    layout = KvLayout(2, 1, rank + rotated, page_size, dtype, parts=1)
    needed = [-(-(start + count) // page_size) for start, count in shapes]
    pool = KvPool(layout, sum(needed) + 5)
    pool.pages.fill_(math.nan)
    free = torch.randperm(pool.num_pages).tolist()
    rows, history = [], []
    for (start, count), pages in zip(shapes, needed, strict=True):
        row = Row(start, count, tuple(free.pop() for _ in range(pages)))
        latents = torch.randn(start, rank + rotated).to(dtype)
        for p in range(start):
            pool.layer(1)[0][row.pages[p // page_size], p % page_size] = latents[p]
        rows.append(row)
        history.append(latents)
    backend = BACKENDS[name](pool, heads, [options] * 2)
    planned_rows = planned(backend, rows)
    total = sum(row.count for row in rows)
    q, latents = (
        torch.randn(total, n, d).to(dtype) for n, d in ((heads, plain + rotated), (1, rank + rotated))
    )
    out = torch.full((total, heads, value), math.nan, dtype=dtype)
    with torch.inference_mode():
        backend.forward(1, q, latents, latents, out, planned_rows)
    exact = MlaProjections(projections.keys.double(), projections.values.double())
    first = 0
    for row, before in zip(rows, history, strict=True):
        at = slice(first, first + row.count)
        own = torch.cat((before, latents[at, 0])).double()
        scaled = q[at].double() * 0.3 * math.sqrt(plain + rotated)
        want = expected(scaled, *exact.expand(own), row.start)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        assert (out[at].double() - want).abs().max().item() < tolerance, row
        first += row.count


def test_resolve():
    backend, reason = resolve("auto", CPU)
    assert backend.available(CPU) is None and backend.name in reason
    assert resolve("torch", CPU)[0].name == "torch"
    assert resolve("auto", CPU, features=frozenset({"latent", "scale"}))[0].name == "torch-mla"
    with pytest.raises(
        NoBackend, match="'torch' does not work on cpu: does not compute attention with latent"
    ):
        resolve("torch", CPU, features=frozenset({"latent"}))
    with pytest.raises(NoBackend, match="'torch-mla' does not work on cpu: it is for models of latents"):
        resolve("torch-mla", CPU, features=frozenset({"scale"}))
    with pytest.raises(
        NoBackend, match="known are auto, fa3, fa3-fixed, fa3-mla, flashinfer, mixed, torch, torch-mla"
    ):
        resolve("magic", CPU)
    gpus = BACKENDS.keys() - {"torch", "torch-mla"}
    for name in gpus:
        with pytest.raises(NoBackend, match=f"'{name}' does not work on cpu: .*needs an NVIDIA GPU"):
            resolve(name, CPU)


@pytest.mark.parametrize(
    ("head_dims", "features", "chosen", "why"),
    [
        ([128], (), "fa3-fixed", r"fa3-fixed: the best that does not depend on the batch"),
        ([64], (), "triton-fixed", r"\(not fa3-fixed: heads of 64 were measured to depend on the batch"),
        ([64, 128], (), "triton-fixed", r"\(not fa3-fixed: heads of 64 were measured to depend on the batch"),
        ([128], ("window",), "triton-fixed", r"\(not fa3-fixed: does not compute attention with window\)"),
    ],
)
def test_where_one_backend_depends_on_the_batch_another_is_chosen(
    monkeypatch, head_dims, features, chosen, why
):
    """As on a Hopper GPU with all libraries."""
    monkeypatch.setattr(Fa3Attention, "available", lambda *_: None)
    monkeypatch.setattr(TritonAttention, "available", lambda *_: None)
    gpu = torch.device("cuda")
    found = resolve("auto", gpu, torch.bfloat16, head_dims, frozenset(features), invariant=True)
    assert found[0].name == chosen
    assert re.search(why, found[1])
    assert found[0].features >= set(features)
    with pytest.raises(NoBackend, match="no attention backend that does not depend on the batch"):
        resolve("auto", gpu, torch.bfloat16, [128], frozenset({"latent"}), invariant=True)


class Hybrid:
    """A model of attention and recurrent layers."""

    dtype = torch.bfloat16
    attention_options = (AttentionOptions(), AttentionOptions())
    caches = (State(((4, 8),)), Full(heads=2, head_dim=256))


def test_where_pages_have_held_states_nothing_behind_a_rows_end_is_read(monkeypatch):
    """As on a Hopper GPU with all libraries: FlashAttention 3 reads on, and a state's bits may be no number
    in 16 bits. States have no heads whose size matters."""
    monkeypatch.setattr(Fa3Attention, "available", lambda *_: None)
    made_for = {None, 64, 128, 256}
    available = lambda device, dtype=None, size=None: None if size in made_for else f"not of {size}"  # noqa: E731
    monkeypatch.setattr(TritonAttention, "available", available)
    gpu = torch.device("cuda")
    for backend, why in attention_of(WorkerConfig(), Hybrid(), gpu):
        assert (backend.name, why.count("does not compute attention with states")) == ("triton", 2)
    with pytest.raises(NoBackend, match="does not compute attention with states"):
        attention_of(WorkerConfig(decode_attention="fa3"), Hybrid(), gpu)


def test_flashinfers_workspace_holds_the_largest_plan():
    """8 query heads per KV head on 132 multiprocessors: 32 tiles of 33 take 135.3 MB."""
    for heads, kv_heads in ((64, 8), (16, 2)):
        assert 135_300_000 < workspace_bytes(heads, kv_heads, 128, 132) < 145_000_000
    assert workspace_bytes(16, 8, 64, 132) < 20_000_000


def test_versions_that_do_not_go_together_are_named():
    assert mismatch("2.11.0+cu130", "0.4.4") is None
    assert mismatch("2.13.0", "0.4.7") is None
    line = mismatch("2.13.0+cu130", "0.4.4")
    assert line is not None and "0.4.4 is not built for torch 2.13.0+cu130" in line
    assert "pip install sglang-kernel==0.4.8" in line
    assert mismatch("2.12.1", "0.4.4") is None


def test_pool_views_are_of_one_allocation():
    layout = KvLayout(2, 3, 4, 5, torch.bfloat16)
    storage = bytearray(7 * layout.page_bytes + 3)
    pool = KvPool(layout, 7, "cpu", memoryview(storage))
    assert layout.page_bytes == 2 * 5 * layout.bytes_per_token_per_layer == 2 * 2 * 5 * 3 * 4 * 2
    pool.raw.zero_()
    pool.layer(1)[1][4, 2, 1, 3] = 1.5
    assert pool.pages[4, 1, 1, 1, 2, 3].item() == 1.5
    at = ((1 * 2 + 1) * 2 + 1) * 5 * 4 + 2 * 4 + 3
    page = pool.page_bytes(4)
    assert page.nbytes == layout.page_bytes and not page.readonly
    assert torch.frombuffer(page, dtype=torch.bfloat16)[at].item() == 1.5
    assert bytes(page) == bytes(storage[4 * layout.page_bytes : 5 * layout.page_bytes])
    pool.copy_page(4, 0)
    assert bytes(storage[: layout.page_bytes]) == bytes(page)
    with pytest.raises(ValueError, match="8 pages need"):
        KvPool(layout, 8, "cpu", memoryview(storage))
