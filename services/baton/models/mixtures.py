"""Llama's layers with a mixture of experts: Mixtral (Jiang et al., arXiv:2401.04088), Qwen 3 with experts
(arXiv:2505.09388), GLM-4.5 (arXiv:2508.06471)."""

from __future__ import annotations

from baton.layers.moe import Experts, Mixture, MoeGate, Routing
from baton.layers.parameters import Parameters
from baton.models import deepseek, llama
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder, FeedForward


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    return llama.llama_like(config, parameters, _FEED_FORWARD[config.architecture])


def mixtral(config: ModelConfig, parameters: Parameters, index: int) -> Mixture:
    hf, hidden, own = config.hf, config.hidden_size, parameters.under("block_sparse_moe")
    count, inner = hf.num_local_experts, hf.intermediate_size
    return Mixture(
        MoeGate(own, "gate", hidden, count, Routing(hf.num_experts_per_tok)),
        Experts(own.under("experts"), count, hidden, inner, projections=("w1", "w3", "w2")),
    )


def qwen3(config: ModelConfig, parameters: Parameters, index: int) -> FeedForward:
    hf, hidden, own = config.hf, config.hidden_size, parameters.under("mlp")
    if index in hf.mlp_only_layers or not hf.num_experts or (index + 1) % hf.decoder_sparse_step:
        return llama.feed_forward(config, parameters, index)
    routing = Routing(hf.num_experts_per_tok, renormalize=hf.norm_topk_prob)
    return Mixture(
        MoeGate(own, "gate", hidden, hf.num_experts, routing),
        Experts(own.under("experts"), hf.num_experts, hidden, hf.moe_intermediate_size),
    )


_FEED_FORWARD = {
    "MixtralForCausalLM": mixtral,
    "Qwen3MoeForCausalLM": qwen3,
    "Glm4MoeForCausalLM": deepseek.feed_forward,
}
