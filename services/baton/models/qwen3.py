"""Qwen 3 (arXiv:2505.09388): Llama with norms of each query and key, and windows by layer_types."""

from __future__ import annotations

from functools import partial

from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models.config import ModelConfig, require_silu
from baton.models.decoder import Decoder
from baton.models.llama import feed_forward, llama_attention, llama_like


def build(config: ModelConfig, parameters: Parameters, rope: Rope | None = None) -> Decoder:
    """`rope`: None: that of config.json."""
    require_silu(config)
    return llama_like(config, parameters, feed_forward, partial(llama_attention, norms=True), rope)
