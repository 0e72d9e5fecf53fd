"""Quantized checkpoints, in their published formats, against transformers on what they stand for."""

from __future__ import annotations

import json

import pytest
import torch
from random_checkpoints import check_logits, save_checkpoint
from safetensors.torch import load_file, save_file

from baton.model_path import CheckpointError
from baton.models.config import read_config
from baton.models.loader import check_tensors, load_model
from baton.models.quantization_config import read_format
from quantizers import Scheme, awq, compressed, fp8, fp8_blocks, gptq, write

GROUPS = {"strategy": "group", "group_size": 32}
SCHEMES: dict[str, Scheme] = {
    "fp8-tensor-static": fp8(static=True, rows=False),
    "fp8-rows-dynamic": fp8(static=False, rows=True),
    "fp8-blocks": fp8_blocks((32, 32)),
    "fp8-uneven-blocks": fp8_blocks((40, 48)),
    "gptq": gptq(),
    "gptq-asymmetric": gptq(symmetric=False),
    "gptq-v2": gptq(symmetric=False, version="gptq_v2"),
    "gptq-desc-act": gptq(desc_act=True, symmetric=False),
    "gptq-8-bits-rows": gptq(8, -1),
    "awq": awq(),
    "ct-fp8-tensor": compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "ct-fp8-channel": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "ct-fp8-blocks": compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]
    ),
    "ct-int8-channel": compressed("int-quantized", num_bits=8, strategy="channel"),
    "ct-int8-asymmetric": compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "ct-4-bits": compressed("pack-quantized", num_bits=4, **GROUPS),
    "ct-4-bits-asymmetric": compressed("pack-quantized", num_bits=4, symmetric=False, **GROUPS),
    "ct-8-bits-packed": compressed("pack-quantized", num_bits=8, **GROUPS),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_equal_transformers_on_the_dequantized_weights(name, tmp_path):
    model = save_checkpoint("qwen3-bias", tmp_path)
    write(tmp_path, model, SCHEMES[name])
    check_logits(tmp_path, model, quantization="none")


@pytest.mark.parametrize("variant", ["deepseek-v3", "qwen3-moe", "phi3", "gemma3", "mixtral"])
def test_experts_latents_and_merged_projections(variant, tmp_path):
    model = save_checkpoint(variant, tmp_path)
    write(tmp_path, model, fp8_blocks((32, 32)))
    check_logits(tmp_path, model, quantization="none")


def quantized(path, scheme):
    write(path, save_checkpoint("llama-yarn", path), scheme)
    return path


def test_codes_without_scales_are_refused(tmp_path):
    path = quantized(tmp_path, SCHEMES["fp8-rows-dynamic"])
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight_scale"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj\.weight is float8_e4m3fn"):
        load_model(path)


def test_a_missing_part_is_named(tmp_path):
    path = quantized(tmp_path, SCHEMES["awq"])
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks tensor model\.layers\.1\.mlp\.up_proj\.scales"):
        load_model(path)


def test_tensors_that_do_not_fit_together_are_named(tmp_path):
    path = quantized(tmp_path, SCHEMES["gptq"])
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.scales"
    tensors[name] = tensors[name][:1].contiguous()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj\.qweight is not as 4 bits in groups of 32 \(gptq\)"):
        load_model(path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "by 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "'gptq' with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:x": {"bits": 8}}}, "different schemes"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "cannot be used"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"a": {}},
            },
            "'nvfp4-pack-quantized'",
        ),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "cannot be used"),
    ],
)
def test_other_schemes_are_refused_by_name(config, words, tmp_path):
    save_checkpoint("llama-yarn", tmp_path)
    (tmp_path / "model.safetensors").unlink()  # before anything is loaded
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, "quantization_config": config}))
    with pytest.raises(CheckpointError, match=words) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_group_that_quantizes_activations_alone_is_left_out(tmp_path):
    path = quantized(tmp_path, SCHEMES["ct-4-bits"])
    stored = json.loads((path / "config.json").read_text())
    groups = stored["quantization_config"]["config_groups"]
    expected = read_format(stored["quantization_config"])
    groups["group_1"] = {"targets": ["re:.*k_proj"], "weights": None, "output_activations": {"num_bits": 8}}
    assert read_format(stored["quantization_config"]) == expected
    (path / "config.json").write_text(json.dumps(stored))
    check_tensors(path)
    del groups["group_0"]
    assert read_format(stored["quantization_config"]) is None


def test_transformers_code_does_not_serve_them(tmp_path):
    path = quantized(tmp_path, SCHEMES["awq"])
    with pytest.raises(CheckpointError, match="'awq' are served by Baton's own families only"):
        read_config(path, implementation="transformers")


def test_a_tensor_of_whole_numbers_is_refused(tmp_path):
    save_checkpoint("llama-yarn", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is int8"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "inner"),
    [
        ("gptq", "quantize_config.json", ""),
        ("awq", "quant_config.json", ""),
        ("fp8-tensor-static", "hf_quant_config.json", "quantization"),
    ],
)
def test_a_scheme_that_stands_in_a_file_of_its_own_is_found(name, file, inner, tmp_path):
    model = save_checkpoint("llama-yarn", tmp_path)
    write(tmp_path, model, SCHEMES[name])
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    del scheme["quant_method"]
    if inner:
        scheme = {
            "producer": {"name": "modelopt"},
            inner: {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        }
    (tmp_path / file).write_text(json.dumps(scheme))
    check_logits(tmp_path, model, quantization="none")


def test_modelopt_is_served_in_fp8_and_refused_by_name_otherwise(tmp_path):
    model = save_checkpoint("llama-yarn", tmp_path)
    write(tmp_path, model, SCHEMES["fp8-tensor-static"])

    def say(**scheme):
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "modelopt", **scheme}
        (tmp_path / "config.json").write_text(json.dumps(config))

    say(quant_algo="FP8")
    check_logits(tmp_path, model, quantization="none")
    say(quant_algo="NVFP4")
    with pytest.raises(CheckpointError, match="'modelopt' with quant_algo 'NVFP4'"):
        read_config(tmp_path)


def test_groups_that_are_not_neighbours_are_not_ignored(tmp_path):
    """Without desc_act transformers' answers would follow g_idx, and the tensor's name says what to do."""
    path = quantized(tmp_path, SCHEMES["gptq-desc-act"])
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = False
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="set desc_act to true"):
        load_model(path)


def test_biases_of_zeros_beside_quantized_matrices_are_left_out(tmp_path):
    model = save_checkpoint("llama-yarn", tmp_path)
    write(tmp_path, model, SCHEMES["gptq"])
    tensors = load_file(tmp_path / "model.safetensors")
    rows = {name: each.shape[1] for name, each in tensors.items() if name.endswith(".qweight")}
    biases = {f"{name.removesuffix('qweight')}bias": torch.zeros(count) for name, count in rows.items()}
    save_file({**tensors, **biases}, tmp_path / "model.safetensors")
    check_logits(tmp_path, model, quantization="none")
    name = next(iter(biases))
    biases[name][3] = 0.5
    save_file({**tensors, **biases}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"unexpected tensor {name}"):
        load_model(tmp_path)
