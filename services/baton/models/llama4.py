"""Llama 4, text (Meta, 2025): most layers attend within chunks of positions, the others have no positions and
scores that grow with them; mixtures whose experts see weighed inputs, beside a shared expert."""

from __future__ import annotations

import torch

from baton.layers.attention import Attention, AttentionOptions
from baton.layers.batch import Batch
from baton.layers.mlp import GatedMlp
from baton.layers.moe import Experts, Mixture
from baton.layers.moe_routing import MoeGate, Routing
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope, no_rotation
from baton.models.config import ModelConfig, ModelError, make_rope, require_silu
from baton.models.decoder import Decoder, DecoderLayer, FeedForward


class Llama4Attention(Attention):
    """Queries may be multiplied by a factor that grows with the logarithm of their positions."""

    temperature: tuple[float, float] | None = None
    """Positions after which the factor grows first, and how fast it grows; None: it is 1."""

    def split(self, projected: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().split(projected, batch)
        return self._tempered(q, batch), k, v

    def write(self, projected: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._tempered(super().write(projected, batch), batch)

    def _tempered(self, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.temperature is None:
            return q
        floor, growth = self.temperature
        factor = torch.log1p(((batch.positions.float() + 1) / floor).floor()) * growth + 1
        return (q * factor[:, None, None]).to(q.dtype)


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    require_silu(config)
    rope, unrotated = make_rope(config), no_rotation()
    if config.hf.use_qk_norm and rope.scale != 1:
        raise ModelError("Llama4ForCausalLM with use_qk_norm and a rope_type that scales is not supported")
    hidden, eps = config.hidden_size, config.rms_norm_eps
    layers = []
    for index in range(config.num_layers):
        layer = parameters.under(f"model.layers.{index}")
        rotated = bool(config.hf.no_rope_layers[index])
        layers.append(
            DecoderLayer(
                RmsNorm(layer, "input_layernorm", hidden, eps),
                _attention(config, layer.under("self_attn"), index, rope if rotated else unrotated, rotated),
                RmsNorm(layer, "post_attention_layernorm", hidden, eps),
                _feed_forward(config, layer.under("feed_forward"), index),
            )
        )
    return Decoder(config, parameters, layers)


def _attention(
    config: ModelConfig, parameters: Parameters, index: int, rope: Rope, rotated: bool
) -> Llama4Attention:
    hf = config.hf
    attention = Llama4Attention(
        parameters,
        index,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        rope,
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        # Behind the rotation in transformers, but without weights that is the same.
        norm_eps=config.rms_norm_eps if hf.use_qk_norm and rotated else None,
        norm_weights=False,
        options=AttentionOptions(chunk=_chunk(config, index)),
        interleaved=rotated,
    )
    if hf.attn_temperature_tuning and not rotated:
        attention.temperature = hf.floor_scale, hf.attn_scale
    return attention


def _chunk(config: ModelConfig, index: int) -> int | None:
    kind, size = config.hf.layer_types[index], config.hf.attention_chunk_size
    if kind not in ("full_attention", "chunked_attention"):
        raise ModelError(f"layer_types has {kind!r}; supported are full_attention and chunked_attention")
    if kind == "full_attention":
        return None
    if size is None or size < 1:
        raise ModelError(f"layers attend in chunks, but attention_chunk_size is {size}; it is at least 1")
    return int(size) if size < config.used_length else None


def _feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> FeedForward:
    hf, hidden = config.hf, config.hidden_size
    if index not in hf.moe_layers:
        return GatedMlp(parameters, hidden, hf.intermediate_size_mlp)
    routing = Routing(hf.num_experts_per_tok, "sigmoid", renormalize=False)
    count, inner = hf.num_local_experts, hf.intermediate_size
    return Mixture(
        MoeGate(parameters, "router", hidden, count, routing),
        Experts(parameters.under("experts"), count, hidden, inner, scale_inputs=True),
        GatedMlp(parameters.under("shared_expert"), hidden, inner, reduce=False),
    )
