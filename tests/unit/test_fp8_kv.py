"""The KV pool in FP8: what is written and read, the scales of checkpoints, layouts that differ."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from random_checkpoints import save_checkpoint
from safetensors.torch import save_file

from attention_rows import Row, planned
from baton.attention.fp8 import E4M3, dequantize, quantize
from baton.attention.registry import NoBackend, resolve
from baton.attention.torch_sdpa import TorchAttention
from baton.config import WorkerConfig
from baton.kvcache.kv_pool import KvLayout, KvPool
from baton.layers.attention import AttentionOptions
from baton.model_path import CheckpointError
from baton.models.config import ModelError
from baton.models.kv_scales import is_kv_scale, read_kv_scales
from baton.models.quantization_config import read_format
from baton.rpc.address import new_incarnation
from baton.rpc.errors import BatonError
from baton.v1 import common_pb2
from baton.worker.convert import layout_difference
from baton.worker.engine import build_engine

CPU = torch.device("cpu")
# No multiple of these lies in the middle between two numbers of e4m3.
SCALES = torch.tensor([[0.37, 0.0217], [0.113, 2.93]])
HEADS, KV_HEADS, DIM = 4, 2, 16


def rounded(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Nearest multiples of the scales that e4m3 has, from a list of all its numbers."""
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
    numbers = numbers[numbers.isfinite()]
    codes = (x.double() / scales.double()[:, None])[..., None]
    return numbers[(codes - numbers).abs().argmin(-1)] * scales.double()[:, None]


def test_codes_are_the_nearest_numbers_and_never_nan():
    torch.manual_seed(0)
    x = torch.randn(50, KV_HEADS, DIM) * 10
    x[0, 1] = 1e6
    x[1, 1] = -1e6
    x[2] = 1e-4
    found = dequantize(quantize(x, SCALES[0]), SCALES[0][:, None], torch.float32)
    torch.testing.assert_close(found.double(), rounded(x, SCALES[0]), rtol=1e-6, atol=0)
    assert found[0, 1, 0].item() == pytest.approx(448 * 0.0217) and found.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
def test_attention_over_what_was_rounded(dtype, window):
    """Chunks and rows of one token, pages in any order: equal to attention over rounded keys and values."""
    torch.manual_seed(3)
    size, layer = 4, 1
    lengths, cuts = (3, 30, 17, 30), (0, 12, 0, 29)
    pool = KvPool(KvLayout(2, KV_HEADS, DIM, size, E4M3), 30)
    pool.raw.fill_(0x7F)  # NaN
    options = [AttentionOptions(window=window, kv_scales=scales) for scales in (SCALES.flip(0), SCALES)]
    backend = TorchAttention(pool, HEADS, options)
    free = torch.randperm(30).tolist()
    pages = [tuple(free.pop() for _ in range(-(-n // size))) for n in lengths]
    q, k, v = (torch.randn(4, 30, h, DIM).to(dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
    outs = [torch.full((n, HEADS, DIM), math.nan, dtype=dtype) for n in lengths]

    def step(ranges):
        rows = sorted(
            ((i, a, b) for i, (a, b) in enumerate(ranges) if b > a), key=lambda each: each[2] - each[1] > 1
        )
        mine = planned(backend, [Row(a, b - a, pages[i]) for i, a, b in rows])
        of_rows = (torch.cat([part[i, a:b] for i, a, b in rows]) for part in (q, k, v))
        out = torch.full((sum(b - a for _, a, b in rows), HEADS, DIM), math.nan, dtype=dtype)
        backend.forward(layer, *of_rows, out, mine)
        for i, a, b in rows:
            outs[i][a:b], out = out[: b - a], out[b - a :]

    with torch.inference_mode():
        step([(0, cut) for cut in cuts])
        step([(cut, length - 1) for cut, length in zip(cuts, lengths, strict=True)])
        step([(length - 1, length) for length in lengths])
    for i, length in enumerate(lengths):
        keys, values = (
            rounded(part[i, :length], by).repeat_interleave(2, 1)
            for part, by in zip((k, v), SCALES, strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", q[i, :length].double(), keys) / DIM**0.5
        distance = torch.arange(length)[:, None] - torch.arange(length)
        scores.masked_fill_((distance < 0) | (distance >= (window or 99)), -math.inf)
        want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        assert (outs[i].double() - want).abs().max().item() < tolerance, i
    used = pool.layer(layer)[0].view(torch.uint8)[list(pages[0])].flatten(0, 1)[: lengths[0]]
    assert torch.equal(used, quantize(k[0, : lengths[0]], SCALES[0]))


def test_a_backend_without_it_is_never_chosen():
    with pytest.raises(NoBackend, match=r"torch-mla.*kv_scales"):
        resolve("torch-mla", CPU, features=frozenset({"kv_scales"}))
    assert resolve("auto", CPU, features=frozenset({"kv_scales"}))[0] is TorchAttention


def test_scales_of_checkpoints(tmp_path):
    """By the names of vLLM, ModelOpt and compressed-tensors; one for a layer, or one for each head."""
    attention = "model.layers.{}.self_attn."
    tensors = {
        attention.format(0) + "k_scale": torch.tensor(0.25),
        attention.format(0) + "v_scale": torch.tensor([0.5]),
        attention.format(1) + "k_proj.k_scale": torch.tensor([1.0, 2.0]),
        attention.format(1) + "v_proj.output_scale": torch.tensor([[3.0], [4.0]]),
        attention.format(3) + "kv_scale": torch.tensor(0.125),
    }
    weights = {attention.format(0) + "k_proj.weight_scale": torch.tensor(9.0)}
    save_file(tensors | weights, tmp_path / "model.safetensors")
    assert all(is_kv_scale(name) for name in tensors) and not any(is_kv_scale(name) for name in weights)
    found = read_kv_scales(tmp_path, 4, 2)
    assert found[0].tolist() == [[0.25, 0.25], [0.5, 0.5]] and found[1].tolist() == [[1, 2], [3, 4]]
    assert found[2].tolist() == [[1, 1], [1, 1]] and (found[3] == 0.125).all()
    with pytest.raises(ModelError, match=r"layers.3.self_attn.kv_scale has shape"):
        read_kv_scales(tmp_path, 3, 2)
    with pytest.raises(ModelError, match=r"k_proj.k_scale has shape \[2\]"):
        read_kv_scales(tmp_path, 4, 8)
    save_file({attention.format(0) + "k_scale": torch.tensor(-1.0)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="not positive"):
        read_kv_scales(tmp_path, 4, 2)


def test_peers_with_other_dtypes_or_scales_are_refused():
    def layout(dtype: str, scales: str) -> common_pb2.Layout:
        return common_pb2.Layout(groups=[common_pb2.KvGroup(dtype=dtype, scales=scales)])

    ours = layout("float8_e4m3fn", "ab")
    assert layout_difference(layout("float8_e4m3fn", "ab"), ours) is None
    other = layout_difference(ours, layout("bfloat16", ""))
    assert (
        other is not None and "groups[0].dtype is float8_e4m3fn at the prefill node and bfloat16 at" in other
    )
    other = layout_difference(ours, layout("float8_e4m3fn", "cd"))
    assert other is not None and "groups[0].scales is ab at the prefill node and cd at" in other


def test_a_dtype_that_is_not_known_is_refused_before_anything_is_loaded():
    config = WorkerConfig(model="demo", device="cpu", kv_dtype="int8")
    with pytest.raises(BatonError, match="--kv-dtype 'int8' is not known; use auto, fp8_e4m3"):
        build_engine(config, new_incarnation())


@pytest.mark.parametrize("tp", [1, 2])
def test_latents_are_refused_before_anything_is_loaded(tmp_path, tp):
    save_checkpoint("deepseek-v3", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    config = WorkerConfig(model=str(tmp_path), device="cpu", kv_dtype="fp8_e4m3", tp=tp)
    with pytest.raises(BatonError, match="pages of latents are kept in the model's dtype only"):
        build_engine(config, new_incarnation())


def test_half_a_page_and_a_layout_that_says_so():
    config = WorkerConfig(model="demo", device="cpu", dtype="bfloat16", kv_tokens=256)
    engines = [
        build_engine(replace(config, kv_dtype=kind), new_incarnation()) for kind in ("auto", "fp8_e4m3")
    ]
    try:
        plain, halved = (engine.pool.layout for engine in engines)
        assert plain.page_bytes == 2 * halved.page_bytes
        (group,) = engines[1].layout.groups
        assert group.dtype == "float8_e4m3fn" and len(group.scales) == 16
        assert engines[0].layout.groups[0].scales == ""
    finally:
        for engine in engines:
            engine.close()


def test_a_checkpoint_that_quantizes_its_kv_cache_alone_has_plain_weights():
    config = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}
    assert read_format(config) is None
    with pytest.raises(CheckpointError, match="0 different schemes"):
        read_format({**config, "kv_cache_scheme": None})
