"""Kimi Linear (Kimi Team, arXiv:2510.26692): Kimi Delta Attention in three of four layers, in the others
latent attention without positions; experts beside a shared one."""

from __future__ import annotations

import torch

from baton.layers.kimi_delta_attention import KimiDeltaAttention
from baton.layers.mla import MlaAttention, MlaShape
from baton.layers.mlp import GatedMlp
from baton.layers.moe import Experts, Mixture
from baton.layers.moe_routing import MoeGate
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models.config import ModelConfig, ModelError, require_silu
from baton.models.decoder import Decoder, DecoderLayer, FeedForward
from baton.models.deepseek_v3 import routing


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    require_silu(config)
    hidden, eps = config.hidden_size, config.rms_norm_eps
    rope = Rope(torch.zeros(config.hf.qk_rope_head_dim // 2))  # what is rotated elsewhere is not here
    layers = []
    for index in range(config.num_layers):
        layer = parameters.under(f"model.layers.{index}")
        layers.append(
            DecoderLayer(
                RmsNorm(layer, "input_layernorm", hidden, eps),
                _mixer(config, layer.under("self_attn"), index, rope),
                RmsNorm(layer, "post_attention_layernorm", hidden, eps),
                _feed_forward(config, layer, index),
            )
        )
    return Decoder(config, parameters, layers)


def _mixer(
    config: ModelConfig, parameters: Parameters, index: int, rope: Rope
) -> KimiDeltaAttention | MlaAttention:
    hf, hidden = config.hf, config.hidden_size
    if (kind := hf.layer_types[index]) == "linear_attention":
        sizes = hf.linear_num_heads, hf.linear_head_dim, hf.linear_conv_kernel_dim
        return KimiDeltaAttention(parameters, index, hidden, *sizes, config.rms_norm_eps)
    if kind != "full_attention":
        raise ModelError(f"layer_types has {kind!r}; supported are linear_attention and full_attention")
    shape = MlaShape(
        heads=config.num_heads,
        query_rank=hf.q_lora_rank,
        rank=hf.kv_lora_rank,
        plain=hf.qk_nope_head_dim,
        rotated=hf.qk_rope_head_dim,
        value=hf.v_head_dim,
    )
    scale = (shape.plain + shape.rotated) ** -0.5
    return MlaAttention(
        parameters, index, hidden, shape, rope, scale, bias=hf.attention_bias, interleaved=False
    )


def _feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> FeedForward:
    hf, hidden = config.hf, config.hidden_size
    if hf.mlp_layer_types[index] == "dense":
        return GatedMlp(parameters.under("mlp"), hidden, hf.intermediate_size)
    layer, inner = parameters.under("block_sparse_moe"), hf.moe_intermediate_size
    return Mixture(
        MoeGate(layer, "gate", hidden, hf.num_local_experts, routing(config), correction=True, float32=True),
        Experts(layer.under("experts"), hf.num_local_experts, hidden, inner, projections=("w1", "w3", "w2")),
        GatedMlp(layer.under("shared_experts"), hidden, inner * hf.n_shared_experts, reduce=False),
    )
