"""Mixtral (Jiang et al., arXiv:2401.04088): Mistral with a mixture of experts."""

from __future__ import annotations

from baton.layers.moe import Experts, Mixture
from baton.layers.moe_routing import MoeGate, Routing
from baton.layers.parameters import Parameters
from baton.models.config import ModelConfig, require_silu
from baton.models.decoder import Decoder
from baton.models.llama import llama_like
from baton.models.mistral import attention


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    require_silu(config)
    return llama_like(config, parameters, feed_forward, attention)


def feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> Mixture:
    hf, hidden, block = config.hf, config.hidden_size, parameters.under("block_sparse_moe")
    count, inner = hf.num_local_experts, hf.intermediate_size
    return Mixture(
        MoeGate(block, "gate", hidden, count, Routing(hf.num_experts_per_tok)),
        Experts(block.under("experts"), count, hidden, inner, projections=("w1", "w3", "w2")),
    )
