"""GGUF files of families with recurrent layers: what llama.cpp's converters change is undone."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGUFWriter
from random_checkpoints import Driver, check_greedy, random_prompts
from test_gguf import filled, same_weights
from test_recurrent_families import VARIANTS, check_logits, save

from baton.gguf_file import GgufFile
from baton.layers.quantization import cpu
from baton.layers.quantization.cpu import Dequantized
from baton.model_path import CheckpointError
from baton.models.config import read_config
from baton.models.gguf_checkpoint import GgufTensors
from baton.models.gguf_family import layers
from gguf_models import write_gguf

_NO_CHUNKS = {"linear_value_head_dim": 32, "linear_key_head_dim": 16}
_NEMOTRON = {"n_group": 1, "topk_group": 1}
FILES = {
    "qwen3-next": ("qwen3-next", "Q8_0", {"mlp_only_layers": []}),
    "qwen3.5": ("qwen3.5", "Q4_1", {"linear_num_value_heads": 6}),
    "qwen3.5-moe": ("qwen3.5-moe", "Q8_0", {"linear_num_value_heads": 6}),
    "lfm2": ("lfm2", "F16", {"conv_bias": False, "block_auto_adjust_ff_dim": False}),
    "lfm2-moe": ("lfm2-moe", "Q8_0", {"routed_scaling_factor": 1.0}),
    "granite4": ("granite4", "BF16", {}),
    "granite4-moe": ("granite4-moe", "Q8_0", {"position_embedding_type": "nope"}),
    "granite4-attention": ("granite4", "Q8_0", {"layer_types": ["attention"] * 4}),
    "nemotron-h": ("nemotron-h", "F32", {"hybrid_override_pattern": "M-M*-M-", **_NEMOTRON}),
    "nemotron-h-moe": ("nemotron-h", "Q8_0", {"hybrid_override_pattern": "MEM*EM", **_NEMOTRON}),
}
"""Name -> variant, type of tensors, options that differ."""
_FIRST = ("qwen3.5", "granite4-moe", "nemotron-h-moe")
_NAMES = [name if name in _FIRST else pytest.param(name, marks=pytest.mark.thorough) for name in FILES]


def written(name, tmp_path, **more):
    variant, kind, options = FILES[name]
    make, overrides = VARIANTS[variant]
    model = save(variant, tmp_path / "plain", {variant: (make, {**overrides, **options, **more})}).float()
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    model.save_pretrained(tmp_path / "rounded")
    return path, model


def answers(path, model, **options):
    driver = Driver(path, **options)
    prompt = random_prompts(70)[0]
    track = driver.add(0, prompt, 16)
    driver.step([driver.chunk(track, 33)], [driver.init(track)])
    driver.step([driver.chunk(track, 37, sample=True)])
    for _ in range(15):
        driver.step([driver.decode(track)])
    again = driver.add(1, track.tokens[:70], 4, cached=track, prefix=64)
    driver.step([driver.chunk(again, 6, sample=True)], [driver.init(again)])
    driver.finish()
    check_greedy(model, prompt, track.tokens[70:])
    for each in (track, again):
        check_logits(model, each)


@pytest.mark.parametrize("name", _NAMES)
def test_weights_and_answers_are_those_of_the_model_that_was_written(name, tmp_path, monkeypatch):
    monkeypatch.setattr("baton.models.gguf_checkpoint.PIECE", 1000)  # several pieces a matrix
    path, model = written(name, tmp_path)
    found, expected = read_config(path), read_config(tmp_path / "rounded")
    for field in ("vocab_size", "num_heads", "num_kv_heads", "head_dim", "context_length", "tied"):
        assert getattr(found, field) == getattr(expected, field), field
    if name != "qwen3-next":  # whose projections are read as Qwen3.5's
        assert found.architecture == expected.architecture
        same_weights(filled(path), filled(tmp_path / "rounded"))
    answers(path, model.double(), quantization="none")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_blocks_stay_so_although_their_heads_are_in_another_order(kind, tmp_path, monkeypatch):
    """Also those whose columns are: by the product that does not round."""
    monkeypatch.setattr(cpu, "FOUR_BITS", (Dequantized,))
    monkeypatch.setitem(FILES, "blocks", ("qwen3.5-moe", kind, {"linear_num_value_heads": 6, **_NO_CHUNKS}))
    path, model = written("blocks", tmp_path)
    kept = GgufTensors(path).quantized()
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj"):
        assert f"model.layers.0.linear_attn.{name}.weight" in kept
    answers(path, model.double())


def test_a_file_of_2025_has_projections_by_key_heads(tmp_path):
    """Of Qwen3-Next: the first converters left them as they were."""
    path, model = written("qwen3-next", tmp_path)
    file, old = GgufFile(path), tmp_path / "old.gguf"
    writer = GGUFWriter(old, "qwen3next")
    for key, value in file.metadata.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            kind = writer.add_array if isinstance(value, list) else writer.add_string
            if isinstance(value, bool):
                kind = writer.add_bool
            elif isinstance(value, int | float):
                kind = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            kind(key, value)
    plain = model.state_dict()
    for name, tensor in file.tensors.items():
        if name.endswith("attn_qkv.weight"):
            layer = name.split(".")[1]
            matrix = plain[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"].float().numpy()
            writer.add_tensor(f"blk.{layer}.ssm_in.weight", matrix)
        elif not name.endswith("attn_gate.weight"):
            writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    answers(old, model.double(), quantization="none")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    path, _ = written("qwen3.5", tmp_path)
    file = GgufFile(path)
    file.metadata["qwen35.nextn_predict_layers"] = 1
    assert layers(file) == 3


def test_what_a_file_says_of_a_layer_is_computed_or_refused(tmp_path, monkeypatch):
    path, _ = written("nemotron-h-moe", tmp_path)
    file = GgufFile(path)
    monkeypatch.setattr("baton.models.config.opened", lambda path: file)
    file.metadata["nemotron_h_moe.moe_latent_size"] = 32
    with pytest.raises(CheckpointError, match="moe_latent_size of NemotronHForCausalLM is not supported"):
        read_config(path)
    del file.metadata["nemotron_h_moe.moe_latent_size"]
    file.metadata["nemotron_h_moe.expert_gating_func"] = 1
    with pytest.raises(CheckpointError, match="expert_gating_func 1 is not supported"):
        read_config(path)
