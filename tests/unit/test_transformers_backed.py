"""Models by transformers' own code over paged attention."""

from __future__ import annotations

import sys
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

from baton.layers.mlp import ACTIVATIONS
from baton.models.config import ModelError, read_config
from baton.models.loader import kv_shape, load_model
from baton.models.registry import FAMILIES

WINDOW = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}


def with_images(**options):
    """Gemma 3 that takes images, too; the options are those of its language model."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return transformers.Gemma3Config(text_config=options, vision_config=vision, mm_tokens_per_image=4)


ARCHITECTURES = {
    "gpt2": (transformers.GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt-neox": (transformers.GPTNeoXConfig, {"rotary_pct": 0.25}),
    "phi": (transformers.PhiConfig, {"partial_rotary_factor": 0.5}),
    "arcee": (transformers.ArceeConfig, {"head_dim": 16}),
    "starcoder2": (transformers.Starcoder2Config, {"sliding_window": 24}),
    "cohere": (transformers.CohereConfig, {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": (transformers.Cohere2Config, WINDOW),
    "gemma2": (
        transformers.Gemma2Config,
        {"head_dim": 32, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, **WINDOW},
    ),
    "gemma3-images": (with_images, {"head_dim": 32, "query_pre_attn_scalar": 20, **WINDOW}),
    "gpt-oss": (
        transformers.GptOssConfig,
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
    ),
    "olmo2": (transformers.Olmo2Config, {}),
    "granite": (
        transformers.GraniteConfig,
        {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    ),
    "glm4": (transformers.Glm4Config, {"pad_token_id": None, "head_dim": 16, "partial_rotary_factor": 0.5}),
    "nemotron": (transformers.NemotronConfig, {}),
    "exaone4": (transformers.Exaone4Config, WINDOW),
    "smollm3": (transformers.SmolLM3Config, {"pad_token_id": None, "no_rope_layers": [1, 0]}),
    "deepseek-v3": (
        transformers.DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "seed-oss": (transformers.SeedOssConfig, {"head_dim": 16}),
}
"""With windows, softcaps, sinks, partial rotation, parallel blocks and layers without rotation among them."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_greedy_tokens_equal_generate(tmp_path, name):
    model = save_checkpoint(name, tmp_path, variants=ARCHITECTURES)
    config = read_config(tmp_path, implementation="transformers")
    assert config.implementation == "transformers"
    driver = Driver(tmp_path, implementation="transformers")
    check(model, driver)
    assert kv_shape(config) == driver.model.kv  # as `baton doctor` tells it, without weights


def check(model, driver):
    prompts = random_prompts(3, 23, 40, 33)
    tracks = [driver.add(slot, prompt, 40) for slot, prompt in enumerate(prompts)]
    driver.step([driver.chunk(track, 2) for track in tracks], [driver.init(track) for track in tracks])
    driver.step([driver.chunk(track, len(track.tokens) - 2, sample=True) for track in tracks])
    for _ in range(31):
        driver.step([driver.decode(track) for track in tracks])
    driver.finish()
    for track, prompt in zip(tracks, prompts, strict=True):
        assert largest_difference(model, track) < 1e-4
        check_greedy(model, prompt, track.tokens[len(prompt) :])


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "phi3", "mistral-window"])
def test_our_families_equal_it(tmp_path, name):
    model = save_checkpoint(name, tmp_path)
    assert name in VARIANTS and read_config(tmp_path).implementation == "baton"
    check(model, Driver(tmp_path, implementation="transformers"))


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


def test_a_missing_tensor_is_refused(tmp_path):
    """transformers would fill it with random values."""
    save_checkpoint("gpt2", tmp_path, variants=ARCHITECTURES)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks tensor transformer\.h\.1\.mlp\.c_fc\.weight"):
        load_model(tmp_path)


def test_a_window_that_only_a_mask_has_is_refused(tmp_path):
    options = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "num_experts": 4}
    save_checkpoint("moe", tmp_path, variants={"moe": (transformers.Qwen2MoeConfig, options)})
    with pytest.raises(ModelError, match="sliding_attention"):
        load_model(tmp_path)


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
