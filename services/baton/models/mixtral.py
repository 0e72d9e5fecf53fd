"""Mixtral: Jiang et al., arXiv:2401.04088."""

from __future__ import annotations

from baton.layers.experts import Experts, Mixture, Router, Routing
from baton.layers.parameters import Parameters
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.llama import llama_like


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    return llama_like(config, parameters, feed_forward)


def feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> Mixture:
    hf, hidden, own = config.hf, config.hidden_size, parameters.under("block_sparse_moe")
    count, inner = hf.num_local_experts, hf.intermediate_size
    return Mixture(
        Router(own, "gate", hidden, count, Routing(hf.num_experts_per_tok)),
        Experts(own.under("experts"), count, hidden, inner, projections=("w1", "w3", "w2")),
    )
