"""LFM2 (Liquid AI, arXiv:2511.23404), dense and with experts: gated short convolutions, and between them
attention with norms of each query and key."""

from __future__ import annotations

from dataclasses import replace

from baton.layers.attention import NONE, Attention
from baton.layers.mlp import GatedMlp
from baton.layers.moe import Experts, Mixture
from baton.layers.moe_routing import MoeGate, Routing
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.layers.short_convolution import GatedConvolution
from baton.models.config import ModelConfig, ModelError, make_rope
from baton.models.decoder import Decoder, DecoderLayer, FeedForward
from baton.models.llama import llama_attention

_ATTENTION = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
_MLP = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Names in the checkpoint."""


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    config = replace(config, rms_norm_eps=config.hf.norm_eps)
    if len(config.hf.layer_types or ()) != config.num_layers:
        raise ModelError(
            f"layer_types of config.json does not name the kind of each of the {config.num_layers} layers"
        )
    rope, hidden, eps = make_rope(config), config.hidden_size, config.rms_norm_eps
    layers = []
    for index in range(config.num_layers):
        layer = parameters.under(f"model.layers.{index}")
        layers.append(
            DecoderLayer(
                RmsNorm(layer, "operator_norm", hidden, eps),
                _mixer(config, layer, index, rope),
                RmsNorm(layer, "ffn_norm", hidden, eps),
                _feed_forward(config, layer.under("feed_forward"), index),
            )
        )
    return Decoder(config, parameters.named({"model.norm": "model.embedding_norm"}), layers)


def _mixer(
    config: ModelConfig, parameters: Parameters, index: int, rope: Rope
) -> Attention | GatedConvolution:
    hf = config.hf
    if (kind := hf.layer_types[index]) == "conv":
        layer = parameters.under("conv")
        return GatedConvolution(layer, index, config.hidden_size, hf.conv_L_cache, bias=hf.conv_bias)
    if kind != "full_attention":
        raise ModelError(f"layer_types has {kind!r}; supported are conv and full_attention")
    layer = parameters.under("self_attn").named(_ATTENTION)
    return llama_attention(
        config, layer, index, rope, options=NONE, qkv_bias=False, output_bias=False, norms=True
    )


def _feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> FeedForward:
    hf, hidden, inner = config.hf, config.hidden_size, config.hf.intermediate_size
    if index >= getattr(hf, "num_dense_layers", config.num_layers):
        routing = Routing(
            hf.num_experts_per_tok,
            "sigmoid",
            renormalize=hf.norm_topk_prob,
            scale=hf.routed_scaling_factor,
        )
        named = parameters.named({"gate.e_score_correction_bias": "expert_bias"})
        return Mixture(
            MoeGate(named, "gate", hidden, hf.num_experts, routing, correction=hf.use_expert_bias),
            Experts(
                parameters.under("experts"),
                hf.num_experts,
                hidden,
                hf.moe_intermediate_size,
                projections=("w1", "w3", "w2"),
            ),
        )
    if getattr(hf, "block_auto_adjust_ff_dim", False):
        inner, multiple = int(2 * inner / 3), hf.block_multiple_of
        if hf.block_ffn_dim_multiplier is not None:
            inner = -(-int(hf.block_ffn_dim_multiplier * inner) // multiple) * multiple
    return GatedMlp(parameters.named(_MLP), hidden, inner)
