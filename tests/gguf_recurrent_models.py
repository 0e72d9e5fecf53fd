"""What llama.cpp's converters make of models with recurrent layers, for `gguf_models`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, ExpertGatingFuncType, GGUFWriter, get_tensor_name_map

Arrays = dict[str, np.ndarray]
Back = Callable[[Arrays], np.ndarray]

ARCHITECTURES = {
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h",
}
"""Model type -> general.architecture."""
_IN_TREE = [
    (r"^model\.(layers\.\d+\.(?:mixer|norm)\b|embeddings|norm_f)", r"backbone.\1"),
    (r"\.dt_bias$", ".dt_proj.bias"),
    (r"router\.weight$", "router.layer.weight"),
    (r"expert_bias$", "expert_bias.bias"),
    (r"(e_score_correction)_bias$", r"\1.bias"),
]
"""Names in transformers' modules that converters see or read otherwise."""


def architecture(config: Any) -> str:
    kinds, arch = config.layer_types, ARCHITECTURES[config.model_type]
    if arch == "granitehybrid" and "linear_attention" not in kinds:
        return "granite"
    return "nemotron_h_moe" if arch == "nemotron_h" and "moe" in kinds else arch


def own_name(name: str, arch: str) -> str:
    """By the gguf package's table."""
    for pattern, to in _IN_TREE:
        name = re.sub(pattern, to, name)
    number = {found: key for key, found in MODEL_ARCH_NAMES.items()}[arch]
    table = get_tensor_name_map(MODEL_ARCH(number), 16)
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def tiled(weight: np.ndarray, axis: int, keys: int, values: int) -> np.ndarray:
    """Value heads of one key after the other -> the first of all keys, the second of all, and so on."""
    size = weight.shape[axis] // values
    before, after = weight.shape[:axis], weight.shape[axis + 1 :]
    heads = weight.reshape(*before, keys, values // keys, size, *after)
    return heads.swapaxes(axis, axis + 1).reshape(weight.shape)


def _grouped(weight: np.ndarray, axis: int, keys: int, values: int) -> np.ndarray:
    """The inverse of `tiled`."""
    return tiled(weight, axis, values // keys, values)


def _one(own: str, array: np.ndarray, back: Callable[[np.ndarray], np.ndarray]) -> tuple[Arrays, Back]:
    return {own: array}, lambda found: back(found[own])


def in_file(name: str, weight: np.ndarray, config: Any, arch: str) -> tuple[Arrays, Back] | None:
    """What the file holds of a parameter, by its names, and how the parameter follows from that. None: as in
    all architectures."""
    shape = weight.shape
    if name.endswith("A_log"):
        order = _of_values(config, arch)
        column = (-1, 1) if "mamba" in name or "mixer" in name else (-1,)
        stored = order(-np.exp(weight), 0, False).reshape(column)
        return _one(own_name(name, arch), stored, lambda a: order(np.log(-a.reshape(shape)), 0, True))
    if name.endswith((".D", "mamba.norm.weight", "mixer.norm.weight")):
        groups = 1 if name.endswith(".D") else _groups(config)
        matrix = weight.reshape((-1, 1) if name.endswith(".D") else (groups, -1))
        return _one(own_name(name, arch), matrix, lambda a: a.reshape(shape))
    if "linear_attn" in name:
        return _delta_net(name, weight, config, arch)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return _one(own_name(name, arch), weight.squeeze(1), lambda a: a[:, None])
    if "qwen" in config.model_type and name.endswith("norm.weight"):
        return _one(own_name(name, arch), weight + 1, lambda a: a - 1)
    if name.endswith("shared_mlp.input_linear.weight"):
        of = "_shexp" if config.num_local_experts else ""
        layer = name.split(".")[2]
        gate, up = (f"blk.{layer}.ffn_{part}{of}.weight" for part in ("gate", "up"))
        both = np.split(weight, 2)
        return {gate: both[0], up: both[1]}, lambda found: np.concatenate((found[gate], found[up]))
    if name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        return _one(f"blk.{name.split('.')[2]}.ffn_down.weight", weight, lambda a: a)
    if re.search(r"experts\.(?:gate_up|up|down)_proj$", name):
        return _experts(name, weight)
    if arch in ("granite", "granitehybrid", "nemotron_h", "nemotron_h_moe") and re.search(
        r"[qk]_proj\.weight$", name
    ):
        from gguf_models import apart, interleaved

        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return _one(own_name(name, arch), interleaved(weight, heads), lambda a: apart(a, heads))
    return _one(own_name(name, arch), weight, lambda a: a)


def _of_values(config: Any, arch: str) -> Callable[[np.ndarray, int, bool], np.ndarray]:
    """(tensor, axis of value heads, back?) -> as the file has it, or the inverse."""
    if not arch.startswith("qwen35"):
        return lambda tensor, axis, back: tensor
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    return lambda tensor, axis, back: (_grouped if back else tiled)(tensor, axis, *heads)


def _groups(config: Any) -> int:
    return int(getattr(config, "n_groups", 0) or config.mamba_n_groups)


def _experts(name: str, weight: np.ndarray) -> tuple[Arrays, Back]:
    layer = name.split(".")[2]
    if "gate_up" not in name:
        part = "up" if "up_proj" in name else "down"
        return _one(f"blk.{layer}.ffn_{part}_exps.weight", weight, lambda a: a)
    gate, up = (f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up"))
    both = np.split(weight, 2, 1)
    return {gate: both[0], up: both[1]}, lambda found: np.concatenate((found[gate], found[up]), 1)


def _delta_net(name: str, weight: np.ndarray, config: Any, arch: str) -> tuple[Arrays, Back]:
    order = _of_values(config, arch)
    own = own_name(name, arch)
    if "in_proj_qkvz" in name:
        return _qkvz(name, weight, config)
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        flat = weight.reshape(len(weight), -1)

        def both(tensor: np.ndarray, back: bool) -> np.ndarray:
            return np.concatenate((tensor[:keys], order(tensor[keys:], 0, back)))

        return _one(own, both(flat, False), lambda a: both(a, True).reshape(weight.shape))
    if name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "dt_bias")):
        return _one(own, order(weight, 0, False), lambda a: order(a, 0, True))
    if name.endswith("out_proj.weight"):
        return _one(own, order(weight, 1, False), lambda a: order(a, 1, True))
    return _one(own, weight, lambda a: a)  # norm, in_proj_ba


def _qkvz(name: str, weight: np.ndarray, config: Any) -> tuple[Arrays, Back]:
    """Rows sorted by key heads -> queries, keys and values of all heads, and what gates the output."""
    layer, keys = name.split(".")[2], config.linear_num_key_heads
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    size = config.linear_key_head_dim
    ends = np.cumsum([size, size, values])
    parts = np.split(weight.reshape(keys, -1, weight.shape[-1]), ends, 1)
    q, k, v, z = (part.reshape(-1, weight.shape[-1]) for part in parts)

    def back(found: Arrays) -> np.ndarray:
        qkv = np.split(found[f"blk.{layer}.attn_qkv.weight"], [len(q), 2 * len(q)])
        heads = [
            each.reshape(keys, -1, weight.shape[-1])
            for each in (*qkv, found[f"blk.{layer}.attn_gate.weight"])
        ]
        return np.concatenate(heads, 1).reshape(weight.shape)

    qkv = np.concatenate((q, k, v))
    return {f"blk.{layer}.attn_qkv.weight": qkv, f"blk.{layer}.attn_gate.weight": z}, back


def add_keys(writer: GGUFWriter, config: Any) -> None:
    """What only these architectures' files have."""
    kinds = list(config.layer_types)
    if writer.arch.startswith("qwen3"):
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
    else:
        writer.add_head_count_kv([config.num_key_value_heads * ("full" in kind) for kind in kinds])
    if writer.arch in ("qwen3next", "qwen35moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if writer.arch.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if writer.arch == "lfm2moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if writer.arch.startswith("granite"):
        _add_granite(writer, config)
    if writer.arch.startswith("nemotron_h"):
        _add_nemotron(writer, config, kinds)


def _add_mamba(writer: GGUFWriter, kernel: int, state: int, groups: int, heads: int, size: int) -> None:
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * size)
    writer.add_ssm_time_step_rank(heads)


def _add_granite(writer: GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    if writer.arch == "granitehybrid":
        own = config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads
        _add_mamba(writer, *own, config.mamba_d_head)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def _add_nemotron(writer: GGUFWriter, config: Any, kinds: list[str]) -> None:
    own = config.conv_kernel, config.ssm_state_size, config.n_groups, config.mamba_num_heads
    _add_mamba(writer, *own, config.mamba_head_dim)
    mixture = writer.arch == "nemotron_h_moe"
    inner = config.moe_intermediate_size if mixture else config.intermediate_size
    writer.add_feed_forward_length([inner * (kind == ("moe" if mixture else "mlp")) for kind in kinds])
    if not mixture:
        return
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
