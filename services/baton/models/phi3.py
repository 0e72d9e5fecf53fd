"""Phi-3 (arXiv:2404.14219) and Phi-4 (arXiv:2412.08905): Llama with merged projections.

Context beyond the length of the training uses "longrope" (Ding et al., arXiv:2402.13753), whose factors are
chosen once, by the context length that is served.
"""

from __future__ import annotations

from baton.layers.attention import Attention, AttentionOptions
from baton.layers.mlp import GatedMlp
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.models.config import ModelConfig, make_rope, window
from baton.models.decoder import Decoder, DecoderLayer


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    hidden, eps, rope = config.hidden_size, config.rms_norm_eps, make_rope(config)
    layers = []
    for index in range(config.num_layers):
        layer = parameters.under(f"model.layers.{index}")
        attention = Attention(
            layer.under("self_attn"),
            index,
            hidden,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            rope,
            merged="qkv_proj",
            options=AttentionOptions(window=window(config, index)),
        )
        layers.append(
            DecoderLayer(
                RmsNorm(layer, "input_layernorm", hidden, eps),
                attention,
                RmsNorm(layer, "post_attention_layernorm", hidden, eps),
                GatedMlp(layer.under("mlp"), hidden, config.hf.intermediate_size, merged="gate_up_proj"),
            )
        )
    return Decoder(config, parameters, layers)
