"""Triton: what experts' kernels do with gate and up. Needs a GPU: import it where one is in use."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.layers.moe import ClampedSwiglu, Experts


@triton.jit
def gated(gate, up, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """float32: silu(gate) * up, or gpt-oss' activation: `experts.ClampedSwiglu`."""
    if CLAMPED:
        # As torch's clamp does, they keep what is no number.
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1
        return gate / (1 + tl.exp(-ALPHA * gate)) * up
    else:
        return gate / (1 + tl.exp(-gate)) * up


def gating(experts: Experts) -> dict[str, bool | float]:
    """Arguments of `gated`."""
    kind = experts.activation
    if isinstance(kind, ClampedSwiglu):
        return {"CLAMPED": True, "ALPHA": kind.alpha, "LIMIT": kind.limit}
    return {"CLAMPED": False, "ALPHA": 1.0, "LIMIT": 0.0}
