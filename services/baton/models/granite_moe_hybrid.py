"""Granite 4 (IBM, 2025), dense and with experts: layers of Mamba-2, and between them attention, most often
without positions; factors of embeddings, residuals, scores and logits."""

from __future__ import annotations

import math

import torch

from baton.layers.attention import AttentionModule, AttentionOptions
from baton.layers.batch import Batch
from baton.layers.mamba2 import Mamba2, Mamba2Shape
from baton.layers.mlp import GatedMlp
from baton.layers.moe import Experts, Mixture
from baton.layers.moe_routing import MoeGate, Routing
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.recurrent import RecurrentModule
from baton.layers.rope import no_rotation
from baton.models.config import ModelConfig, ModelError, make_rope, require_silu
from baton.models.decoder import Decoder
from baton.models.llama import llama_attention


class GraniteLayer:
    """A layer whose two parts are multiplied by a factor before they are added."""

    def __init__(
        self,
        input_norm: RmsNorm,
        attention: AttentionModule | RecurrentModule,
        post_norm: RmsNorm,
        feed_forward: GatedMlp | Mixture,
        factor: float,
    ) -> None:
        self.input_norm, self.attention = input_norm, attention
        self.post_norm, self.feed_forward = post_norm, feed_forward
        self.mixture = feed_forward if isinstance(feed_forward, Mixture) else None
        self._factor = factor

    def __call__(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        hidden = hidden + self.attention(self.input_norm(hidden), batch) * self._factor
        return hidden + self.feed_forward(self.post_norm(hidden)) * self._factor


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    require_silu(config)
    hf, hidden, eps = config.hf, config.hidden_size, config.rms_norm_eps
    if (positions := hf.position_embedding_type) not in (None, "nope", "rope"):
        raise ModelError(f"position_embedding_type {positions!r} is not supported, only 'rope' and 'nope'")
    rope = make_rope(config) if positions == "rope" else no_rotation()
    options = AttentionOptions(scale=hf.attention_multiplier)
    layers = []
    for index, kind in enumerate(hf.layer_types):
        layer = parameters.under(f"model.layers.{index}")
        mixer: AttentionModule | RecurrentModule
        if kind == "linear_attention":
            mixer = mamba(config, layer.under("mamba"), index)
        elif kind == "full_attention":
            mixer = llama_attention(config, layer.under("self_attn"), index, rope, options=options)
        else:
            raise ModelError(f"layer_types has {kind!r}; supported are linear_attention and full_attention")
        layers.append(
            GraniteLayer(
                RmsNorm(layer, "input_layernorm", hidden, eps),
                mixer,
                RmsNorm(layer, "post_attention_layernorm", hidden, eps),
                _feed_forward(config, layer),
                hf.residual_multiplier,
            )
        )
    return Decoder(
        config,
        parameters,
        layers,
        embedding_scale=hf.embedding_multiplier,
        logit_divisor=hf.logits_scaling,
    )


def mamba(config: ModelConfig, parameters: Parameters, index: int) -> Mamba2:
    """By the names that Granite's and Bamba's configurations have."""
    hf = config.hf
    return Mamba2(
        parameters,
        index,
        config.hidden_size,
        Mamba2Shape(hf.mamba_n_heads, hf.mamba_d_head, hf.mamba_n_groups, hf.mamba_d_state, hf.mamba_d_conv),
        config.rms_norm_eps,
        bias=hf.mamba_proj_bias,
        convolution_bias=hf.mamba_conv_bias,
        step_limits=hf.time_step_limit or (0.0, math.inf),
    )


def _feed_forward(config: ModelConfig, parameters: Parameters) -> GatedMlp | Mixture:
    hf, hidden = config.hf, config.hidden_size
    mlp = GatedMlp(
        parameters.under("shared_mlp").named({"down_proj": "output_linear"}),
        hidden,
        hf.shared_intermediate_size,
        merged="input_linear",
        reduce=not hf.num_local_experts,
    )
    if not hf.num_local_experts:
        return mlp
    layer = parameters.under("block_sparse_moe")
    return Mixture(
        MoeGate(
            layer.under("router"), "layer", hidden, hf.num_local_experts, Routing(hf.num_experts_per_tok)
        ),
        Experts(layer.under("experts"), hf.num_local_experts, hidden, hf.intermediate_size),
        mlp,
    )
