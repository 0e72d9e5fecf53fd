"""Llama: Touvron et al., arXiv:2307.09288; and what differs from it by an option: Mistral (arXiv:2310.06825),
Qwen 2 (arXiv:2407.10671) and Qwen 3 (arXiv:2505.09388)."""

from __future__ import annotations

from baton.layers.attention import Attention, AttentionOptions
from baton.layers.mlp import GatedMlp
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models.config import ModelConfig, make_rope, window
from baton.models.decoder import Decoder, DecoderLayer


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    rope = make_rope(config)
    layers = [
        decoder_layer(config, parameters.under(f"model.layers.{index}"), index, rope)
        for index in range(config.num_layers)
    ]
    return Decoder(config, parameters, layers)


def decoder_layer(config: ModelConfig, parameters: Parameters, index: int, rope: Rope) -> DecoderLayer:
    hidden, eps = config.hidden_size, config.rms_norm_eps
    bias = bool(getattr(config.hf, "mlp_bias", False))
    return DecoderLayer(
        RmsNorm(parameters, "input_layernorm", hidden, eps),
        attention(config, parameters.under("self_attn"), index, rope),
        RmsNorm(parameters, "post_attention_layernorm", hidden, eps),
        GatedMlp(parameters.under("mlp"), hidden, config.hf.intermediate_size, bias=bias),
    )


def attention(config: ModelConfig, parameters: Parameters, index: int, rope: Rope) -> Attention:
    """Qwen 2 has biases of queries, keys and values, Qwen 3 norms of each query and key."""
    bias = bool(getattr(config.hf, "attention_bias", False))
    qwen2 = config.architecture.startswith("Qwen2")
    qwen3 = config.architecture.startswith("Qwen3")
    return Attention(
        parameters,
        index,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        rope,
        qkv_bias=bias or qwen2,
        output_bias=bias and not qwen2,
        norm_eps=config.rms_norm_eps if qwen3 else None,
        options=AttentionOptions(window=window(config, index)),
    )
