"""Families with recurrent layers against transformers."""

from __future__ import annotations

import re

import pytest
import torch
from random_checkpoints import (
    Driver,
    check_greedy,
    random_prompts,
    save_checkpoint,
)
from safetensors.torch import load_file, save_file
from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from baton.layers.gated_delta_net import CHUNK, delta_chunks, delta_step
from baton.layers.kimi_delta_attention import channel_delta_chunks
from baton.layers.mamba2 import mamba_chunks, mamba_step
from baton.model_path import CheckpointError
from baton.models.config import read_config
from baton.models.loader import check_tensors

_HYBRID = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
_GRANITE = {
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "max_position_embeddings": 512,
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "shared_intermediate_size": 48,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.5,
}
_FALCON = {
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_norm_before_gate": False,
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 1.2,
    "mlp_multipliers": [0.9, 1.3],
    "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
}
VARIANTS = {
    "qwen3-next": (Qwen3NextConfig, {**_HYBRID, **_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3.5": (Qwen3_5TextConfig, {**_HYBRID, "tie_word_embeddings": True}),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, {**_HYBRID, **_EXPERTS, "linear_num_value_heads": 2}),
    "granite4": (
        GraniteMoeHybridConfig,
        {
            **_GRANITE,
            "num_local_experts": 0,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "granite4-moe": (
        GraniteMoeHybridConfig,
        {**_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "bamba": (
        BambaConfig,
        {
            "num_hidden_layers": 4,
            "attn_layer_indices": [2],
            "max_position_embeddings": 512,
            "mamba_n_heads": 8,
            "mamba_d_state": 24,
            "pad_token_id": None,
        },
    ),
    "nemotron-h": (
        NemotronHConfig,
        {
            "num_hidden_layers": None,
            "hybrid_override_pattern": "M-M*EMM-",
            "head_dim": 32,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 3,
            "ssm_state_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "max_position_embeddings": 512,
            "pad_token_id": None,
        },
    ),
    "falcon-h1": (FalconH1Config, _FALCON),
    "falcon-h1-norm": (
        FalconH1Config,
        {**_FALCON, "mamba_rms_norm": True, "mamba_proj_bias": True, "tie_word_embeddings": True},
    ),
    "kimi-linear": (
        KimiLinearConfig,
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "max_position_embeddings": 512,
            "pad_token_id": None,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 20,
            "linear_head_dim": 16,
            "linear_num_heads": 6,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "lfm2": (Lfm2Config, {**_LFM2, "conv_bias": True, "block_multiple_of": 8}),
    "lfm2-moe": (
        Lfm2MoeConfig,
        {
            **_LFM2,
            "conv_L_cache": 4,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
}


@pytest.fixture(scope="module", params=VARIANTS)
def saved(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return path, save(request.param, path)


def save(variant, path, variants=VARIANTS):
    """The reference is in float64: in float32 transformers' own logits are up to 1.1e-4 off."""
    model = save_checkpoint(variant, path, variants=variants)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qwen" in variant and is_minus_one(name):
                parameter -= 1
            elif parameter.dim() > 1:
                parameter *= 2 / 3
    model.save_pretrained(path)
    if variant == "kimi-linear":
        as_published(path / "model.safetensors")
    model.set_experts_implementation("eager")  # others know no float64
    return model.double()


def as_published(file):
    """transformers saves Kimi Linear's dense layers under the name of those with experts."""
    stored = re.compile(r"block_sparse_moe\.(?=(?:gate|up|down)_proj)")
    save_file({stored.sub("mlp.", name): each for name, each in load_file(file).items()}, file)


def is_minus_one(name):
    """Qwen's norms are stored minus one, but for that of a recurrent layer."""
    return name.endswith("norm.weight") and "linear_attn" not in name


def check_logits(model, track):
    """Within 1e-4, but for one token at most: where a norm or a gate of tiny values magnifies rounding,
    float32 is a little farther off, transformers' too."""
    with torch.no_grad():
        expected = model(torch.tensor([track.tokens])).logits[0].float()
    *most, largest = sorted((own - expected[at - 1]).abs().max().item() for at, own in track.logits.items())
    assert max(most, default=0.0) < 1e-4 and largest < 3e-4


def test_a_model_of_recurrent_layers_alone_is_refused_in_one_line(tmp_path):
    only = {"alone": (BambaConfig, {**VARIANTS["bamba"][1], "attn_layer_indices": []})}
    save_checkpoint("alone", tmp_path, variants=only)
    with pytest.raises(CheckpointError, match="no layer attends to tokens"):
        read_config(tmp_path)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 129, 300])
def test_logits_and_64_greedy_tokens_are_those_of_transformers(saved, length):
    path, model = saved
    prompt = random_prompts(length, seed=length)[0]
    track = Driver(path).answer(0, prompt, 64 if length in (1, 65) else 8)
    check_logits(model, track)
    check_greedy(model, prompt, track.tokens[length:])


def test_chunks_and_decode_rows_side_by_side_and_a_cached_prefix(saved):
    path, model = saved
    driver = Driver(path)
    tracks = [driver.add(slot, prompt, 40) for slot, prompt in enumerate(random_prompts(3, 70, 40))]
    driver.step([driver.chunk(track, 2) for track in tracks], [driver.init(track) for track in tracks])
    driver.step(
        [driver.chunk(track, 33 if slot else 1, sample=not slot) for slot, track in enumerate(tracks)]
    )
    first, *others = tracks
    driver.step(
        [
            driver.decode(first),
            *(driver.chunk(each, len(each.tokens) - 35, sample=True) for each in others),
        ]
    )
    for _ in range(37):
        driver.step([driver.decode(track) for track in tracks])
    driver.finish()
    longest = tracks[1]
    again = driver.add(4, longest.tokens[:75], 8, cached=longest, prefix=64)
    driver.step([driver.chunk(again, 11, sample=True)], [driver.init(again)])
    driver.finish()
    assert again.tokens[:76] == longest.tokens[:76]
    for track in (*tracks, again):
        check_logits(model, track)


@pytest.mark.parametrize("count", [2, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_chunks_of_the_delta_rule_are_its_steps(count):
    generator = torch.Generator().manual_seed(count)
    q, k, v = (torch.randn(2, 3, count, dim, generator=generator) for dim in (8, 8, 6))
    k = k / k.norm(dim=-1, keepdim=True)
    decay = -torch.rand(2, 3, count, generator=generator) * 3
    beta, state = torch.rand(2, 3, count, generator=generator), torch.randn(2, 3, 8, 6, generator=generator)
    out, after = delta_chunks(q, k, v, decay, beta, state.clone())
    for at in range(count):
        one = (part[:, :, at : at + 1] for part in (q, k, v, decay, beta))
        expected, state = delta_step(*one, state)
        torch.testing.assert_close(out[:, :, at : at + 1], expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(after, state, atol=2e-5, rtol=1e-4)


def test_kimis_dense_layers_are_found_under_the_name_that_transformers_saves(tmp_path):
    save_checkpoint("kimi-linear", tmp_path, variants=VARIANTS)
    assert any("block_sparse_moe.up_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    check_tensors(tmp_path)


def test_limits_of_mambas_steps_hold_for_decode_rows_too(tmp_path):
    """As in one pass of transformers over the whole; its `generate()` forgets them."""
    options = {**_GRANITE, "num_local_experts": 0, "time_step_limit": (0.6, 0.8)}
    model = save("limits", tmp_path, {"limits": (GraniteMoeHybridConfig, options)})
    check_logits(model, Driver(tmp_path).answer(0, random_prompts(20)[0], 8))


@pytest.mark.parametrize("count", [2, 16, 17, 43])
def test_chunks_of_kimis_delta_rule_are_its_steps(count):
    """Also where a channel forgets all within a chunk."""
    generator = torch.Generator().manual_seed(count)
    q, k, v = (torch.randn(2, 3, count, dim, generator=generator) for dim in (8, 8, 6))
    k = k / k.norm(dim=-1, keepdim=True)
    decay = -torch.rand(2, 3, count, 8, generator=generator) * 20
    beta, state = torch.rand(2, 3, count, generator=generator), torch.randn(2, 3, 8, 6, generator=generator)
    out, after = channel_delta_chunks(q, k, v, decay, beta, state)
    for at in range(count):
        state = state * decay[:, :, at, :, None].exp()
        change = (v[:, :, at] - (k[:, :, at, None] @ state)[:, :, 0]) * beta[:, :, at, None]
        state = state + k[:, :, at, :, None] * change[:, :, None]
        expected = (q[:, :, at, None] @ state)[:, :, 0]
        torch.testing.assert_close(out[:, :, at], expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(after, state, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [2, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_chunks_of_mamba_are_its_steps(count):
    generator = torch.Generator().manual_seed(count)
    read, write = (torch.randn(2, 3, 1, count, 8, generator=generator) for _ in range(2))
    v, state = torch.randn(2, 3, 4, count, 6, generator=generator), torch.randn(2, 3, 4, 8, 6)
    decay = -torch.rand(2, 3, 4, count, generator=generator) * 3
    out, after = mamba_chunks(read, write, v, decay, state.clone())
    for at in range(count):
        one = (part[:, :, :, at : at + 1] for part in (read, write, v, decay))
        expected, state = mamba_step(*one, state)
        torch.testing.assert_close(out[:, :, :, at : at + 1], expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(after, state, atol=2e-5, rtol=1e-4)
