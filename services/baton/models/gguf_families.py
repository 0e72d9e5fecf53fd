"""What the GGUF files of each architecture hold: configuration, and names of tensors.

llama.cpp's converters (convert_hf_to_gguf.py, conversion/) say what is written, its src/models/ how it is
read. An entry of FAMILIES is all that Baton knows of an architecture's files.
"""

from __future__ import annotations

from typing import Any

from baton.gguf_file import GgufFile
from baton.model_path import CheckpointError
from baton.models.gguf_family import (
    SIGMOID,
    SOFTMAX,
    GgufFamily,
    common,
    gating,
    layers,
    plain,
    shared_experts,
)
from baton.models.gguf_recurrent import RECURRENT
from baton.models.gguf_rope import rope_parameters

_REFUSED = (
    *("attention.scale", "attention.sliding_window", "attention.temperature_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"),
    *("embedding_scale", "logit_scale", "residual_scale", "expert_count", "leading_dense_block_count"),
)
"""Metadata that changes what is computed. A family that does not read a key refuses files that have it."""


def family_of(file: GgufFile) -> GgufFamily:
    """Raises CheckpointError for an architecture, or an option of it, that is not supported."""
    architecture = file.value("general.architecture", str)
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[architecture]
    if architecture == "llama" and file.value("*.expert_count", int, 0):
        family = _MIXTRAL
    for key in _REFUSED:
        if key not in family.known and file.metadata.get(f"{architecture}.{key}"):
            raise CheckpointError(f"{file.path}: {architecture}.{key} is not supported")
    if not file.value("*.attention.causal", bool, True):
        raise CheckpointError(f"{file.path}: {architecture}.attention.causal false is not supported")
    return family


def _mixtral(file: GgufFile) -> dict[str, Any]:
    gating(file, SOFTMAX)
    return {
        **plain(file),
        "num_local_experts": file.value("*.expert_count", int),
        "num_experts_per_tok": file.value("*.expert_used_count", int),
        "sliding_window": None,
    }


def _qwen3_moe(file: GgufFile) -> dict[str, Any]:
    gating(file, SOFTMAX)
    return {
        **plain(file),
        "num_experts": file.value("*.expert_count", int),
        "num_experts_per_tok": file.value("*.expert_used_count", int),
        "moe_intermediate_size": file.value("*.expert_feed_forward_length", int),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _phi3(file: GgufFile) -> dict[str, Any]:
    options = plain(file)
    original = options["rope_parameters"].get("original_max_position_embeddings")
    return {
        **options,
        "original_max_position_embeddings": original or file.value("*.context_length", int),
        "sliding_window": file.value("*.attention.sliding_window", int, 0) or None,
    }


def _layer_types(file: GgufFile, period: int) -> list[str]:
    """All layers but the last of each period have a window. A file may state the period, or each layer."""
    key = f"{file.value('general.architecture', str)}.attention.sliding_window_pattern"
    pattern, count = file.metadata.get(key, period), layers(file)
    windows = pattern if isinstance(pattern, list) else [(1 + index) % pattern for index in range(count)]
    if len(windows) < count:
        raise CheckpointError(f"{file.path}: sliding_window_pattern has fewer entries than there are layers")
    return ["sliding_attention" if each else "full_attention" for each in windows[:count]]


_GEMMA_27B = 62
"""Layers of the one Gemma 3 that scales scores by the model's width a head, which is not in its file."""


def _gemma3(file: GgufFile) -> dict[str, Any]:
    options, base = plain(file), common(file)
    window = file.value("*.attention.sliding_window", int, 0)
    wide = base["num_hidden_layers"] == _GEMMA_27B
    local = {"rope_type": "default", "rope_theta": file.value("*.rope.freq_base_swa", float, 10000.0)}
    return {
        **options,
        "rope_parameters": {"full_attention": options["rope_parameters"], "sliding_attention": local},
        "layer_types": _layer_types(file, 6 if window else 1),
        "sliding_window": window or None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            base["hidden_size"] // base["num_attention_heads"] if wide else options["head_dim"]
        ),
    }


def _gpt_oss(file: GgufFile) -> dict[str, Any]:
    return {
        # The range of YaRN is not rounded to whole dimensions; the file does not say so.
        **plain(file, truncate=False),
        "intermediate_size": file.value("*.expert_feed_forward_length", int),
        "num_local_experts": file.value("*.expert_count", int),
        "num_experts_per_tok": file.value("*.expert_used_count", int),
        "layer_types": _layer_types(file, 2),
        "sliding_window": file.value("*.attention.sliding_window", int),
        "experts_in_one_tensor": False,
    }


def _glm4_moe(file: GgufFile) -> dict[str, Any]:
    gating(file, SIGMOID)
    return {
        **plain(file),
        **shared_experts(file),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _deepseek2(file: GgufFile) -> dict[str, Any]:
    """Newer files are written for the absorbed form of attention: key_length is that of latents."""
    rotated = file.value("*.rope.dimension_count", int)
    key = file.value("*.attention.key_length_mla", int, file.value("*.attention.key_length", int))
    value = file.value("*.attention.value_length_mla", int, file.value("*.attention.value_length", int))
    options = shared_experts(file)
    if gating(file, SOFTMAX, SIGMOID) == SOFTMAX:
        if options["norm_topk_prob"]:
            raise CheckpointError(f"{file.path}: expert_weights_norm with softmax is not supported")
        options["topk_method"] = "group_limited_greedy" if options["n_group"] > 1 else "greedy"
    else:
        options["model_type"] = "deepseek_v3"
    return {
        **options,
        "intermediate_size": file.value("*.feed_forward_length", int, 0),
        "num_key_value_heads": file.value("*.attention.head_count", int),
        "q_lora_rank": file.value("*.attention.q_lora_rank", int, 0) or None,
        "kv_lora_rank": file.value("*.attention.kv_lora_rank", int),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_parameters": rope_parameters(file, rotated),
    }


_EXPERTS, _DENSE = frozenset({"expert_count"}), frozenset({"leading_dense_block_count"})
_SHARED = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_WINDOW = frozenset({"attention.sliding_window"})
_MIXTRAL = GgufFamily(
    "mixtral",
    _mixtral,
    {"ffn_gate_inp": "block_sparse_moe.gate"},
    experts=("block_sparse_moe.experts", "w1", "w3", "w2"),
    interleaved=True,
    known=_EXPERTS,
)
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    **_SHARED,
}
FAMILIES = {
    "llama": GgufFamily("llama", plain, interleaved=True),
    "qwen2": GgufFamily("qwen2", plain),
    "qwen3": GgufFamily("qwen3", plain),
    "qwen3moe": GgufFamily("qwen3_moe", _qwen3_moe, {"ffn_gate_inp": "mlp.gate"}, known=_EXPERTS),
    "phi3": GgufFamily(
        "phi3", _phi3, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, known=_WINDOW
    ),
    "gemma3": GgufFamily(
        "gemma3_text",
        _gemma3,
        _GEMMA,
        norms_plus_one=True,
        known=_WINDOW,
    ),
    "gpt-oss": GgufFamily("gpt_oss", _gpt_oss, _OSS, known=_EXPERTS | _WINDOW),
    "glm4moe": GgufFamily(
        "glm4_moe",
        _glm4_moe,
        {"post_attention_norm": "post_attention_layernorm", **_SHARED},
        known=_EXPERTS | _DENSE,
    ),
    **RECURRENT,
    "deepseek2": GgufFamily("deepseek_v2", _deepseek2, _LATENT, known=_EXPERTS | _DENSE),
}
"""general.architecture -> family. Mistral's models are "llama" too, and Mixtral's."""
