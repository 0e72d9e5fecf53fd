"""Models by transformers' own code over paged attention."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from random_checkpoints import (
    VARIANTS,
    Driver,
    check_greedy,
    largest_difference,
    random_prompts,
    save_checkpoint,
)
from safetensors.torch import load_file, save_file
from transformers import Gemma4TextConfig, LlamaConfig

from baton.attention.torch_sdpa import TorchAttention
from baton.layers.mlp import ACTIVATIONS
from baton.models import transformers_backend
from baton.models.config import ModelError, read_config
from baton.models.loader import cache_specs, check_tensors, load_model
from baton.models.registry import FAMILIES
from baton.worker.attention_check import check_attention
from baton.worker.model import kv_layout
from transformers_architectures import ARCHITECTURES

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_greedy_tokens_equal_generate(tmp_path, name):
    model = save_checkpoint(name, tmp_path, variants=ARCHITECTURES)
    config = read_config(tmp_path, implementation="transformers")
    assert config.implementation == "transformers"
    driver = Driver(tmp_path, implementation="transformers")
    check(model, driver)
    assert list(cache_specs(config)) == driver.model.caches  # as `baton doctor` tells it, without weights


def check(model, driver):
    prompts = random_prompts(3, 23, 40, 33)
    for track, prompt in zip(run(driver, prompts, 32), prompts, strict=True):
        assert largest_difference(model, track) < 1e-4
        check_greedy(model, prompt, track.tokens[len(prompt) :])


def run(driver, prompts, outputs):
    """The prompts in two chunks each, then decode rows."""
    tracks = [driver.add(slot, prompt, outputs) for slot, prompt in enumerate(prompts)]
    driver.step([driver.chunk(track, 2) for track in tracks], [driver.init(track) for track in tracks])
    driver.step([driver.chunk(track, len(track.tokens) - 2, sample=True) for track in tracks])
    for _ in range(outputs - 1):
        driver.step([driver.decode(track) for track in tracks])
    driver.finish()
    return tracks


@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        "qwen2-window",
        "qwen3",
        "mistral-window",
        "qwen3-moe",
        "mixtral",
        "phi3",
        "gemma3",
        "gpt-oss",
        "glm4-moe",
        "deepseek-v2",
        "deepseek-v3",
    ],
)
def test_our_families_equal_it(tmp_path, name):
    save_checkpoint(name, tmp_path)
    assert read_config(tmp_path).implementation == "baton"
    prompts = random_prompts(3, 40)
    ours, theirs = (
        run(Driver(tmp_path, implementation=which), prompts, 12) for which in ("baton", "transformers")
    )
    for one, other in zip(ours, theirs, strict=True):
        assert len(one.logits) == 12
        for at, logits in one.logits.items():
            assert (logits - other.logits[at]).abs().max().item() < 1e-4
        assert one.tokens == other.tokens


def test_the_family_that_the_documentation_adds(tmp_path, monkeypatch):
    """docs/models.md"""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    family = ModuleType("baton.models.arcee")
    exec(text.split("```python\n")[1].split("```")[0], family.__dict__)
    monkeypatch.setitem(sys.modules, "baton.models.arcee", family)
    monkeypatch.setitem(FAMILIES, "ArceeForCausalLM", "arcee")
    monkeypatch.setitem(ACTIVATIONS, "relu2", torch.relu)
    model = save_checkpoint("arcee", tmp_path, variants=ARCHITECTURES)
    assert read_config(tmp_path).implementation == "baton"
    check(model, Driver(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": 16}))
    assert {options.window for options in load_model(tmp_path).attention_options} == {16}


@pytest.mark.parametrize(
    ("variants", "variant", "name"),
    [
        (ARCHITECTURES, "gpt2", "transformer.h.1.mlp.c_fc.weight"),
        (VARIANTS, "mixtral", "model.layers.1.block_sparse_moe.experts.2.w1.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_any_is_read(
    tmp_path, monkeypatch, variants, variant, name
):
    """transformers would fill them with random values, and say so when all others are loaded."""
    save_checkpoint(variant, tmp_path, variants=variants)
    check_tensors(tmp_path, implementation="transformers")
    file = tmp_path / "model.safetensors"
    tensors, load = load_file(file), transformers_backend.load
    monkeypatch.setattr(transformers_backend, "load", None)
    for wrong in (None, torch.zeros(3, 4)):
        changed = {key: each for key, each in tensors.items() if key != name}
        save_file(changed | ({} if wrong is None else {name: wrong}), file, metadata={"format": "pt"})
        for check in check_tensors, load_model:
            with pytest.raises(ModelError, match=r"lacks tensor .*\.1\.\S+, or has it in another") as caught:
                check(tmp_path, implementation="transformers")
            assert "\n" not in str(caught.value)
        with pytest.raises(
            ModelError, match=r"lacks tensor|cannot be loaded"
        ):  # nor does transformers take it
            load(tmp_path, read_config(tmp_path, None, "transformers"), torch.float32, CPU, False)


def test_a_window_that_only_a_mask_has_is_refused(tmp_path):
    options = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "num_experts": 4}
    save_checkpoint("moe", tmp_path, variants={"moe": (transformers.Qwen2MoeConfig, options)})
    with pytest.raises(ModelError, match="sliding_attention"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (transformers.DiffLlamaConfig, {"head_dim": 16}, "layer 0 attends more than once"),
        (transformers.OPTConfig, {"ffn_dim": 64, "word_embed_proj_dim": 64}, "outside of its base model"),
    ],
)
def test_code_that_attends_otherwise_is_refused_before_weights_are_read(tmp_path, config, options, words):
    save_checkpoint("it", tmp_path, variants={"it": (config, options)})
    with pytest.raises(ModelError, match=words):
        check_tensors(tmp_path)
    with pytest.raises(ModelError, match=words):
        load_model(tmp_path)


def test_an_option_that_is_false_is_none(tmp_path):
    save_checkpoint("it", tmp_path, variants={"it": (transformers.GraniteMoeSharedConfig, {})})
    check_tensors(tmp_path)


@pytest.mark.parametrize(
    ("config", "implementation"),
    [
        (Gemma4TextConfig(architectures=["Gemma4ForCausalLM"]), "transformers"),
        (LlamaConfig(architectures=["LlamaForCausalLM"], per_layer_config={1: {"head_dim": 32}}), "auto"),
    ],
)
def test_heads_of_different_sizes_are_refused_in_plain_words(tmp_path, config, implementation):
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="heads of different sizes are not supported"):
        read_config(tmp_path, implementation=implementation)


def test_attention_that_differs_from_that_of_transformers_is_found_when_the_model_is_loaded(tmp_path):
    save_checkpoint("gemma2", tmp_path, variants=ARCHITECTURES)
    model = load_model(tmp_path, implementation="transformers")

    def check(model):
        layout = kv_layout(model, 16, model.config.used_length)
        check_attention(model, layout, TorchAttention, TorchAttention)

    check(model)
    check(load_model(tmp_path, torch.bfloat16, implementation="transformers"))
    model.attention_options = [replace(options, softcap=None) for options in model.attention_options]
    with pytest.raises(ModelError, match="over the paged pool its logits differ"):
        check(model)


def test_tensors_that_the_model_does_not_have_are_found_without_reading_them(tmp_path):
    save_checkpoint("qwen3", tmp_path)
    check_tensors(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"unexpected tensor model\.layers\.0\.mlp\.extra\.weight"):
        check_tensors(tmp_path)


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (transformers.MambaConfig(), "MambaForCausalLM", "does not use the attention interface"),
        (transformers.StableLmConfig(), "StableLmForCausalLM", "does not use the attention interface"),
        (transformers.BertConfig(), "BertForMaskedLM", "no causal language model BertForMaskedLM"),
        (transformers.T5Config(), "T5ForConditionalGeneration", "no causal language model"),
        (transformers.LlamaConfig(), "LlamaForSequenceClassification", "no causal language model"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(tmp_path, config, name, words):
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=words) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="not one of Baton's own"):
        read_config(tmp_path, implementation="baton")
