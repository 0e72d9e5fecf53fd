"""Qwen 3 with experts (arXiv:2505.09388): norms of each query and key, a window in all layers,
mixtures of experts in all layers or in some."""

from __future__ import annotations

from baton.layers.attention import Attention, AttentionOptions
from baton.layers.moe import Experts, Mixture
from baton.layers.moe_routing import MoeGate, Routing
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models import llama
from baton.models.config import ModelConfig, require_silu, window
from baton.models.decoder import Decoder, FeedForward


def build(config: ModelConfig, parameters: Parameters, rope: Rope | None = None) -> Decoder:
    """`rope`: None: that of config.json."""
    require_silu(config)
    return llama.llama_like(config, parameters, feed_forward, attention, rope)


def attention(config: ModelConfig, parameters: Parameters, index: int, rope: Rope) -> Attention:
    options = AttentionOptions(window=window(config, index, everywhere=True))
    return llama.llama_attention(config, parameters, index, rope, options=options, norms=True)


def feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> FeedForward:
    hf, hidden, mlp = config.hf, config.hidden_size, parameters.under("mlp")
    if index in hf.mlp_only_layers or not hf.num_experts or (index + 1) % hf.decoder_sparse_step:
        return llama.feed_forward(config, parameters, index)
    # Qwen3-VL always renormalizes, and its configuration does not say so.
    routing = Routing(hf.num_experts_per_tok, renormalize=getattr(hf, "norm_topk_prob", True))
    return Mixture(
        MoeGate(mlp, "gate", hidden, hf.num_experts, routing),
        Experts(mlp.under("experts"), hf.num_experts, hidden, hf.moe_intermediate_size),
    )
