"""DeepSeek-V2 (arXiv:2405.04434): latent attention; experts beside shared ones, chosen by their softmax."""

from __future__ import annotations

import math
from functools import partial

from baton.layers.mla import MlaAttention, MlaShape
from baton.layers.mlp import GatedMlp
from baton.layers.moe import Experts, Mixture
from baton.layers.moe_routing import MoeGate, Routing
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models import llama
from baton.models.config import ModelConfig, ModelError, require_silu
from baton.models.decoder import Decoder, FeedForward


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    require_silu(config)
    require(config, "moe_layer_freq", 1)
    require(config, "norm_topk_prob", False)
    require(config, "scoring_func", "softmax")
    require(config, "topk_method", "greedy", "group_limited_greedy")
    return llama.llama_like(config, parameters, feed_forward, partial(attention, interleaved=True))


def require(config: ModelConfig, name: str, *known: object) -> None:
    """Raises ModelError where a field of config.json has another value than published models have; absent,
    it is the first of these. transformers reads few of them."""
    if (value := getattr(config.hf, name, known[0])) not in known:
        raise ModelError(f"{name} {value!r} of {config.architecture} is not supported")


def attention(
    config: ModelConfig, parameters: Parameters, index: int, rope: Rope, *, interleaved: bool
) -> MlaAttention:
    """`interleaved`: the checkpoint's rotation pairs neighbours."""
    shape = mla_shape(config)
    return MlaAttention(
        parameters,
        index,
        config.hidden_size,
        shape,
        rope,
        attention_scale(config, shape),
        bias=config.hf.attention_bias,
        interleaved=interleaved,
    )


def mla_shape(config: ModelConfig) -> MlaShape:
    hf = config.hf
    return MlaShape(
        heads=config.num_heads,
        query_rank=hf.q_lora_rank,
        rank=hf.kv_lora_rank,
        plain=hf.qk_nope_head_dim,
        rotated=hf.qk_rope_head_dim,
        value=hf.v_head_dim,
    )


def attention_scale(config: ModelConfig, shape: MlaShape) -> float:
    """YaRN's temperature is applied to the scores."""
    scale = (shape.plain + shape.rotated) ** -0.5
    rope = config.hf.rope_parameters
    weight = rope.get("mscale_all_dim", 0) if rope.get("rope_type", "default") != "default" else 0
    if weight and rope["factor"] > 1:
        scale *= (0.1 * weight * math.log(rope["factor"]) + 1.0) ** 2
    return float(scale)


def feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> FeedForward:
    hf = config.hf
    grouped = hf.topk_method == "group_limited_greedy"
    routing = Routing(
        hf.num_experts_per_tok,
        renormalize=False,
        scale=hf.routed_scaling_factor,
        groups=hf.n_group if grouped else 1,
        top_groups=hf.topk_group if grouped else 1,
    )
    return mixture(config, parameters, index, routing)


def mixture(
    config: ModelConfig, parameters: Parameters, index: int, routing: Routing, *, correction: bool = False
) -> FeedForward:
    """Experts beside shared ones, but in the first layers."""
    hf, hidden, mlp = config.hf, config.hidden_size, parameters.under("mlp")
    if index < hf.first_k_dense_replace:
        return llama.feed_forward(config, parameters, index)
    count, inner = hf.n_routed_experts, hf.moe_intermediate_size
    return Mixture(
        MoeGate(mlp, "gate", hidden, count, routing, correction=correction, float32=True),
        Experts(mlp.under("experts"), count, hidden, inner),
        GatedMlp(mlp.under("shared_experts"), hidden, inner * hf.n_shared_experts, reduce=False),
    )
