"""Mixtures of experts as a CUDA graph can hold them. Needs a GPU: import it where one is in use."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.layers.mlp import GatedMlp
from baton.layers.moe import ClampedSwiglu, GatedExpert, Mixture


def device_mixture(mixture: Mixture) -> Callable[[torch.Tensor], torch.Tensor]:
    """The mixture as a function of x [tokens, hidden], at least one, to [tokens, hidden]: by kernels that
    read the chosen experts only; where they do not know the mixture, every expert computes every token."""
    if kernels_know(mixture):
        from baton.models.fused_mixture import FusedMixture

        fused = FusedMixture(mixture)
        return lambda x: fused.parts(x).sum(0)
    return mixture.dense


def kernels_know(mixture: Mixture) -> bool:
    """Whether `FusedMixture` computes it."""
    experts, shared = mixture.experts, mixture.shared
    if isinstance(shared, GatedExpert):
        gate, shared = shared.gate.weight, shared.mlp
        if gate is None or gate.dtype != experts.gate_up.dtype:
            return False
    sixteen = experts.gate_up.dtype in (torch.bfloat16, torch.float16)
    aligned = experts.inner % 8 == 0 and experts.gate_up.shape[2] % 8 == 0
    known = experts.activation == "silu" or isinstance(experts.activation, ClampedSwiglu)
    alike = shared is None or (isinstance(shared, GatedMlp) and shared.activation == "silu")
    return (
        mixture.plain
        and not experts.scale_inputs
        and sixteen
        and aligned
        and known
        and experts.computable
        and alike
    )
