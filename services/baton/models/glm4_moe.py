"""GLM-4.5: arXiv:2508.06471. Experts beside a shared one, routed as in DeepSeek-V3 (arXiv:2412.19437)."""

from __future__ import annotations

from baton.layers.experts import Experts, Mixture, Router, Routing
from baton.layers.mlp import GatedMlp
from baton.layers.parameters import Parameters
from baton.models import llama
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder, FeedForward


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    for index in range(getattr(config.hf, "num_nextn_predict_layers", None) or 0):
        # They predict further tokens, for speculation, and are not used.
        parameters.ignore(f"model.layers.{config.num_layers + index}.")
    return llama.llama_like(config, parameters, feed_forward)


def feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> FeedForward:
    hf, hidden, own = config.hf, config.hidden_size, parameters.under("mlp")
    if index < hf.first_k_dense_replace:
        return llama.feed_forward(config, parameters, index)
    count, inner = hf.n_routed_experts, hf.moe_intermediate_size
    routing = Routing(
        hf.num_experts_per_tok,
        "sigmoid",
        renormalize=hf.norm_topk_prob,
        scale=hf.routed_scaling_factor,
        groups=hf.n_group,
        top_groups=hf.topk_group,
        group_best=2,
    )
    return Mixture(
        Router(own, "gate", hidden, count, routing, correction=True, float32=True),
        Experts(own.under("experts"), count, hidden, inner),
        GatedMlp(own.under("shared_experts"), hidden, inner * hf.n_shared_experts, reduce=False),
    )
