"""Mistral: Jiang et al., arXiv:2310.06825. Llama with a window in all layers, whatever layer_types says."""

from __future__ import annotations

from baton.layers.attention import Attention, AttentionOptions
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models.config import ModelConfig, require_silu, window
from baton.models.decoder import Decoder
from baton.models.llama import feed_forward, llama_attention, llama_like


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    require_silu(config)
    return llama_like(config, parameters, feed_forward, attention)


def attention(config: ModelConfig, parameters: Parameters, index: int, rope: Rope) -> Attention:
    options = AttentionOptions(window=window(config, index, everywhere=True))
    return llama_attention(config, parameters, index, rope, options=options)
