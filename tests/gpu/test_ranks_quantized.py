"""Workers of two and four ranks on GPUs whose weights or pages are quantized, or who have whole experts."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_latent import V3
from test_quantized import MIXTURE, SCHEMES
from test_ranks_on_gpus import (
    LENGTHS,
    MODELS,
    SIZES,
    assert_as_near_as_one_rank,
    engine_of,
    in_lockstep,
    pages_of,
    prompts_and_params,
)
from test_runner import greedy

from baton.layers.tensor_parallel import Shard
from baton.models.loader import declared, weight_bytes
from quantizers import write
from rig import CUDA, generate, prompts_of, save_checkpoint

WEIGHTS = {
    "fp8": (MODELS["128"], "fp8"),
    "int8": ({}, "int8"),
    "int4": ({}, "int4"),
    "glm4-moe int8": (MODELS["glm4-moe"], "int8"),
    "fp8-rows": ({}, SCHEMES["fp8-rows"]),
    "fp8-blocks": ({"head_dim": 128}, SCHEMES["fp8-blocks"]),
    "awq": (MODELS["qwen2"], SCHEMES["awq"]),
    "mixture fp8-rows": (MIXTURE, SCHEMES["fp8-rows"]),
    "mixture fp8-blocks": ({**MIXTURE, "head_dim": 128, "moe_intermediate_size": 512}, SCHEMES["fp8-blocks"]),
    "mixture awq": (MIXTURE, SCHEMES["awq"]),
    "deepseek-v3 fp8-rows": (V3, SCHEMES["fp8-rows"]),
}
"""Models, and how their weights are quantized, while loading or in the checkpoint."""


@pytest.mark.parametrize(("place", "size"), SIZES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_every_bit_of_quantized_weights_is_that_of_parts_added_in_one_process(
    tmp_path, monkeypatch, name, place, size
):
    model, how = WEIGHTS[name]
    path = save_checkpoint(tmp_path, **model)
    options = {"quantization": how} if isinstance(how, str) else {}
    if not options:
        write(path, None, how)
    both = [
        weight_bytes(path, torch.bfloat16, device=CUDA, shard=Shard(1, size), quantization=quantization)
        for quantization in (options.get("quantization", "auto"), "none")
    ]
    assert both[0] < 0.8 * both[1], both
    prompts, params = prompts_and_params()
    found = in_lockstep(path, place, monkeypatch, prompts, params, size, **options)
    assert_as_near_as_one_rank(path, prompts, params, found, [0, 2, 3, 5], **options)


def with_scales(path):
    """Of keys and values, for each KV head, which ranks divide."""
    tensors = load_file(path / "model.safetensors")
    model = declared(path)
    for layer in range(len(model.layers)):
        scales = torch.linspace(0.02, 0.07, model.caches[0].heads) * (1 + layer)
        tensors |= {f"model.layers.{layer}.self_attn.{part}_scale": scales.clone() for part in "kv"}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("place", "size"), SIZES)
@pytest.mark.parametrize("name", ["64", "128", "qwen2", "glm4-moe", "gpt-oss"])
def test_every_bit_of_pages_in_fp8_is_that_of_parts_added_in_one_process(
    tmp_path, monkeypatch, name, place, size
):
    path = with_scales(save_checkpoint(tmp_path, **MODELS[name]))
    prompts, params = prompts_and_params()
    options = {"kv_dtype": "fp8_e4m3"}
    found = in_lockstep(path, place, monkeypatch, prompts, params, size, **options)
    assert_as_near_as_one_rank(path, prompts, params, found, [0, 2, 3, 5], **options)


@pytest.mark.parametrize(("place", "size"), SIZES)
def test_float32_tokens_and_pages_in_fp8_are_those_of_one_rank(tmp_path, place, size):
    """Where sums in another order move the last bit, a number may be rounded to its other neighbour."""
    path, prompts = with_scales(save_checkpoint(tmp_path)), prompts_of(*LENGTHS)
    found = {}
    for tp in (1, size):
        with engine_of(path, tp, "float32", place, kv_dtype="fp8_e4m3") as engine:
            tokens = generate(engine.runner, engine.cache, prompts, greedy(len(prompts), 16), budget=128)
            found[tp] = tokens, pages_of(engine)[1:]
    (one, pages), (two, of_ranks) = found[1], found[size]
    assert pages.shape == of_ranks.shape and (pages != 0).float().mean() > 0.1
    share = (pages != of_ranks).float().mean().item()
    different = sum(a != b for a, b in zip(one, two, strict=True))
    print("different bytes", share, "outputs", different)
    assert share < 1e-3 and different <= 1


@pytest.mark.parametrize(("place", "size"), SIZES)
@pytest.mark.parametrize("name", ["glm4-moe", "gpt-oss", "deepseek-v3", "mixture fp8-blocks", "mixture awq"])
def test_every_bit_of_whole_experts_is_that_of_parts_added_in_one_process(
    tmp_path, monkeypatch, name, place, size
):
    model, how = WEIGHTS[name] if name in WEIGHTS else (MODELS[name], None)
    path = save_checkpoint(tmp_path, **model)
    if how is not None:
        write(path, None, how)
    prompts, params = prompts_and_params()
    found = in_lockstep(path, place, monkeypatch, prompts, params, size, ep=True)
    assert_as_near_as_one_rank(path, prompts, params, found, [0, 2, 3, 5])
