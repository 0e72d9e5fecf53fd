"""gpt-oss: OpenAI, arXiv:2508.10925. Attention with sinks, windows in every other layer, experts with biases,
dequantized from MXFP4 where the checkpoint has that."""

from __future__ import annotations

from baton.layers.attention import Attention, AttentionOptions
from baton.layers.moe import PROJECTIONS, ClampedSwiglu, Experts, Mixture
from baton.layers.moe_routing import MoeGate, Routing
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models import llama
from baton.models.config import ModelConfig, window
from baton.models.decoder import Decoder


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    return llama.llama_like(config, parameters, feed_forward, attention)


def attention(config: ModelConfig, parameters: Parameters, index: int, rope: Rope) -> Attention:
    head_range = parameters.shard.split(config.num_heads, "attention heads")
    sinks = parameters.tensor("sinks", config.num_heads, cut=parameters.shard.cut(0, head_range))
    options = AttentionOptions(window=window(config, index), sinks=sinks)
    return llama.llama_attention(config, parameters, index, rope, options=options)


def feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> Mixture:
    """The softmax is over the chosen experts' logits alone. GGUF files have a projection's experts apart from
    each other (`experts_in_one_tensor` false)."""
    hf, mlp = config.hf, parameters.under("mlp")
    activation = ClampedSwiglu(getattr(hf, "swiglu_alpha", 1.702), getattr(hf, "swiglu_limit", 7.0))
    routing = Routing(hf.num_experts_per_tok)
    router = MoeGate(mlp, "router", config.hidden_size, hf.num_local_experts, routing, bias=True)
    experts = Experts(
        mlp.under("experts"),
        hf.num_local_experts,
        config.hidden_size,
        hf.intermediate_size,
        projections=None if getattr(hf, "experts_in_one_tensor", True) else PROJECTIONS,
        bias=True,
        activation=activation,
    )
    return Mixture(router, experts)
