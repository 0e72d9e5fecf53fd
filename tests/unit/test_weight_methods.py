"""Weights that stay quantized in memory on a CPU."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from random_checkpoints import Driver, check_logits, random_prompts, save_checkpoint

from baton.layers.linear import Linear, fastest_product
from baton.layers.quantization import blocks_cpu, cpu, int8_cpu, weight_method
from baton.layers.quantization.cpu import Bf16Int4, Dequantized, InFloat32, exact_products
from baton.layers.quantization.quantized_tensor import QuantizedTensor
from baton.layers.quantization.weight_method import Filling, QuantizedWeight, WeightMethod, quantize
from baton.model_path import CheckpointError
from baton.models.loader import declared, load_model, weight_bytes
from baton.models.weight_plan import describe, weight_plan
from quantizers import awq, compressed, fp8, fp8_blocks, gptq, write

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from make_shape import write_shape

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def made(bits, outputs=96, inputs=128, group=32, seed=0):
    """A weight filled in two parts, and float64 what it stands for."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    quantized = QuantizedWeight(WeightMethod(bits, 0 if bits == 8 else group), outputs, inputs, CPU)
    quantized.fill(0, weight[:33])
    quantized.rows(33, outputs - 33).fill(0, weight[33:])
    return weight, quantized, quantized.unpacked().dequantize().double()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantizing_rounds_to_the_nearest_code(bits):
    weight, quantized, values = made(bits)
    scale = quantized.scale.repeat_interleave(quantized.group, 1)
    if bits == 8:
        assert ((values - weight).abs() <= scale * 0.501).all()
    else:
        zero = quantized.zero.repeat_interleave(quantized.group, 1)
        nearest = (weight.double() / scale + zero).clamp(0, 15)
        assert ((quantized.unpacked().codes - nearest).abs() < 0.501).all()
    assert quantized.nbytes == 96 * 128 * bits // 8 + quantized.scale.nbytes * (2 if bits == 4 else 1)


@pytest.mark.parametrize("stacked", [False, True])
def test_4_bits_lie_in_memory_as_kernels_read_them(stacked):
    columns = torch.arange(64)
    codes = torch.stack((columns % 16, columns // 16)).to(torch.uint8)
    weight = QuantizedWeight(WeightMethod(4, 32), 2, 64, CPU, stacked=stacked)
    weight.fill(0, QuantizedTensor(codes, torch.ones(2, 2), 32, torch.zeros(2, 2)))
    if stacked:
        halves = [(columns.view(-1, 2, 8)[:, half]).flatten() for half in (0, 1)]
    else:
        parts = [
            (32 * b + 2 * i + odd, j) for b in (0, 1) for i in range(4) for odd in (0, 1) for j in (0, 1)
        ]
        halves = [torch.tensor([first + 8 * j + high for first, j in parts]) for high in (0, 16)]
    assert torch.equal(weight.codes & 15, codes[:, halves[0]])
    assert torch.equal(weight.codes >> 4, codes[:, halves[1]])
    assert torch.equal(weight.unpacked().codes, codes)
    assert torch.equal(weight.rows(1, 1).unpacked().codes, codes[1:])


@pytest.mark.parametrize("group", [32, 64])
def test_4_bits_round_less_than_between_the_least_and_the_largest(group):
    weight = torch.randn(200, 512, generator=torch.Generator().manual_seed(0))
    parts = weight.reshape(200, -1, group)
    low, high = parts.amin(2, keepdim=True), parts.amax(2, keepdim=True)
    plain = ((parts - low) / (high - low) * 15).round() / 15 * (high - low) + low
    error = (quantize(weight, 4, group).dequantize() - weight).norm()
    assert error < 0.95 * (plain - parts).norm()


def test_4_bits_of_groups_of_one_value_are_that_value():
    weight = torch.tensor([0.0, 1.5, -3e-3, 1e-20])[:, None].repeat(1, 64)
    torch.testing.assert_close(quantize(weight, 4, 32).dequantize(), weight, rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize("piece", [2**12, 2**21])
def test_4_bits_of_many_matrices_are_those_of_each_alone(piece, monkeypatch):
    """To the bit, in few calls: matrices of several sizes and dtypes, some larger than a piece, some of
    whose columns a rank holds a part."""
    monkeypatch.setattr("baton.layers.quantization.weight_method._PIECE", {"cpu": piece})
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 64), (64, 32), (24, 128), (100, 64)] * 8
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    weights = [each.bfloat16() if index % 3 else each for index, each in enumerate(weights)]
    parts = [(64, 64) if each.shape[1] == 128 else None for each in weights]
    alone, together = (
        [
            QuantizedWeight(WeightMethod(4, 32), len(each), (part or each.shape)[1], CPU)
            for each, part in zip(weights, parts, strict=True)
        ]
        for _ in range(2)
    )
    calls = []
    filling, own = Filling(), weight_method._four_bits
    monkeypatch.setattr(weight_method, "_four_bits", lambda *each: calls.append(1) or own(*each))
    for memory, weight, part in zip(together, weights, parts, strict=True):
        filling.fill(memory, 0, weight[:8], part)
        filling.fill(memory, 8, weight[8:], part)
    filling.finish()
    assert (
        len(calls) == 1 if piece > 2**12 else len(calls) <= 2 * sum(each.numel() for each in weights) / piece
    )
    for memory, other, weight, part in zip(alone, together, weights, parts, strict=True):
        memory.fill(0, weight, part)
        for name in ("codes", "scale", "zero"):
            assert torch.equal(getattr(memory, name), getattr(other, name))


def check_product(product, x, values, tolerance):
    """[rows, in], float64 [out, in]"""
    bias = torch.randn(96).to(x.dtype)
    residual = torch.randn(len(x), 96).to(x.dtype)
    expected = x.double() @ values.t()
    for out, wanted in (
        (product.apply(x, None), expected),
        (product.apply(x, bias), expected + bias.double()),
        (product.add_to(residual.clone(), x, None), expected + residual.double()),
        (product.add_to(residual.clone(), x, bias), expected + bias.double() + residual.double()),
    ):
        assert out.dtype == x.dtype and out.shape == (len(x), 96)
        assert (out.double() - wanted).norm() / wanted.norm() < tolerance, product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_of_4_bits_against_float64(dtype, rows):
    _, quantized, values = made(4)
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = exact_products(quantized, dtype)
    assert type(found[0]) is Dequantized
    for product in found:
        exact = dtype == torch.float32 and not isinstance(product, Bf16Int4)
        check_product(product, x, values, 1e-6 if exact else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 64, 65])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 16), (8, 32)])
def test_products_of_groups_against_float64(bits, group, rows, dtype, monkeypatch):
    """Blocks of outputs are filled up to 128; more rows take the codes in pieces."""
    monkeypatch.setattr(blocks_cpu, "PIECE", 10 * 128)
    quantized = QuantizedWeight(WeightMethod(bits, group), 96, 128, CPU)
    quantized.fill(0, torch.randn(96, 128, generator=torch.Generator().manual_seed(0)))
    values = quantized.unpacked().dequantize().double()
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)).to(dtype)[:, ::2]
    check_product(InFloat32(quantized, dtype), x, values, 1e-6 if dtype == torch.float32 else 5e-3)
    tokens = torch.tensor([95, 0, 7, 0])
    assert torch.equal(quantized.selected(tokens).double(), values[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 64, 65])
def test_products_of_8_bits_against_float64(dtype, rows, monkeypatch):
    """Of fours of rows and the rest, and of more, whose codes are converted in pieces."""
    monkeypatch.setattr(int8_cpu, "PIECE", 10 * 128)
    _, quantized, values = made(8)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)).to(dtype)[:, ::2]
    check_product(InFloat32(quantized, dtype), x, values, 5e-7 if dtype == torch.float32 else 5e-3)


def test_threads_share_a_product_of_8_bits(monkeypatch):
    """To the bit: each output is computed by one."""
    _, quantized, _ = made(8)
    x, product = torch.randn(5, 128), InFloat32(quantized, torch.float32)
    alone, taken = product.apply(x, None), []
    monkeypatch.setattr(int8_cpu, "GRAIN", 5 * 96 * 128 // 3)
    kernel = product._matrix._kernel
    product._matrix._kernel = lambda *each: taken.append((threading.get_ident(), *each[-2:])) or kernel(*each)
    usual = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert torch.equal(product.apply(x, None), alone)
    finally:
        torch.set_num_threads(usual)
    assert sorted(each[1:] for each in taken) == [(0, 32), (32, 64), (64, 96)]
    assert len({each[0] for each in taken}) > 1


def test_rows_of_any_size_and_zeros_keep_their_precision():
    """One that is damaged stays so, for the runner to see."""
    _, quantized, values = made(8)
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([[1e-6], [1.0], [1e6], [0.0], [1.0], [1.0]])
    x[4, 7], x[5, 9] = torch.nan, torch.inf
    expected = x.double() @ values.t()
    product = InFloat32(quantized, torch.float32)
    for rows in (x, x.repeat(11, 1)):
        for out in (product.apply(rows, None), product.add_to(torch.zeros(len(rows), 96), rows, None)):
            for row in range(3):
                assert (out[row] - expected[row]).norm() / expected[row].norm() < 5e-7
            assert (out[3] == 0).all()
            assert not out[4:6].isfinite().any()


def test_8_bits_are_compiled_where_nothing_can_be_kept(monkeypatch):
    """As with a home and an installation that cannot be written."""
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    monkeypatch.setattr(int8_cpu, "_compiled", int8_cpu._compiled.__wrapped__)
    _, quantized, values = made(8)
    check_product(InFloat32(quantized, torch.float32), torch.randn(2, 128), values, 5e-7)


only_avx2 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX2", reason="looked at with AVX2 only"
)


@only_avx2
def test_products_with_4_bits_give_a_row_the_same_bits_beside_any_others():
    _, quantized, _ = made(4, 192, 576)
    x = torch.randn(40, 576, generator=torch.Generator().manual_seed(2))
    product = Bf16Int4(quantized, torch.float32)
    alone = torch.cat([product.apply(row[None], None) for row in x])
    for rows in range(2, 41):
        assert torch.equal(product.apply(x[:rows], None), alone[:rows]), rows


def test_a_product_that_is_not_exact_enough_is_never_chosen(monkeypatch):
    class Wrong(Dequantized):
        def apply(self, x, bias):
            return super().apply(x, bias) * 1.02

    class Missing(Dequantized):
        def __init__(self, weight, dtype):
            raise RuntimeError("not on this processor")

    monkeypatch.setattr(cpu, "FOUR_BITS", (Dequantized, Wrong, Missing))
    assert fastest_product(made(4)[1], torch.float32) is Dequantized


@pytest.mark.parametrize("outputs", [72, 80, 128])
def test_a_product_that_was_tried_with_a_part_takes_the_whole(outputs, monkeypatch):
    """torch's kernel of 4 bits takes numbers of outputs that 16 divides."""
    monkeypatch.setattr("baton.layers.linear.SAMPLE", 64 * 128)
    _, quantized, values = made(4, outputs=outputs)
    product = fastest_product(quantized, torch.float32)(quantized, torch.float32)
    x = torch.randn(2, 128)
    expected = x.double() @ values.t()
    assert (product.apply(x, None) - expected).norm() < 1e-2 * expected.norm()


def test_ranks_that_do_not_measure_compute_with_the_codes():
    """Dequantizing a matrix for each product takes up to a hundred times as long."""
    weight = made(4)[1]
    found = [type(product) for product in exact_products(weight, torch.float32)]
    chosen = fastest_product(weight, torch.float32, measure=False)
    assert chosen is (found[1] if len(found) > 1 else Dequantized)


def taking(ticks):
    class Works(Dequantized):
        def apply(self, x, bias):
            ending = time.thread_time() + ticks * 1e-4
            while time.thread_time() < ending:
                pass
            return super().apply(x, bias)

    return Works


@pytest.mark.parametrize(("times", "chosen"), [((10, 12), 1), ((10, 20), 0), ((10, 8), 1)])
def test_dequantizing_is_chosen_only_where_it_is_much_faster(times, chosen, monkeypatch):
    """So that workers, which measure by themselves, do not differ where it is about as fast."""
    candidates = tuple(taking(each) for each in times)
    monkeypatch.setattr(cpu, "FOUR_BITS", candidates)
    assert fastest_product(made(4)[1], torch.float32) is candidates[chosen]


def test_time_that_other_processes_take_does_not_decide_which_product_is_used(monkeypatch):
    class Waits(Dequantized):
        def apply(self, x, bias):
            time.sleep(0.006)
            return super().apply(x, bias)

    monkeypatch.setattr(cpu, "FOUR_BITS", (taking(20), Waits))
    assert fastest_product(made(4)[1], torch.float32) is Waits


def test_a_linear_layer_gives_up_what_it_was_made_from():
    _, quantized, values = made(8)
    linear = Linear(quantized)
    linear.pack_quantized(Dequantized, torch.float32)
    assert linear.quantized is None
    x = torch.randn(2, 128)
    torch.testing.assert_close(linear(x), (x.double() @ values.t()).float(), rtol=1e-4, atol=1e-4)


def test_blocks_of_q4_1_stay_as_they_are():
    """Their values are a least one and 15 steps from there."""
    codes = torch.randint(0, 16, (8, 4, 32), generator=torch.Generator().manual_seed(0))
    codes[..., 0], codes[..., 1] = 0, 15
    step, least = torch.rand(8, 4, 1) + 0.5, torch.randn(8, 4, 1)
    values = (codes * step + least).flatten(1)
    torch.testing.assert_close(quantize(values, 4, 32).dequantize(), values, rtol=1e-6, atol=1e-5)
    assert torch.equal(quantize(values, 4, 32).codes, codes.flatten(1).to(torch.uint8))


KEPT = {
    "int8": (compressed("int-quantized", num_bits=8, strategy="channel"), 2e-5),
    "int8-packed": (compressed("pack-quantized", num_bits=8, strategy="channel"), 2e-5),
    "gptq": (gptq(symmetric=False), 0.15),
    "awq": (awq(), 0.15),
    "4-bits": (compressed("pack-quantized", num_bits=4, strategy="group", group_size=32), 0.15),
}


@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, variant) for name in KEPT for variant in ("qwen3-bias", "mixtral")] + [("int8", "deepseek-v3")],
)
def test_what_a_checkpoint_has_quantized_stays_so(name, variant, tmp_path):
    scheme, tolerance = KEPT[name]
    model = save_checkpoint(variant, tmp_path)
    write(tmp_path, model, scheme, skip=("layers.0.mlp.down_proj", "layers.0.self_attn.v_proj"))
    check_logits(tmp_path, model, tolerance)
    assert weight_bytes(tmp_path, torch.float32) < 0.7 * weight_bytes(
        tmp_path, torch.float32, quantization="none"
    )


def rounded(model, bits, group, head=()):
    """Quantizes the matrices of a transformers model's layers, and what `head` names."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (".layers." in name and parameter.dim() == 2 and "mlp.gate." not in name) or name in head:
                parameter.copy_(quantize(parameter, bits, group or parameter.shape[1]).dequantize())


@pytest.mark.parametrize("variant", ["smollm", "mistral", "phi3"])
@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 2e-5), ("int4", 0.15)])
def test_quantizing_while_loading(variant, quantization, tolerance, tmp_path):
    model = save_checkpoint(variant, tmp_path)
    rounded(model, *((8, 0) if quantization == "int8" else (4, 32)))
    check_logits(tmp_path, model, tolerance, quantization=quantization)


@only_avx2
def test_decoding_with_4_bits_does_not_depend_on_what_else_is_in_the_batch(tmp_path, monkeypatch):
    """To the bit: rounding to bfloat16 before each product makes differences of 1e-7 ones of 4e-3."""
    monkeypatch.setattr("baton.models.decoder.fastest_product", lambda *_, **__: Bf16Int4)
    save_checkpoint("smollm", tmp_path)
    prompts = random_prompts(33, 40, 36, 44, 38, 7)

    def decoded(*slots):
        driver = Driver(tmp_path, quantization="int4", quantize_head=True)
        tracks = [driver.add(slot, prompts[slot], 24) for slot in slots]
        for track in tracks:
            driver.step([driver.chunk(track, len(track.tokens), sample=True)], [driver.init(track)])
        for _ in range(20):
            driver.step([driver.decode(track) for track in tracks])
        driver.finish()
        return tracks

    for track in decoded(*range(len(prompts))):
        (alone,) = decoded(track.slot)
        assert track.tokens == alone.tokens
        for position, logits in alone.logits.items():
            assert torch.equal(track.logits[position], logits), (track.slot, position)


def test_fp8_is_rounded_while_loading(tmp_path):
    model = save_checkpoint("qwen3-bias", tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.dim() == 2:
                scale = parameter.abs().amax(1, keepdim=True) / 448
                parameter.copy_((parameter / scale).to(torch.float8_e4m3fn).float() * scale)
    check_logits(tmp_path, model, 1e-4, quantization="fp8")


@pytest.mark.parametrize("variant", ["qwen3-bias", "qwen2-tied"])
def test_the_head_is_quantized_by_flag(variant, tmp_path):
    model = save_checkpoint(variant, tmp_path)
    tied = variant.endswith("tied")
    if tied:  # what is looked up stays as it is
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    rounded(model, 8, 0, ("lm_head.weight",))
    check_logits(tmp_path, model, 1e-2, quantization="int8", quantize_head=True)
    small = declared(tmp_path, torch.float32, plan=weight_plan(tmp_path, CPU, "int8"))
    large = weight_bytes(tmp_path, torch.float32, quantization="int8", quantize_head=True)
    head = 160 * 64 + 160 * 4
    assert large - small.weight_bytes == (head if tied else head - 160 * 64 * 4)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_estimate_is_what_is_allocated(quantization, tmp_path, monkeypatch):
    """Of matrices: counted where they are allocated, before they are brought into another layout."""
    save_checkpoint("qwen3-moe", tmp_path)
    monkeypatch.setattr("baton.models.decoder.Decoder.prepare", lambda self: None)
    model = load_model(tmp_path, torch.float32, quantization=quantization)
    held = 0
    for linear in model.parameters.linears:
        weight = linear.quantized if linear.weight is None else linear.weight
        held += weight.nbytes + (0 if linear.bias is None else linear.bias.nbytes)
    for layer in model.layers:
        experts = layer.feed_forward.experts
        held += experts.gate_up.nbytes + experts.down.nbytes
        held += layer.input_norm.weight.nbytes + layer.post_norm.weight.nbytes
        held += layer.attention.qk_norm.nbytes
    held += model.embedding.nbytes + model.norm.weight.nbytes
    # The norms of a layer's heads are one tensor, declared twice.
    assert weight_bytes(tmp_path, torch.float32, quantization=quantization) == held


def test_what_cannot_be_done_is_refused(tmp_path):
    model = save_checkpoint("qwen3-bias", tmp_path)
    for options, words in (
        ({"quantization": "int3"}, "'int3' is not known"),
        ({"quantize_head": True}, "needs --quantization"),
        ({"quantization": "int8", "implementation": "transformers"}, "own families only"),
    ):
        with pytest.raises(CheckpointError, match=words):
            weight_bytes(tmp_path, **options)
        with pytest.raises(CheckpointError, match=words):
            load_model(tmp_path, **options)
    with pytest.raises(CheckpointError, match="Hopper GPUs alone"):
        weight_plan(tmp_path, CUDA, "int8")
    write(tmp_path, model, fp8_blocks((32, 32)))
    with pytest.raises(CheckpointError, match=r"this one has FP8 in blocks of 32 x 32 \(fp8\)"):
        weight_bytes(tmp_path, quantization="int8")


def test_without_kernels_a_gpu_dequantizes_everything(tmp_path):
    model = save_checkpoint("qwen3-bias", tmp_path)
    write(tmp_path, model, awq())
    assert weight_plan(tmp_path, CUDA).method is None
    assert weight_plan(tmp_path, CPU).method == WeightMethod(4, 32)


@pytest.fixture
def hopper(monkeypatch):
    """Plans are made as for a GPU with kernels; nothing is put there."""
    monkeypatch.setattr("baton.models.weight_plan.unsuited", lambda device, dtype: None)


FLOATING = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("scheme", "method"),
    [
        (fp8(static=True, rows=False), WeightMethod(8, floating=True)),
        (fp8(static=False, rows=True), WeightMethod(8, floating=True)),
        (fp8_blocks((128, 128)), WeightMethod(8, 128, floating=True, rows=128)),
        (fp8_blocks((32, 32)), None),
        (compressed("float-quantized", strategy="channel", **FLOATING), WeightMethod(8, floating=True)),
        (
            compressed("float-quantized", strategy="block", block_structure=[128, 128], **FLOATING),
            WeightMethod(8, 128, floating=True, rows=128),
        ),
        (compressed("int-quantized", num_bits=8, strategy="channel"), WeightMethod(8)),
        (gptq(symmetric=False), WeightMethod(4, 32)),
        (gptq(desc_act=True), None),
        (awq(), WeightMethod(4, 32)),
    ],
)
def test_what_stays_quantized_on_a_gpu(scheme, method, hopper, tmp_path):
    save_checkpoint("qwen3-bias", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme.config}))
    plan = weight_plan(tmp_path, CUDA, load_format="dummy")
    assert plan.method == method
    assert plan.on_gpu == (method is not None)
    assert weight_plan(tmp_path, CUDA, "none", load_format="dummy").method is None
    said = describe(tmp_path, CUDA, load_format="dummy")
    assert ("dequantized while loading" in said) == (method is None)


@pytest.mark.parametrize(("quantization", "share"), [("fp8", 0.53), ("int8", 0.53), ("int4", 0.35)])
def test_the_estimate_for_a_gpu_counts_packed_bytes(quantization, share, hopper, tmp_path):
    write_shape("8b", tmp_path)
    options = {"device": CUDA, "load_format": "dummy"}
    layers = 6.95e9
    found = weight_bytes(tmp_path, torch.bfloat16, quantization=quantization, **options)
    plain = weight_bytes(tmp_path, torch.bfloat16, **options)
    assert plain - found > (1 - share) * 2 * layers * 0.99
    with_head = weight_bytes(
        tmp_path, torch.bfloat16, quantization=quantization, quantize_head=True, **options
    )
    assert found - with_head > (1 - share) * 2 * 151936 * 4096 * 0.99


def test_blocks_are_not_kept_across_matrices_that_do_not_end_with_one(hopper, tmp_path):
    """Queries and keys of 4 x 32 and 2 x 32 rows."""
    write_shape("tiny", tmp_path)
    scheme = fp8_blocks((128, 128))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme.config}))
    plan = weight_plan(tmp_path, CUDA, load_format="dummy")
    layer = declared(tmp_path, torch.bfloat16, plan=plan).layers[0]
    assert layer.attention.input.quantized is None
    assert layer.attention.output.quantized.block == layer.feed_forward.gate_up.quantized.block == 128


def test_a_plain_matrix_is_quantized_in_blocks_where_its_memory_has_them():
    """An expert that the checkpoint left plain, or random weights. Rows differ in size, as scales do."""
    weight = torch.randn(200, 272) * torch.logspace(-2, 0, 200)[:, None]
    memory = QuantizedWeight(WeightMethod(8, 128, floating=True, rows=128), 200, 272, torch.device("cpu"))
    memory.fill(0, weight)
    assert memory.scale.shape == (2, 3)
    error = (memory.unpacked().dequantize() - weight).abs()
    assert (error <= weight.abs() / 16 + memory.scale.max() / 512).all()
