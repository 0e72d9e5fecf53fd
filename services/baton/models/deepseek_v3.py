"""DeepSeek-V3 and R1 (arXiv:2412.19437): V2's layers, with experts chosen by sigmoids and a correction."""

from __future__ import annotations

from functools import partial

from baton.layers.mla import MlaAttention
from baton.layers.moe_routing import Routing
from baton.layers.parameters import Parameters
from baton.models import deepseek_v2, llama
from baton.models.config import ModelConfig, require_silu
from baton.models.decoder import Decoder, FeedForward
from baton.models.mtp_layer import MtpLayer


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    require_silu(config)
    deepseek_v2.require(config, "moe_layer_freq", 1)
    deepseek_v2.require(config, "scoring_func", "sigmoid")
    deepseek_v2.require(config, "topk_method", "noaux_tc")
    return llama.llama_like(config, parameters, feed_forward, _attention(config))


def build_mtp(config: ModelConfig, parameters: Parameters) -> MtpLayer:
    return llama.nextn_layer(config, parameters, feed_forward, _attention(config))


def _attention(config: ModelConfig) -> partial[MlaAttention]:
    return partial(deepseek_v2.attention, interleaved=config.hf.rope_interleave)


def feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> FeedForward:
    return deepseek_v2.mixture(config, parameters, index, routing(config), correction=True)


def routing(config: ModelConfig) -> Routing:
    """A sigmoid of each score; of a group its two best experts count."""
    hf = config.hf
    return Routing(
        hf.num_experts_per_tok,
        "sigmoid",
        renormalize=hf.norm_topk_prob,
        scale=hf.routed_scaling_factor,
        groups=hf.n_group,
        top_groups=hf.topk_group,
        group_best=2,
    )
