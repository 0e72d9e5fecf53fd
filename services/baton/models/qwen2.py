"""Qwen 2 (arXiv:2407.10671) and 2.5: Llama with biases of queries, keys and values, and
windows by layer_types."""

from __future__ import annotations

from functools import partial

from baton.layers.parameters import Parameters
from baton.models.config import ModelConfig, require_silu
from baton.models.decoder import Decoder
from baton.models.llama import feed_forward, llama_attention, llama_like


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    require_silu(config)
    attention = partial(llama_attention, qkv_bias=True, output_bias=False)
    return llama_like(config, parameters, feed_forward, attention)
