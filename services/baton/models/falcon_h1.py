"""Falcon-H1 (TII, arXiv:2507.22448): Mamba-2 and attention side by side in each layer; factors of nearly all
that is projected."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from baton.layers.attention import AttentionModule, AttentionOptions
from baton.layers.batch import Batch
from baton.layers.mamba2 import Mamba2, Mamba2Shape
from baton.layers.mlp import GatedMlp
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.models.config import ModelConfig, ModelError, make_rope, require_silu
from baton.models.decoder import Decoder, Layer
from baton.models.llama import llama_attention


class ScaledMamba2(Mamba2):
    """What is projected, and what comes out, is multiplied by factors."""

    factors: tuple[float, Sequence[float], float]
    """Factors of the input, of gates, values, keys, queries and steps, and of the output."""

    def project(self, x: torch.Tensor) -> torch.Tensor:
        shape, (before, each, _) = self.shape, self.factors
        per_group = shape.groups * shape.state_dim
        projected = self.input(x * before)
        sizes = [shape.inner, shape.inner, per_group, per_group, shape.heads]
        for part, factor in zip(torch.split(projected, sizes, -1), each, strict=True):
            part *= factor
        return projected

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return residual + self(x, batch) * self.factors[2]


class ScaledMlp(GatedMlp):
    """Gates, and what comes out, are multiplied by factors."""

    factors: tuple[float, float]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self._activation(gate * self.factors[0]).mul_(up)) * self.factors[1]


class MambaBranch:
    """The half of a layer that keeps a state."""

    mixture: None = None

    def __init__(self, norm: RmsNorm, mamba: ScaledMamba2) -> None:
        self._norm, self.attention = norm, mamba
        self.normalized: torch.Tensor | None = None
        """What the other half takes, of the step that is computed."""

    def __call__(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        self.normalized = self._norm(hidden)
        return self.attention.add_to(hidden, self.normalized, batch)


class AttentionBranch:
    """The half of a layer that keeps keys and values, and the feed-forward layer behind both."""

    mixture: None = None

    def __init__(
        self,
        beside: MambaBranch,
        attention: AttentionModule,
        factors: tuple[float, float],
        norm: RmsNorm,
        feed_forward: ScaledMlp,
    ) -> None:
        """`factors`: of what goes into attention, and of what comes out."""
        self._beside, self.attention, self._factors = beside, attention, factors
        self._norm, self._feed_forward = norm, feed_forward

    def __call__(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        x, self._beside.normalized = self._beside.normalized, None
        assert x is not None
        before, behind = self._factors
        hidden = hidden + self.attention(x * before, batch) * behind
        return hidden + self._feed_forward(self._norm(hidden))


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    """Each layer of the checkpoint is two here, which keep what is theirs. Raises ModelError."""
    require_silu(config)
    hf, hidden, eps = config.hf, config.hidden_size, config.rms_norm_eps
    if hf.mamba_rms_norm and hf.mamba_norm_before_gate:
        raise ModelError("mamba_norm_before_gate of FalconH1ForCausalLM is not supported")
    rope = make_rope(config)
    options = AttentionOptions(scale=config.head_dim**-0.5 * hf.key_multiplier)
    layers: list[Layer] = []
    for number in range(config.num_layers):
        layer = parameters.under(f"model.layers.{number}")
        mamba = MambaBranch(
            RmsNorm(layer, "input_layernorm", hidden, eps), _mamba(config, layer.under("mamba"), 2 * number)
        )
        mlp = ScaledMlp(layer.under("feed_forward"), hidden, hf.intermediate_size, bias=hf.mlp_bias)
        mlp.factors = hf.mlp_multipliers[0], hf.mlp_multipliers[1]
        attention = AttentionBranch(
            mamba,
            llama_attention(config, layer.under("self_attn"), 2 * number + 1, rope, options=options),
            (hf.attention_in_multiplier, hf.attention_out_multiplier),
            RmsNorm(layer, "pre_ff_layernorm", hidden, eps),
            mlp,
        )
        layers += mamba, attention
    return Decoder(
        config,
        parameters.named({"model.norm": "model.final_layernorm"}),
        layers,
        embedding_scale=hf.embedding_multiplier,
        logit_divisor=1 / hf.lm_head_multiplier,
    )


def _mamba(config: ModelConfig, parameters: Parameters, index: int) -> ScaledMamba2:
    hf = config.hf
    mamba = ScaledMamba2(
        parameters,
        index,
        config.hidden_size,
        Mamba2Shape(hf.mamba_n_heads, hf.mamba_d_head, hf.mamba_n_groups, hf.mamba_d_state, hf.mamba_d_conv),
        config.rms_norm_eps,
        bias=hf.mamba_proj_bias,
        output_bias=hf.projectors_bias,
        convolution_bias=hf.mamba_conv_bias,
        step_limits=hf.time_step_limit or (0.0, math.inf),
        norm=hf.mamba_rms_norm,
    )
    mamba.factors = hf.ssm_in_multiplier, hf.ssm_multipliers, hf.ssm_out_multiplier
    return mamba
