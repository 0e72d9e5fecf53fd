"""GGUF files of families with recurrent layers: Qwen3-Next, Qwen3.5, LFM2, Granite 4, Nemotron-H."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from baton.gguf_file import GgufFile
from baton.models.gguf_family import (
    SIGMOID,
    SOFTMAX,
    Change,
    FloatArray,
    GgufFamily,
    IntArray,
    gating,
    largest,
    layers,
    plain,
    shared_experts,
)

_Changes = Mapping[str, Sequence[Change]]


def _kinds(file: GgufFile, marks: Mapping[str, str], other: str) -> list[str]:
    """What each layer is: the kind of the first of these tensors that it has."""
    return [
        next((kind for mark, kind in marks.items() if f"blk.{index}.{mark}" in file.tensors), other)
        for index in range(layers(file))
    ]


def _any(file: GgufFile, ending: str) -> bool:
    return any(name.endswith(f".{ending}") for name in file.tensors)


def _rows_of(file: GgufFile, ending: str) -> int:
    """Rows of the first tensor with this name below its layer; 0: there is none."""
    return next((file.shape(name)[0] for name in file.tensors if name.endswith(f".{ending}")), 0)


def _log(decay: FloatArray) -> FloatArray:
    """Files have -exp(A_log)."""
    logarithm: FloatArray = np.log(-decay)
    return logarithm


def _expert_sizes(file: GgufFile) -> dict[str, Any]:
    return {
        "num_experts": file.value("*.expert_count", int),
        "num_experts_per_tok": file.value("*.expert_used_count", int),
        "moe_intermediate_size": file.value("*.expert_feed_forward_length", int),
        "norm_topk_prob": True,
    }


def _qwen(file: GgufFile) -> dict[str, Any]:
    values = file.value("*.ssm.time_step_rank", int)
    return {
        **plain(file),
        "layer_types": _kinds(file, {"ssm_a": "linear_attention"}, "full_attention"),
        "linear_num_key_heads": file.value("*.ssm.group_count", int),
        "linear_num_value_heads": values,
        "linear_key_head_dim": file.value("*.ssm.state_size", int),
        "linear_value_head_dim": file.value("*.ssm.inner_size", int) // max(1, values),
        "linear_conv_kernel_dim": file.value("*.ssm.conv_kernel", int),
    }


def _qwen_moe(file: GgufFile) -> dict[str, Any]:
    gating(file, SOFTMAX)
    shared = _rows_of(file, "ffn_up_shexp.weight")
    return {**_qwen(file), **_expert_sizes(file), "shared_expert_intermediate_size": shared}


def _heads(order: IntArray, size: int) -> IntArray:
    """Rows of heads in this order."""
    rows: IntArray = (order[:, None] * size + np.arange(size)).reshape(-1)
    return rows


def _delta_net(file: GgufFile, *, tiled: bool) -> _Changes:
    """`tiled`: the n-th value heads of all keys are neighbours in the file; in Hugging Face checkpoints those
    of each key are."""
    keys, size = file.value("*.ssm.group_count", int), file.value("*.ssm.state_size", int)
    values, inner = file.value("*.ssm.time_step_rank", int), file.value("*.ssm.inner_size", int)
    order = np.arange(values)
    if tiled:
        order = order.reshape(-1, keys).T.reshape(-1)
    of_values = _heads(order, inner // values)
    mixed = np.concatenate((np.arange(2 * keys * size), 2 * keys * size + of_values))
    window = (len(mixed), 1, file.value("*.ssm.conv_kernel", int))
    at = "linear_attn."
    return {
        "attn_qkv.weight": [Change(f"{at}in_proj_qkv.weight", mixed)],
        "attn_gate.weight": [Change(f"{at}in_proj_z.weight", of_values)],
        "ssm_beta.weight": [Change(f"{at}in_proj_b.weight", order)],
        "ssm_alpha.weight": [Change(f"{at}in_proj_a.weight", order)],
        "ssm_a": [Change(f"{at}A_log", order, value=_log)],
        "ssm_dt.bias": [Change(f"{at}dt_bias", order)],
        "ssm_conv1d.weight": [Change(f"{at}conv1d.weight", mixed, shape=window)],
        "ssm_norm.weight": [Change(f"{at}norm.weight")],
        "ssm_out.weight": [Change(f"{at}out_proj.weight", columns=of_values)],
        "ffn_gate_inp_shexp.weight": [
            Change("mlp.shared_expert_gate.weight", shape=(1, file.value("*.embedding_length", int)))
        ],
    }


def _next_delta_net(file: GgufFile) -> _Changes:
    """Projections whose rows are sorted by key heads are taken apart, as Qwen3.5 has them. Files of 2025 have
    both so, later ones that of the gates alone."""
    keys, size = file.value("*.ssm.group_count", int), file.value("*.ssm.state_size", int)
    each = file.value("*.ssm.time_step_rank", int) // keys
    wide = file.value("*.ssm.inner_size", int) // keys

    def of(sizes: Sequence[int], *kinds: int) -> IntArray:
        """The rows of these kinds of all key heads, one kind after the other."""
        ends = np.cumsum([0, *sizes])
        starts = np.arange(keys)[:, None] * ends[-1]
        return np.concatenate([(starts + np.arange(*ends[kind : kind + 2])).reshape(-1) for kind in kinds])

    large = [size, size, wide, wide]
    return {
        **_delta_net(file, tiled=False),
        "ssm_in.weight": [
            Change("linear_attn.in_proj_qkv.weight", of(large, 0, 1, 2)),
            Change("linear_attn.in_proj_z.weight", of(large, 3)),
        ],
        "ssm_ba.weight": [
            Change("linear_attn.in_proj_b.weight", of([each, each], 0)),
            Change("linear_attn.in_proj_a.weight", of([each, each], 1)),
        ],
    }


def _lfm2(file: GgufFile) -> dict[str, Any]:
    return {
        **plain(file),
        "layer_types": _kinds(file, {"shortconv.conv.weight": "conv"}, "full_attention"),
        "norm_eps": file.value("*.attention.layer_norm_rms_epsilon", float),
        "conv_L_cache": file.value("*.shortconv.l_cache", int),
        "conv_bias": _any(file, "shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(file: GgufFile) -> dict[str, Any]:
    gating(file, SIGMOID)
    return {
        **_lfm2(file),
        **_expert_sizes(file),
        "num_dense_layers": file.value("*.leading_dense_block_count", int, 0),
        "routed_scaling_factor": file.value("*.expert_weights_scale", float, 1.0) or 1.0,
        "use_expert_bias": _any(file, "exp_probs_b.bias"),
    }


def _convolution(file: GgufFile) -> _Changes:
    shape = (file.value("*.embedding_length", int), 1, file.value("*.shortconv.l_cache", int))
    return {"shortconv.conv.weight": [Change("conv.conv.weight", shape=shape)]}


def _mamba(at: str, file: GgufFile) -> _Changes:
    """`at`: where it is below the layer."""
    heads, inner = file.value("*.ssm.time_step_rank", int, 0), file.value("*.ssm.inner_size", int, 0)
    groups, state = file.value("*.ssm.group_count", int, 0), file.value("*.ssm.state_size", int, 0)
    window = (inner + 2 * groups * state, 1, file.value("*.ssm.conv_kernel", int, 0))
    return {
        "ssm_a": [Change(f"{at}.A_log", shape=(heads,), value=_log)],
        "ssm_d": [Change(f"{at}.D", shape=(heads,))],
        "ssm_dt.bias": [Change(f"{at}.dt_bias")],
        "ssm_conv1d.weight": [Change(f"{at}.conv1d.weight", shape=window)],
        "ssm_norm.weight": [Change(f"{at}.norm.weight", shape=(inner,))],
    }


def _granite(file: GgufFile) -> dict[str, Any]:
    """Options of hybrids, and of models whose layers all attend."""
    options, experts = plain(file), file.value("*.expert_count", int, 0)
    rotated = file.value("*.rope.scaling.finetuned", bool, True)
    found = {
        **options,
        "layer_types": _kinds(file, {"ssm_a": "linear_attention"}, "full_attention"),
        "num_local_experts": experts,
        "num_experts_per_tok": file.value("*.expert_used_count", int, 0),
        "shared_intermediate_size": _rows_of(file, "ffn_up_shexp.weight" if experts else "ffn_up.weight"),
        "position_embedding_type": "rope" if rotated else "nope",
        "embedding_multiplier": file.value("*.embedding_scale", float, 0.0) or 1.0,
        "residual_multiplier": file.value("*.residual_scale", float, 0.0) or 1.0,
        "attention_multiplier": file.value("*.attention.scale", float, 0.0) or options["head_dim"] ** -0.5,
        "logits_scaling": file.value("*.logit_scale", float, 0.0) or 1.0,
    }
    if inner := file.value("*.ssm.inner_size", int, 0):
        heads = file.value("*.ssm.time_step_rank", int)
        found |= {
            "mamba_n_heads": heads,
            "mamba_d_head": inner // max(1, heads),
            "mamba_n_groups": file.value("*.ssm.group_count", int),
            "mamba_d_state": file.value("*.ssm.state_size", int),
            "mamba_d_conv": file.value("*.ssm.conv_kernel", int),
            "mamba_expand": inner // file.value("*.embedding_length", int),
            "mamba_conv_bias": _any(file, "ssm_conv1d.bias"),
            "mamba_proj_bias": _any(file, "ssm_in.bias"),
        }
    return found


def _nemotron_h(file: GgufFile) -> dict[str, Any]:
    heads, inner = file.value("*.ssm.time_step_rank", int), file.value("*.ssm.inner_size", int)
    marks = {"ssm_a": "linear_attention", "attn_q.weight": "full_attention", "ffn_gate_inp.weight": "moe"}
    return {
        "head_dim": file.value("*.attention.key_length", int),
        "intermediate_size": largest(file, "feed_forward_length", 0),
        "layers_block_type": _kinds(file, marks, "mlp"),
        "layer_norm_epsilon": file.value("*.attention.layer_norm_rms_epsilon", float),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // max(1, heads),
        "n_groups": file.value("*.ssm.group_count", int),
        "ssm_state_size": file.value("*.ssm.state_size", int),
        "conv_kernel": file.value("*.ssm.conv_kernel", int),
        "use_bias": _any(file, "ssm_in.bias"),
        "use_conv_bias": _any(file, "ssm_conv1d.bias"),
        "mlp_bias": _any(file, "ffn_up.bias"),
    }


def _nemotron_h_moe(file: GgufFile) -> dict[str, Any]:
    gating(file, SIGMOID)
    return {
        **_nemotron_h(file),
        **shared_experts(file),
        "moe_shared_expert_intermediate_size": _rows_of(file, "ffn_up_shexp.weight"),
        "moe_latent_size": file.value("*.moe_latent_size", int, 0) or None,
    }


_EXPERTS, _DENSE = frozenset({"expert_count"}), frozenset({"leading_dense_block_count"})
_QWEN_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_LFM2_NAMES = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_LFM2_OTHERS = dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm")
_SHARED_MLP = "shared_mlp.input_linear.weight"
_GRANITE = GgufFamily(
    "granitemoehybrid",
    _granite,
    {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        **dict.fromkeys(("ffn_down", "ffn_down_shexp"), "shared_mlp.output_linear"),
        **{f"ssm_{part}": f"mamba.{name}" for part, name in (("in", "in_proj"), ("out", "out_proj"))},
        "ssm_conv1d": "mamba.conv1d",
    },
    experts=("block_sparse_moe.experts", "gate_proj", "up_proj", "down_proj"),
    interleaved=True,
    changes=lambda file: _mamba("mamba", file),
    merged=[(f"ffn_gate{of}.weight", f"ffn_up{of}.weight", _SHARED_MLP) for of in ("_shexp", "")],
    known=_EXPERTS | {"attention.scale", "embedding_scale", "residual_scale", "logit_scale"},
)
_NEMOTRON_NAMES = {
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")},
    "attn_output": "mixer.o_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_out": "mixer.out_proj",
    "ssm_conv1d": "mixer.conv1d",
    **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
}


def _nemotron(options: Any, known: frozenset[str] = frozenset()) -> GgufFamily:
    return GgufFamily(
        "nemotron_h",
        options,
        _NEMOTRON_NAMES,
        experts=("mixer.experts", "gate_proj", "up_proj", "down_proj"),
        interleaved=True,
        changes=lambda file: _mamba("mixer", file),
        prefix="backbone.layers",
        others={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
        known=known,
    )


def _tiled(file: GgufFile) -> _Changes:
    return _delta_net(file, tiled=True)


RECURRENT = {
    # Projections are apart in the file, as in Qwen3.5's checkpoints.
    "qwen3next": GgufFamily(
        "qwen3_5_moe_text",
        _qwen_moe,
        _QWEN_NAMES,
        norms_plus_one=True,
        changes=_next_delta_net,
        known=_EXPERTS,
    ),
    "qwen35": GgufFamily("qwen3_5_text", _qwen, _QWEN_NAMES, norms_plus_one=True, changes=_tiled),
    "qwen35moe": GgufFamily(
        "qwen3_5_moe_text", _qwen_moe, _QWEN_NAMES, norms_plus_one=True, changes=_tiled, known=_EXPERTS
    ),
    "lfm2": GgufFamily("lfm2", _lfm2, _LFM2_NAMES, changes=_convolution, others=_LFM2_OTHERS),
    "lfm2moe": GgufFamily(
        "lfm2_moe",
        _lfm2_moe,
        _LFM2_NAMES,
        experts=("feed_forward.experts", "w1", "w3", "w2"),
        changes=_convolution,
        others=_LFM2_OTHERS,
        known=_EXPERTS | _DENSE,
    ),
    "granite": _GRANITE,
    "granitehybrid": _GRANITE,
    "nemotron_h": _nemotron(_nemotron_h),
    "nemotron_h_moe": _nemotron(_nemotron_h_moe, _EXPERTS),
}
"""general.architecture -> family."""
