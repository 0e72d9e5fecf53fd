"""Families with recurrent layers from checkpoints as they are published: inside a wrapper, quantized in part,
with experts in one tensor, beside layers that predict further tokens and a vision tower."""

from __future__ import annotations

import json

import pytest
import torch
from random_checkpoints import _SMALL, Driver, check_greedy, random_prompts
from safetensors.torch import load_file, save_file
from test_recurrent_families import VARIANTS, check_logits, is_minus_one, save
from transformers import AutoModelForImageTextToText, Qwen3_5Config, Qwen3_5MoeConfig

from baton.layers.quantization import cpu
from baton.layers.quantization.cpu import Dequantized
from baton.model_path import CheckpointError
from baton.models.config import read_config
from baton.models.loader import check_tensors, weight_bytes
from quantizers import Scheme, awq, compressed, fp8, fp8_blocks, gptq, write

_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_WRAPPERS = {"qwen3.5": Qwen3_5Config, "qwen3.5-moe": Qwen3_5MoeConfig}
_GATES = ("lm_head", "visual", "mtp", "in_proj_a", "in_proj_b", "shared_expert_gate")
"""What nobody quantizes; in_proj_b is in_proj_ba's beginning, too."""
_BUT_EXPERTS = {"-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}}


def wrapped(variant, path):
    """Inside the wrapper that is published, with a vision tower and layers that predict further tokens."""
    _, overrides = VARIANTS[variant]
    text = {**_SMALL, **overrides, "tie_word_embeddings": False}
    torch.manual_seed(3)
    config = _WRAPPERS[variant](text_config=text, vision_config=_VISION)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0, 0.3)
                parameter += "norm" in name and not is_minus_one(name)
            else:
                parameter.normal_(0.0, 1 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    add(path, {"mtp.fc.weight": torch.zeros(64, 128), "mtp.layers.0.input_layernorm.weight": torch.zeros(64)})
    return model


def add(path, tensors):
    file = path / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


def make(variant, path):
    return wrapped(variant, path) if variant in _WRAPPERS else save(variant, path).float()


def said(scheme, **more):
    return Scheme({**scheme.config, **more}, scheme.quantize)


PUBLISHED = {
    "qwen3.5-fp8": (
        "qwen3.5",
        said(fp8_blocks((32, 32)), fmt="e4m3", modules_to_not_convert=["lm_head", "model.visual.merger"]),
        _GATES,
    ),
    "qwen3.5-moe-fp8": ("qwen3.5-moe", fp8_blocks((32, 32)), _GATES),
    "qwen3-next-fp8": ("qwen3-next", fp8_blocks((40, 48)), _GATES),
    "qwen3.5-moe-gptq": (
        "qwen3.5-moe",
        said(gptq(), dynamic={"lm_head": {}, "model.language_model.embed_tokens": {}, **_BUT_EXPERTS}),
        ("attn", "shared_expert", *_GATES),
    ),
    "qwen3.5-gptq-everywhere": ("qwen3.5", said(gptq(), dynamic={"+:.*down.*": {"bits": 4}}), _GATES),
    "qwen3-next-gptq": ("qwen3-next", gptq(symmetric=False), _GATES),
    "qwen3.5-awq": ("qwen3.5", said(awq(), modules_to_not_convert=["linear_attn"]), ("linear_attn", *_GATES)),
    "qwen3-next-awq": ("qwen3-next", awq(), _GATES),
    "qwen3.5-moe-ct": (
        "qwen3.5-moe",
        said(
            compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
            ignore=[
                "re:.*linear_attn.*",
                "re:.*shared_expert.*",
                "re:.*visual.*",
                "re:.*mtp.*",
                "re:.*gate$",
                "lm_head",
            ],
        ),
        ("linear_attn", "shared_expert", *_GATES),
    ),
    "qwen3-next-ct-fp8": (
        "qwen3-next",
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        _GATES,
    ),
    "qwen3.5-auto-round": (
        "qwen3.5",
        Scheme(
            {
                **{"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4},
                **{"group_size": 32, "sym": True, "data_type": "int"},
                "extra_config": {"model.language_model.layers.0.linear_attn.in_proj_a": {"bits": 16}},
            },
            gptq().quantize,
        ),
        _GATES,
    ),
    "qwen3-next-auto-round-awq": (
        "qwen3-next",
        Scheme(
            {
                **{"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4},
                **{"group_size": 32, "sym": False},
            },
            awq().quantize,
        ),
        _GATES,
    ),
    "lfm2-moe-awq": ("lfm2-moe", awq(), ("feed_forward.gate", *_GATES)),
    "granite4-fp8": ("granite4", fp8_blocks((32, 32)), _GATES),
    "nemotron-h-fp8": ("nemotron-h", fp8(static=True, rows=False), ("mixer.gate", "conv1d", *_GATES)),
}
"""Name -> variant, scheme, parts of the names of what is not quantized."""
_FIRST = ("qwen3.5-fp8", "qwen3.5-moe-gptq", "qwen3-next-awq")
_NAMES = [name if name in _FIRST else pytest.param(name, marks=pytest.mark.thorough) for name in PUBLISHED]


def answers(path, model, **options):
    """A prompt in chunks, its answer, and a second prompt behind the cached beginning of the first."""
    driver = Driver(path, **options)
    prompt = random_prompts(70)[0]
    track = driver.add(0, prompt, 12)
    driver.step([driver.chunk(track, 33)], [driver.init(track)])
    driver.step([driver.chunk(track, 37, sample=True)])
    for _ in range(11):
        driver.step([driver.decode(track)])
    driver.finish()
    check_greedy(model, prompt, track.tokens[70:])
    again = driver.add(1, track.tokens[:75], 4, cached=track, prefix=64)
    driver.step([driver.chunk(again, 11, sample=True)], [driver.init(again)])
    driver.finish()
    assert again.tokens == track.tokens[:76]
    for each in (track, again):
        check_logits(model, each)


@pytest.mark.parametrize("name", _NAMES)
def test_a_published_quantized_checkpoint_answers_as_the_weights_that_it_stands_for(name, tmp_path):
    variant, scheme, skip = PUBLISHED[name]
    model = make(variant, tmp_path)
    write(tmp_path, model, scheme, skip)
    if variant in _WRAPPERS:
        codes = torch.zeros(64, 64, dtype=torch.float8_e4m3fn)
        scale = torch.ones(2, 2, dtype=torch.bfloat16)
        name = "mtp.layers.0.self_attn.o_proj.weight"
        add(tmp_path, {name: codes, f"{name}_scale_inv": scale})
        assert check_tensors(tmp_path) == ["mtp"]
    model.set_experts_implementation("eager")
    answers(tmp_path, model.double(), quantization="none")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3.5-moe-gptq", "qwen3-next-awq", "qwen3.5-moe-ct"])
def test_what_is_quantized_stays_so_beside_what_is_not(name, tmp_path, monkeypatch):
    """By the product that does not round."""
    monkeypatch.setattr(cpu, "FOUR_BITS", (Dequantized,))
    variant, scheme, skip = PUBLISHED[name]
    model = make(variant, tmp_path)
    write(tmp_path, model, scheme, skip)
    whole = weight_bytes(tmp_path, torch.float32, quantization="none")
    assert weight_bytes(tmp_path, torch.float32) < 0.8 * whole
    model.set_experts_implementation("eager")
    answers(tmp_path, model.double())


@pytest.mark.parametrize("quantized", [False, True])
def test_experts_in_one_tensor_beside_what_is_quantized(quantized, tmp_path):
    """As Qwen3.5's are published, and as programs leave them that do not know them."""
    model = make("qwen3.5-moe", tmp_path)
    if quantized:
        scheme = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
        write(tmp_path, model, scheme, ("experts", *_GATES))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(4):
        base = f"model.language_model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([tensors.pop(f"{base}.{expert}.{part}_proj.weight") for expert in range(8)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{base}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        tensors[f"{base}.down_proj"] = parts["down"]
    save_file(tensors, file, {"format": "pt"})
    model.set_experts_implementation("eager")
    answers(tmp_path, model.double(), quantization="none")


def test_a_scheme_in_the_configuration_of_the_text_is_found(tmp_path):
    variant, scheme, skip = PUBLISHED["qwen3.5-fp8"]
    model = make(variant, tmp_path)
    write(tmp_path, model, scheme, skip)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    answers(tmp_path, model.double(), quantization="none")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*lm_head$": {"bits": 8}}}, "different schemes"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {".*down.*": {"group_size": 32}}}, "different schem"),
        (
            {
                **{"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4},
                "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}},
            },
            "'auto-round' with different schemes",
        ),
        ({"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4}, "llm_com"),
        ({"quant_method": "auto-round", "bits": 2, "packing_format": "auto_round:auto_gptq"}, "with 2 bits"),
    ],
)
def test_schemes_that_differ_among_layers_are_refused_by_name(config, words, tmp_path):
    save("qwen3.5", tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, "quantization_config": config}))
    with pytest.raises(CheckpointError, match=words) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)
