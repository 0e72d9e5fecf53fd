"""Writes models of transformers as GGUF files, as llama.cpp's convert_hf_to_gguf.py does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import gguf_recurrent_models as recurrent

ARCHITECTURES = {
    **recurrent.ARCHITECTURES,
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
"""Model type -> general.architecture, where they differ."""
NAMES = [
    (r"model\.embed_tokens", "token_embd"),
    (r"model\.norm", "output_norm"),
    (r"lm_head", "output"),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.sinks", "attn_sinks.weight"),
    (r"self_attn\.qkv_proj", "attn_qkv"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.q_([ab])_proj", r"attn_q_\1"),
    (r"self_attn\.(q|kv)_a_layernorm", r"attn_\1_a_norm"),
    (r"self_attn\.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    (r"self_attn\.kv_b_proj", "attn_kv_b"),
    (r"mlp\.gate_up_proj", "ffn_up"),
    (r"mlp\.(?:gate|router)", "ffn_gate_inp"),
    (r"mlp\.gate\.e_score_correction_bias", "exp_probs_b.bias"),
    (r"mlp\.shared_experts\.(gate|up|down)_proj", r"ffn_\1_shexp"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
]
"""A layer's without "model.layers.N." before and "blk.N." in the file."""
NAMES_OF = {
    "gemma3": [
        (r"post_attention_layernorm", "post_attention_norm"),
        (r"pre_feedforward_layernorm", "ffn_norm"),
        (r"post_feedforward_layernorm", "post_ffw_norm"),
    ],
    "gpt-oss": [(r"post_attention_layernorm", "post_attention_norm")],
    "glm4moe": [(r"post_attention_layernorm", "post_attention_norm")],
}

Arrays = dict[str, np.ndarray]
Back = Callable[[Arrays], np.ndarray]


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head: of the first half and of the second in turn."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleaved`."""
    parts = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def own_name(name: str, arch: str) -> str:
    found = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+?)(\.weight|\.bias)?", name)
    assert found is not None
    layer, module, kind = found.groups()
    rules = NAMES_OF.get(arch, []) + NAMES
    own = next(re.sub(pattern, to, module) for pattern, to in rules if re.fullmatch(pattern, module))
    return (f"blk.{layer}." if layer else "") + own + (kind or "")


def in_file(name: str, weight: np.ndarray, config: Any, arch: str, old: bool) -> tuple[Arrays, Back]:
    """What the file holds of a parameter, by its names, and how the parameter follows from that."""
    if config.model_type in recurrent.ARCHITECTURES:
        return recurrent.in_file(name, weight, config, arch)
    layer = (re.match(r"model\.layers\.(\d+)", name) or [None, ""])[1]
    if found := re.search(r"mlp\.experts\.(gate_up|down)_proj(_bias)?$", name):
        kind = "bias" if found[2] else "weight"
        if arch == "gpt-oss" and kind == "weight":
            arrays, back = _experts(found[1], weight.swapaxes(1, 2), True)
            transposed: Back = lambda arrays: back(arrays).swapaxes(1, 2)  # noqa: E731
        else:
            arrays, back = _experts(found[1], weight, arch == "gpt-oss")
            transposed = back
        if not old:
            return _renamed(arrays, transposed, lambda part: f"blk.{layer}.ffn_{part}_exps.{kind}")
        alone = {f"{part}.{i}": each for part, array in arrays.items() for i, each in enumerate(array)}
        stacked: Back = lambda found: transposed(  # noqa: E731
            {part: np.stack([found[f"{part}.{i}"] for i in range(len(weight))]) for part in arrays}
        )
        return _renamed(alone, stacked, lambda part: f"blk.{layer}.ffn_{part}.{kind}")
    own = own_name(name, arch)
    if own.endswith("attn_kv_b.weight") and not old:
        plain = config.qk_nope_head_dim
        heads = weight.reshape(config.num_attention_heads, -1, weight.shape[-1])
        arrays = {"k": heads[:, :plain].swapaxes(1, 2), "v": heads[:, plain:]}
        merge: Back = lambda found: np.concatenate(  # noqa: E731
            (found["k"].swapaxes(1, 2), found["v"]), 1
        ).reshape(weight.shape)
        return _renamed(arrays, merge, lambda part: f"blk.{layer}.attn_{part}_b.weight")
    if arch == "gemma3" and own.endswith("norm.weight"):
        return {own: weight + 1}, lambda found: found[own] - 1
    if arch == "llama" and (match := re.search(r"\.attn_([qk])\.(weight|bias)$", own)):
        count = {"q": config.num_attention_heads, "k": config.num_key_value_heads}[match[1]]
        return {own: interleaved(weight, count)}, lambda found: apart(found[own], count)
    return {own: weight}, lambda found: found[own]


def _experts(kind: str, weight: np.ndarray, alternating: bool) -> tuple[Arrays, Back]:
    """Of all experts in one parameter [experts, rows, ...]; gate and up: in turn, or one after the other."""
    if kind == "down":
        return {"down": weight}, lambda found: found["down"]
    if alternating:
        both: Back = lambda found: np.stack((found["gate"], found["up"]), 2).reshape(weight.shape)  # noqa: E731
        return {"gate": weight[:, ::2], "up": weight[:, 1::2]}, both
    half = weight.shape[1] // 2
    parts = {"gate": weight[:, :half], "up": weight[:, half:]}
    return parts, lambda found: np.concatenate((found["gate"], found["up"]), 1)


def _renamed(arrays: Arrays, back: Back, name: Callable[[str], str]) -> tuple[Arrays, Back]:
    return {name(part): each for part, each in arrays.items()}, lambda found: back(
        {part: found[name(part)] for part in arrays}
    )


def rounded(
    model: PreTrainedModel, kind: str, arch: str, old: bool
) -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
    """Packed tensors of a model by their GGUF names. The model keeps what they unpack to."""
    tensors = {}
    buffers = [
        pair for pair in model.named_buffers() if pair[0].endswith(("e_score_correction_bias", "expert_bias"))
    ]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *buffers]:
            arrays, back = in_file(name, parameter.numpy(), model.config, arch, old)
            unpacked = {}
            for own, array in arrays.items():
                type = _type(own, array, kind)
                tensors[own] = quantize(np.ascontiguousarray(array), type), type
                unpacked[own] = dequantize(*tensors[own])
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(back(unpacked))))
    return tensors


def _type(own: str, array: np.ndarray, kind: str) -> GGMLQuantizationType:
    """Rows that are no multiple of a block stay F16, and what is small F32, as with llama.cpp."""
    small = "ffn_gate_inp" in own or re.search(r"\.ssm_(?:a|d|norm|conv1d)\b|shortconv\.conv\.", own)
    if array.ndim == 1 or own.endswith(".bias") or small:
        return GGMLQuantizationType.F32
    type = GGMLQuantizationType[kind]
    if kind == "MXFP4" and "_exps" not in own:
        type = GGMLQuantizationType.Q8_0
    return GGMLQuantizationType.F16 if array.shape[-1] % GGML_QUANT_SIZES[type][0] else type


def add_rope(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    parameters = dict(getattr(config, "rope_parameters", None) or {"rope_theta": 1e4, "rope_type": "default"})
    if "full_attention" in parameters:
        writer.add_rope_freq_base_swa(parameters["sliding_attention"]["rope_theta"])
        parameters = parameters["full_attention"]
    writer.add_rope_freq_base(parameters["rope_theta"])
    if (part := parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        writer.add_rope_dimension_count(int(part * _head_dim(config)))
    match parameters["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(parameters["factor"])
        case "yarn":
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(parameters["factor"])
            writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
            for name, add in (
                ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
                ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
                ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ):
                if parameters.get(name) is not None:
                    add(parameters[name])
            if parameters.get("mscale_all_dim"):
                assert parameters["mscale_all_dim"] == parameters["mscale"]
                writer.add_rope_scaling_yarn_log_mul(0.1 * parameters["mscale_all_dim"])
        case "longrope":
            original = parameters["original_max_position_embeddings"]
            ratio = np.log(config.max_position_embeddings / original) / np.log(original)
            writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + ratio)))
            for each in ("long", "short"):
                factors = np.array(parameters[f"{each}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{each}.weight", factors)
        case "llama3":
            plain = parameters["rope_theta"] ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
            factors = plain / model.model.rotary_emb.inv_freq.numpy()
            writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
        case kind:
            assert kind == "default", kind


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def add_family(writer: GGUFWriter, config: Any, old: bool) -> None:
    """What only this architecture's files have."""
    if config.model_type in recurrent.ARCHITECTURES:
        return recurrent.add_keys(writer, config)
    match writer.arch:
        case "llama" if config.model_type == "mixtral":
            writer.add_expert_count(config.num_local_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
        case "qwen3moe":
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        case "phi3":
            writer.add_sliding_window(config.sliding_window or 0)
        case "gemma3":
            writer.add_sliding_window(config.sliding_window)
            windows = [each == "sliding_attention" for each in config.layer_types]
            if windows != [(index + 1) % 6 != 0 for index in range(len(windows))]:
                writer.add_sliding_window_pattern(windows)
        case "gpt-oss":
            writer.add_sliding_window(config.sliding_window)
            writer.add_expert_count(config.num_local_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.intermediate_size)
        case "glm4moe" | "deepseek2":
            _add_shared_experts(writer, config, old)
    if writer.arch == "glm4moe":
        # A further layer, which predicts a second token.
        writer.add_nextn_predict_layers(1)
        for name in ("attn_norm", "nextn.enorm"):
            tensor = np.ones(config.hidden_size, np.float32)
            writer.add_tensor(f"blk.{config.num_hidden_layers}.{name}.weight", tensor)
    if writer.arch == "deepseek2":
        _add_latents(writer, config, old)


def _add_shared_experts(writer: GGUFWriter, config: Any, old: bool) -> None:
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type != "deepseek_v2":
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if not old:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _add_latents(writer: GGUFWriter, config: Any, old: bool) -> None:
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    if old:
        writer.add_key_length(key)
        writer.add_value_length(value)
    else:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)


def add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, pre: str | None) -> None:
    """A byte-level BPE."""
    import json

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["id"] for token in spec["added_tokens"]}
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if id in special else 1 for id in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str = "Q8_0",
    tokenizer: PreTrainedTokenizerFast | None = None,
    pre: str | None = "gpt-2",
    *,
    old: bool = False,
    parts: int = 1,
    fused: bool = False,
    **metadata: Any,
) -> Path:
    """Writes the model with its matrices of type `kind`, and rounds the model's own weights to what the file
    holds.

    `old`: as converters of 2024 did. `parts`: split over files of so many tensors that these are enough; the
    first one's path is returned. `fused`: experts' gate and up are one tensor. metadata: strings and
    integers; dots in keys as "__".
    """
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    if config.model_type in recurrent.ARCHITECTURES:
        arch = recurrent.architecture(config)
    tensors = rounded(model, kind, arch, old)
    for name in [name for name in tensors if fused and "ffn_gate_exps" in name]:
        (gate, type), (up, _) = tensors.pop(name), tensors.pop(name.replace("gate", "up"))
        tensors[name.replace("gate", "gate_up")] = np.concatenate((gate, up), 1), type
    most = -(-(len(tensors) + 3) // parts) if parts > 1 else 0
    writer = GGUFWriter(path, arch, split_max_tensors=most)
    latent = arch == "deepseek2"
    blocks = len(getattr(config, "layers_block_type", ())) or config.num_hidden_layers
    writer.add_block_count(blocks + (arch == "glm4moe"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if (inner := getattr(config, "intermediate_size", 0)) and not arch.startswith("nemotron"):
        writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type not in recurrent.ARCHITECTURES:
        writer.add_head_count_kv(1 if latent and not old else config.num_key_value_heads)
    eps = (getattr(config, name, None) for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"))
    writer.add_layer_norm_rms_eps(next(filter(None, eps)))
    if getattr(config, "head_dim", None) and not latent:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    add_rope(writer, model)
    add_family(writer, config, old)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, pre)
    else:
        writer.add_token_list([str(id) for id in range(config.vocab_size)])
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.replace("__", "."), value)
    for name, (data, type) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
