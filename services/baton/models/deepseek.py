"""DeepSeek-V2 (arXiv:2405.04434), V3 and R1 (arXiv:2412.19437)."""

from __future__ import annotations

import math

from baton.layers.latent_attention import LatentAttention, LatentShape
from baton.layers.mlp import GatedMlp
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models.config import ModelConfig, make_rope
from baton.models.decoder import Decoder, DecoderLayer, FeedForward


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    hidden, eps, rope = config.hidden_size, config.rms_norm_eps, make_rope(config)
    layers = []
    for index in range(config.num_layers):
        layer = parameters.under(f"model.layers.{index}")
        layers.append(
            DecoderLayer(
                RmsNorm(layer, "input_layernorm", hidden, eps),
                attention(config, layer.under("self_attn"), index, rope),
                RmsNorm(layer, "post_attention_layernorm", hidden, eps),
                feed_forward(config, layer.under("mlp"), index),
            )
        )
    return Decoder(config, parameters, layers)


def attention(config: ModelConfig, parameters: Parameters, index: int, rope: Rope) -> LatentAttention:
    hf = config.hf
    shape = LatentShape(
        heads=config.num_heads,
        query_rank=hf.q_lora_rank,
        rank=hf.kv_lora_rank,
        plain=hf.qk_nope_head_dim,
        rotated=hf.qk_rope_head_dim,
        value=hf.v_head_dim,
    )
    return LatentAttention(
        parameters,
        index,
        config.hidden_size,
        shape,
        rope,
        _scale(config, shape),
        bias=hf.attention_bias,
        interleaved=getattr(hf, "rope_interleave", True),
    )


def _scale(config: ModelConfig, shape: LatentShape) -> float:
    """YaRN's temperature is applied to the scores."""
    scale = (shape.plain + shape.rotated) ** -0.5
    rope = config.hf.rope_parameters
    weight = rope.get("mscale_all_dim", 0) if rope.get("rope_type", "default") != "default" else 0
    if weight and rope["factor"] > 1:
        scale *= (0.1 * weight * math.log(rope["factor"]) + 1.0) ** 2
    return float(scale)


def feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> FeedForward:
    return GatedMlp(parameters, config.hidden_size, config.hf.intermediate_size)
