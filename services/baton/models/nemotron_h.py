"""Nemotron-H and Nemotron 3 Nano (NVIDIA, arXiv:2504.03624): Mamba-2, attention without positions,
and feed-forward layers or mixtures without gates, each a layer of its own in the checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from baton.layers.attention import NONE, AttentionModule
from baton.layers.batch import Batch
from baton.layers.mamba2 import Mamba2, Mamba2Shape
from baton.layers.mlp import Mlp
from baton.layers.moe import Experts, Mixture
from baton.layers.moe_routing import MoeGate
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.recurrent import RecurrentModule
from baton.layers.rope import no_rotation
from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Decoder, DecoderLayer, FeedForward, Layer
from baton.models.deepseek_v3 import routing
from baton.models.llama import llama_attention

_NAMES = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"}


class MixerLayer:
    """hidden += attention(norm(hidden))"""

    mixture: None = None

    def __init__(self, norm: RmsNorm, attention: AttentionModule | RecurrentModule) -> None:
        self.norm, self.attention = norm, attention

    def __call__(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.attention.add_to(hidden, self.norm(hidden), batch)


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    hf = config.hf
    if (hf.mlp_hidden_act, hf.mamba_hidden_act) != ("relu2", "silu"):
        name = config.architecture
        raise ModelError(f"{name} is supported only with mlp_hidden_act 'relu2' and mamba_hidden_act 'silu'")
    if hf.moe_latent_size is not None:
        raise ModelError("moe_latent_size of NemotronHForCausalLM is not supported")
    config = replace(config, rms_norm_eps=hf.layer_norm_epsilon)
    parameters.ignore("mtp.")
    rope = no_rotation()
    layers: list[Layer] = []
    for number, kind in enumerate(hf.layer_types):
        layer = parameters.under(f"backbone.layers.{number}")
        norm, under = RmsNorm(layer, "norm", config.hidden_size, config.rms_norm_eps), layer.under("mixer")
        if kind in ("mlp", "moe"):
            # Joins the mixer before it, as in other families.
            if not layers or not isinstance(mixer := layers[-1], MixerLayer):
                raise ModelError(f"layer {number} of layers_block_type, {kind}, does not follow a mixer")
            feed_forward = _feed_forward(config, under, kind)
            layers[-1] = DecoderLayer(mixer.norm, mixer.attention, norm, feed_forward)
        elif kind == "linear_attention":
            layers.append(MixerLayer(norm, _mamba(config, under, len(layers))))
        elif kind == "full_attention":
            attention = llama_attention(
                config, under, len(layers), rope, options=NONE, qkv_bias=False, output_bias=False
            )
            layers.append(MixerLayer(norm, attention))
        else:
            raise ModelError(f"layers_block_type has {kind!r}, which is not supported")
    return Decoder(config, parameters.named(_NAMES), layers)


def _mamba(config: ModelConfig, parameters: Parameters, index: int) -> Mamba2:
    hf = config.hf
    return Mamba2(
        parameters,
        index,
        config.hidden_size,
        Mamba2Shape(hf.mamba_num_heads, hf.mamba_head_dim, hf.n_groups, hf.ssm_state_size, hf.conv_kernel),
        config.rms_norm_eps,
        bias=hf.use_bias,
        convolution_bias=hf.use_conv_bias,
        step_limits=(hf.time_step_min, math.inf),
    )


def _feed_forward(config: ModelConfig, parameters: Parameters, kind: str) -> FeedForward:
    hf, hidden = config.hf, config.hidden_size
    if kind == "mlp":
        return Mlp(parameters, hidden, hf.intermediate_size, "relu2", bias=hf.mlp_bias)
    inner = hf.moe_shared_expert_intermediate_size
    shared = parameters.under("shared_experts")
    return Mixture(
        MoeGate(
            parameters, "gate", hidden, hf.n_routed_experts, routing(config), correction=True, float32=True
        ),
        Experts(
            parameters.under("experts"),
            hf.n_routed_experts,
            hidden,
            hf.moe_intermediate_size,
            projections=("up_proj", "down_proj"),
            activation="relu2",
        ),
        Mlp(shared, hidden, inner, "relu2", bias=hf.mlp_bias, reduce=False),
    )
