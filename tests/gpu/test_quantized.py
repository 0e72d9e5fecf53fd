"""Quantized weights on a GPU: kernels against float64 of the same weights, engines against a CPU's logits."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from baton.layers.kernels import gemm, gemv, moe_small_batch, quantize, quantized_gemm
from baton.layers.kernels.batch_invariant_matmul import matmul
from baton.layers.kernels.int4_gemm import dequantize
from baton.layers.kernels.moe_align import choose
from baton.layers.kernels.quantized_linear import KernelProduct, project, quantize_for
from baton.layers.linear import Linear
from baton.layers.moe import Experts, Mixture
from baton.layers.moe_routing import MoeGate, Routing
from baton.layers.parameters import Parameters
from baton.layers.quantization.quantized_tensor import QuantizedTensor
from baton.layers.quantization.weight_method import QuantizedWeight, WeightMethod, WeightPlan
from baton.models.fused_mixture import FEW_TOKENS, FusedMixture
from baton.models.loader import load_model, weight_bytes
from quantizers import Scheme, awq, fp8, fp8_blocks, gptq, write
from rig import CUDA, GREEDY, generate, make, prompts_of, reference_logits, save_checkpoint

METHODS = {
    "fp8": WeightMethod(8, floating=True),
    "blocks": WeightMethod(8, 128, floating=True, rows=128),
    "int8": WeightMethod(8),
    "int4-32": WeightMethod(4, 32),
    "int4-64": WeightMethod(4, 64),
    "int4-128": WeightMethod(4, 128),
    "int4-256": WeightMethod(4, 256),
}
EXACT, ROUNDED, ROW_OF_4_BITS = 6e-3, 4e-2, 1.2e-2
"""Relative errors: activations in bfloat16, in 8 bits, and in 8 bits with a scale for 16 columns."""


def made(name, rows, columns):
    """A layer, and float64 what its weight stands for."""
    weight = QuantizedWeight(METHODS[name], rows, columns, CUDA)
    values = torch.randn(rows, columns, device=CUDA) / math.sqrt(columns)
    if name == "blocks":
        scale = torch.rand(-(-rows // 128), -(-columns // 128), device=CUDA) / 1000 + 1e-4
        spread = scale.repeat_interleave(128, 0)[:rows]
        codes = (values * 2000).clamp(-448, 448).to(torch.float8_e4m3fn)
        weight.fill(0, QuantizedTensor(codes, spread, 128))
    else:
        weight.fill(0, values)
    linear = Linear(weight)
    linear.use(KernelProduct, torch.bfloat16)
    return linear, weight.unpacked().dequantize().double()


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("rows", "columns"), [(384, 512), (2560, 3072)])
def test_products_of_any_number_of_rows(name, rows, columns):
    linear, values = made(name, rows, columns)
    for count in (1, 2, 5, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 300):
        x = torch.randn(count, columns, device=CUDA).bfloat16()
        expected = x.double() @ values.t()
        quantized = METHODS[name].bits == 8 and count > 1
        limit = ROUNDED if quantized else ROW_OF_4_BITS if count == 1 and METHODS[name].bits == 4 else EXACT
        assert error(linear(x), expected) < limit, count
        if count <= 256:
            assert error(gemm.project_parts(x, linear).sum(0), expected) < EXACT, count
            gate, up = expected.chunk(2, -1)
            if name != "blocks" or rows % 256 == 0:
                wanted = F.silu(gate) * up
                limit = 1.5 * EXACT if METHODS[name].bits == 4 else EXACT
                assert error(gemm.gated(x, linear, x.dtype), wanted) < limit, count
            if quantized:
                rounded = quantize_for(linear.quantized, x)
                assert error(gemm.project_parts(rounded, linear).sum(0), expected) < ROUNDED, count
                if name != "blocks" or rows % 256 == 0:
                    found = gemm.gated(rounded, linear, x.dtype)
                    assert found is None or error(found, wanted) < 1.5 * ROUNDED, count
        assert error(matmul(x, linear), expected) < EXACT, count
    assert linear(x[:0]).shape == (0, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("group", "rows", "columns"), [(32, 200, 544), (64, 72, 4160), (128, 8320, 384), (32, 80, 32)]
)
def test_products_of_4_bits_of_sizes_that_are_no_tiles(group, rows, columns, dtype):
    """Values may be far from 0 for their group's range, and a group of equal values has next to no scale."""
    weight = QuantizedWeight(WeightMethod(4, group), rows, columns, CUDA)
    values = torch.randn(rows, columns, device=CUDA) / math.sqrt(columns)
    values[3], values[5] = 0.25, values[5] + 1
    weight.fill(0, values)
    exact = weight.unpacked().dequantize().double()
    assert error(exact, values.double()) < 0.13
    assert error(dequantize(weight, torch.float32), exact) < 1e-6
    linear = Linear(weight)
    for count in (2, 5, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256):
        x = torch.randn(count, columns, device=CUDA).to(dtype)
        expected = x.double() @ exact.t()
        bias = torch.randn(rows, device=CUDA).to(dtype)
        assert error(quantized_gemm.project(x, weight, bias), expected + bias.double()) < EXACT, count
        assert error(quantized_gemm.project(x, weight, invariant=True), expected) < EXACT, count
        assert error(gemm.project_parts(x, linear).sum(0), expected) < EXACT, count
        gate, up = expected.chunk(2, -1)
        assert error(gemm.gated(x, linear, x.dtype), F.silu(gate) * up) < 2 * EXACT, count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fp8", "blocks", "int8"])
def test_products_of_many_tokens(name, dtype):
    linear, values = made(name, 2560, 3072)
    bias = torch.randn(2560, device=CUDA).to(dtype)
    for count in (4095, 4096, 4101, 8191):
        x = torch.randn(count, 3072, device=CUDA).to(dtype)
        x *= torch.rand(count, 1, device=CUDA).to(dtype) + 0.1
        expected = x.double() @ values.t()
        for added in (None, bias):
            found = project(x, linear.quantized, added)
            assert found.dtype == dtype
            wanted = expected if added is None else expected + added.double()
            assert error(found, wanted) < ROUNDED, (count, added is None)


@pytest.mark.parametrize("rows", [48, 64, 65, 100, 128])
@pytest.mark.parametrize("name", ["fp8", "blocks", "int8"])
def test_gated_products_stay_in_8_bits(name, rows):
    """Of FP8 with a scale a row by a launch of its own."""
    gate_up, values = made(name, 24576, 512)
    down, more = made(name, 4096, 12288)
    x = torch.randn(rows, 512, device=CUDA).bfloat16()
    gate, up = (x.double() @ values.t()).chunk(2, -1)
    wanted = F.silu(gate) * up
    inner = gemm.gated(quantize_for(gate_up.quantized, x), gate_up, x.dtype, True)
    assert isinstance(inner, torch.Tensor) == (name == "fp8")
    if name == "fp8":
        inner = quantize_for(down.quantized, inner)
    unit = inner.scale if name == "fp8" else inner.scale.repeat_interleave(128, 1)
    assert error(inner.codes.double() * unit, wanted) < 1.5 * ROUNDED
    assert error(gemm.project_parts(inner, down).sum(0), wanted @ more.t()) < 1.5 * ROUNDED


@pytest.mark.parametrize("name", METHODS)
def test_a_row_that_is_normed_gated_and_added(name):
    limit = ROW_OF_4_BITS if METHODS[name].bits == 4 else EXACT
    linear, values = made(name, 512, 1024)
    x, norm = (torch.randn(1, 1024, device=CUDA).bfloat16() for _ in range(2))
    exact = x.double() * torch.rsqrt((x.double() ** 2).mean() + 1e-6) * norm.double()
    gate, up = (exact @ values.t()).chunk(2, -1)
    out = gemv.gemv(x, linear, x.new_empty(1, 256), norm=norm[0], eps=1e-6, gated=True)
    assert error(out, F.silu(gate) * up) < 1.5 * limit
    held = torch.randn(1, 512, device=CUDA).bfloat16()
    expected = held.double() + x.double() @ values.t()
    assert error(gemv.gemv(x, linear, held, add=True), expected) < limit


@pytest.mark.parametrize("name", ["fp8", "int4-64", "int4-128"])
def test_rows_do_not_depend_on_the_batch_in_invariant_products(name):
    linear, _ = made(name, 512, 1024)
    x = torch.randn(300, 1024, device=CUDA).bfloat16()
    whole = matmul(x, linear)
    for count in (1, 16, 65, 299):
        assert torch.equal(matmul(x[:count].contiguous(), linear), whole[:count])


@pytest.mark.parametrize("columns", [128, 576, 4096])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_activations_are_quantized_where_they_are_written(dtype, blocks, columns):
    tolerance = 3e-2

    def check(found, expected):
        unit = found.scale.repeat_interleave(128, 1)[:, :columns] if blocks else found.scale
        assert error(found.codes.float() * unit, expected.double()) < tolerance

    x = torch.randn(70, columns, device=CUDA).bfloat16()
    check(quantize.quantize(x, dtype, blocks), x)
    wide = torch.randn(70, 2 * columns, device=CUDA).bfloat16()
    gate, up = wide.double().chunk(2, -1)
    check(quantize.silu_and_mul(wide, dtype, blocks), F.silu(gate) * up)
    norm, parts = torch.randn(columns, device=CUDA).bfloat16(), torch.randn(2, 70, columns, device=CUDA)
    residual = x.clone()
    total = x.double() + parts.double().sum(0)
    scaled = total * torch.rsqrt((total**2).mean(1, keepdim=True) + 1e-6) * norm.double()
    check(quantize.add_norm(residual, parts, norm, 1e-6, dtype, blocks), scaled)
    assert error(residual, total) < EXACT


def _int8() -> Scheme:
    def store(weight, random):
        kept = QuantizedWeight(WeightMethod(8), *weight.shape, torch.device("cpu"))
        kept.fill(0, weight)
        return {"weight": kept.codes, "weight_scale": kept.scale}, kept.unpacked().dequantize().double()

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    return Scheme({**config, "config_groups": {"group_0": {"weights": weights}}}, store)


SCHEMES = {
    "fp8-tensor": fp8(static=True, rows=False),
    "fp8-rows": fp8(static=False, rows=True),
    "fp8-blocks": fp8_blocks((128, 128)),
    "int8": _int8(),
    "gptq": gptq(symmetric=False),
    "awq": awq(),
}


def assert_greedy(path, prompts, outputs, tolerance, quantization="auto"):
    """Each token is the reference's maximum, or within the tolerance of it."""
    wrong = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = reference_logits(path, prompt + output, quantization=quantization)[len(prompt) - 1 : -1]
        gap = logits.amax(1) - logits.gather(1, torch.tensor(output)[:, None]).squeeze(1)
        wrong += int((gap > 0).sum())
        assert gap.max().item() <= tolerance
    assert wrong <= 0.25 * sum(map(len, outputs))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "graphs") for name in SCHEMES),
        *((name, "invariant") for name in ("fp8-blocks", "int8", "awq")),
        *((name, "plain") for name in ("fp8-rows", "gptq")),
    ],
)
def test_checkpoints_stay_quantized_and_are_greedy(name, kind, tmp_path):
    path = save_checkpoint(tmp_path)
    write(path, None, SCHEMES[name])
    prompts = prompts_of(5, 16, 33, 300, 1, 64, 129, 80)
    params = [dataclasses.replace(GREEDY, max_tokens=24) for _ in prompts]
    page = 128 if kind == "invariant" else 16
    # E4M3 rounds activations by 3 % of their norm, too.
    tolerance = 1.2 if name.startswith("fp8") else 0.8
    runner, cache = make(path, kind, torch.bfloat16, page_size=page)
    assert_greedy(path, prompts, generate(runner, cache, prompts, params), tolerance)
    one, params = prompts_of(40), params[:1]
    runner, cache = make(path, kind, torch.bfloat16, page_size=page)
    assert_greedy(path, one, generate(runner, cache, one, params), tolerance)
    kept = weight_bytes(path, torch.bfloat16, device=CUDA)
    assert kept < 0.8 * weight_bytes(path, torch.bfloat16, device=CUDA, quantization="none")


@pytest.mark.parametrize("name", METHODS)
def test_experts_against_float64(name):
    hidden, inner, count, top_k = 512, 256, 8, 4
    parameters = Parameters(torch.bfloat16, CUDA, plan=WeightPlan(METHODS[name], on_gpu=True))
    experts = Experts(parameters.under("experts"), count, hidden, inner)
    router = MoeGate(parameters, "gate", hidden, count, Routing(top_k))
    router.linear.weight.normal_(0, 0.05)
    values = []
    for weight in experts.merged:
        like, exact = made(name, *weight.shape)
        weight.fill(0, like.quantized.unpacked())
        values.append(exact.view(count, -1, weight.shape[1]))

    def expected(x, weights, chosen):
        out = torch.zeros(len(x), hidden, dtype=torch.float64, device=CUDA)
        for token, (row, own) in enumerate(zip(chosen.tolist(), weights.double(), strict=True)):
            for expert, weight in zip(row, own, strict=True):
                gate, up = (values[0][expert] @ x[token].double()).chunk(2)
                out[token] += weight * (values[1][expert] @ (F.silu(gate) * up))
        return out

    norm = torch.randn(hidden, device=CUDA).bfloat16()
    x = torch.randn(1, hidden, device=CUDA).bfloat16()
    logits = torch.randn(1, count, device=CUDA)
    own, weights, chosen = moe_small_batch.gate_up_one(x, norm, 1e-6, logits, router, experts)
    out = torch.empty_like(x)
    moe_small_batch.down(own, experts, weights, chosen, out)
    exact = x.double() * torch.rsqrt((x.double() ** 2).mean() + 1e-6) * norm.double()
    assert error(out, expected(exact, weights, chosen)) < 1e-2
    mixture = FusedMixture(Mixture(router, experts))
    for tokens in (2, 4, 5, 60, 300, 900):
        x = torch.randn(tokens, hidden, device=CUDA).bfloat16()
        weights, chosen = choose(router, mixture._scores(x))
        sixteen = tokens <= FEW_TOKENS or METHODS[name].bits == 4
        limit = 1e-2 if sixteen else 1.5 * ROUNDED
        assert error(mixture.parts(x).double().sum(0), expected(x, weights, chosen)) < limit, tokens


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "graphs") for name in ("fp8-rows", "fp8-blocks", "int8", "awq", "gptq")),
        *((name, "invariant") for name in ("fp8-blocks", "gptq")),
    ],
)
def test_a_mixture_is_greedy(name, kind, tmp_path):
    """Rounding may change which experts a token uses: then a few tokens lie further off."""
    path = save_checkpoint(tmp_path, **MIXTURE)
    write(path, None, SCHEMES[name])
    page = 128 if kind == "invariant" else 16
    for prompts in (prompts_of(5, 16, 33, 300, 1, 64, 129, 80), prompts_of(40)):
        params = [dataclasses.replace(GREEDY, max_tokens=64) for _ in prompts]
        runner, cache = make(path, kind, torch.bfloat16, page_size=page)
        gaps = []
        for prompt, output in zip(prompts, generate(runner, cache, prompts, params), strict=True):
            logits = reference_logits(path, prompt + output)[len(prompt) - 1 : -1]
            gaps.append(logits.amax(1) - logits.gather(1, torch.tensor(output)[:, None]).squeeze(1))
        assert (torch.cat(gaps) > 1.0).float().mean() < 0.15
    experts = load_model(path, torch.bfloat16, CUDA).layers[1].feed_forward.experts
    assert experts.merged is not None


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_quantizing_while_loading(quantization, tmp_path):
    path = save_checkpoint(tmp_path)
    model = load_model(path, torch.bfloat16, CUDA, quantization=quantization)
    linear = model.layers[1].feed_forward.down
    wanted = load_model(path, torch.bfloat16, CUDA).layers[1].feed_forward.down.weight
    limit = {"fp8": 4e-2, "int8": 1e-2, "int4": 0.12}[quantization]
    assert error(linear.quantized.unpacked().dequantize(), wanted.double()) < limit
    prompts = prompts_of(5, 90)
    params = [dataclasses.replace(GREEDY, max_tokens=16) for _ in prompts]
    runner, cache = make(path, "graphs", torch.bfloat16, quantization=quantization)
    assert all(len(tokens) == 16 for tokens in generate(runner, cache, prompts, params))
