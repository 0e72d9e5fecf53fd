"""Mixtures of experts as a CUDA graph can hold them. Needs a GPU: import it where one is in use."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.layers.experts import ClampedSwiglu, Mixture


def device_mixture(mixture: Mixture) -> Callable[[torch.Tensor], torch.Tensor]:
    """The mixture as a function of x [tokens, hidden], at least one, to [tokens, hidden]: by kernels that
    read the chosen experts only; where they do not know the mixture, every expert computes every token."""
    problem = why_no_kernels(mixture)
    if problem is None:
        from baton.models.fused_mixture import FusedMixture

        fused = FusedMixture(mixture)
        return lambda x: fused.parts(x).sum(0)
    return lambda x: _dense(mixture, x)


def why_no_kernels(mixture: Mixture) -> str | None:
    """Why `FusedMixture` does not take the mixture; None: it does."""
    experts, shared = mixture.experts, mixture.shared
    if not experts.computable:
        return "its experts stay quantized to 4 bits"
    if experts.gate_up.dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels do not compute {str(experts.gate_up.dtype).removeprefix('torch.')}"
    if experts.inner % 8 or experts.gate_up.shape[2] % 8:
        return "its sizes are not multiples of 8"
    if experts.activation != "silu" and not isinstance(experts.activation, ClampedSwiglu):
        return "its experts have an activation that the kernels do not know"
    if shared is not None and (
        shared.activation != "silu" or (shared.down.weight is None and shared.down.quantized is None)
    ):
        return "its shared expert is not a plain one"
    return None


def _dense(mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
    out = mixture.experts.dense(x, *mixture.router(x)).to(x.dtype)
    return out if mixture.shared is None else mixture.shared.add_to(out, x)
