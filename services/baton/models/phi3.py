"""Phi-3 (arXiv:2404.14219) and 4 (arXiv:2412.08905): Llama with one projection where that has two or three, a
window in all layers, and heads that may be rotated in part."""

from __future__ import annotations

from functools import partial

from baton.layers.attention import Attention, AttentionOptions
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models.config import ModelConfig, make_rope, require_silu, window
from baton.models.decoder import Decoder
from baton.models.llama import feed_forward, llama_attention, llama_like


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    require_silu(config)
    merged = partial(feed_forward, merged="gate_up_proj")
    return llama_like(config, parameters, merged, attention, make_rope(config, partial=True))


def attention(config: ModelConfig, parameters: Parameters, index: int, rope: Rope) -> Attention:
    options = AttentionOptions(window=window(config, index, everywhere=True))
    return llama_attention(config, parameters, index, rope, options=options, merged="qkv_proj")
