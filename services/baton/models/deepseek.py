"""DeepSeek-V2 (arXiv:2405.04434), V3 and R1 (arXiv:2412.19437)."""

from __future__ import annotations

import math

from baton.layers.mla import MlaAttention, MlaShape
from baton.layers.mlp import GatedMlp
from baton.layers.moe import Experts, Mixture, MoeGate, Routing
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models import llama
from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Decoder, FeedForward

_ALWAYS: dict[str, dict[str, tuple[object, ...]]] = {
    "DeepseekV2ForCausalLM": {
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
    },
    "DeepseekV3ForCausalLM": {
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
}
"""Fields of config.json that published models have with these values only. transformers reads few of them."""


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    for name, known in _ALWAYS[config.architecture].items():
        if (value := getattr(config.hf, name, known[0])) not in known:
            raise ModelError(f"{name} {value!r} of {config.architecture} is not supported")
    return llama.llama_like(config, parameters, feed_forward, attention)


def attention(config: ModelConfig, parameters: Parameters, index: int, rope: Rope) -> MlaAttention:
    hf = config.hf
    shape = MlaShape(
        heads=config.num_heads,
        query_rank=hf.q_lora_rank,
        rank=hf.kv_lora_rank,
        plain=hf.qk_nope_head_dim,
        rotated=hf.qk_rope_head_dim,
        value=hf.v_head_dim,
    )
    return MlaAttention(
        parameters,
        index,
        config.hidden_size,
        shape,
        rope,
        _scale(config, shape),
        bias=hf.attention_bias,
        interleaved=config.architecture == "DeepseekV2ForCausalLM" or hf.rope_interleave,
    )


def _scale(config: ModelConfig, shape: MlaShape) -> float:
    """YaRN's temperature is applied to the scores."""
    scale = (shape.plain + shape.rotated) ** -0.5
    rope = config.hf.rope_parameters
    weight = rope.get("mscale_all_dim", 0) if rope.get("rope_type", "default") != "default" else 0
    if weight and rope["factor"] > 1:
        scale *= (0.1 * weight * math.log(rope["factor"]) + 1.0) ** 2
    return float(scale)


def feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> FeedForward:
    """GLM-4-MoE's are those of V3."""
    hf, hidden, own = config.hf, config.hidden_size, parameters.under("mlp")
    if index < hf.first_k_dense_replace:
        return llama.feed_forward(config, parameters, index)
    count, inner = hf.n_routed_experts, hf.moe_intermediate_size
    v3 = config.architecture != "DeepseekV2ForCausalLM"
    grouped = v3 or hf.topk_method == "group_limited_greedy"
    routing = Routing(
        hf.num_experts_per_tok,
        "sigmoid" if v3 else "softmax",
        renormalize=hf.norm_topk_prob and v3,
        scale=hf.routed_scaling_factor,
        groups=hf.n_group if grouped else 1,
        top_groups=hf.topk_group if grouped else 1,
        group_best=2 if v3 else 1,
    )
    return Mixture(
        MoeGate(own, "gate", hidden, count, routing, correction=v3, float32=True),
        Experts(own.under("experts"), count, hidden, inner),
        GatedMlp(own.under("shared_experts"), hidden, inner * hf.n_shared_experts, reduce=False),
    )
