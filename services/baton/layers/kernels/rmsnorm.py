"""RMSNorm by sgl_kernel's own kernels.

Its Python functions of these names call FlashInfer's instead wherever that is installed, and those compile at
first use. Needs a Hopper GPU (launches overlap): import it where one is in use.
"""

from __future__ import annotations

import sgl_kernel  # noqa: F401  (registers the operators)
import torch

_OVERLAP = True
"""The kernel may launch before the previous one has ended (programmatic dependent launch)."""


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[rows, columns], [columns] -> [rows, columns], float16 or bfloat16."""
    out = torch.empty_like(x)
    torch.ops.sgl_kernel.rmsnorm.default(out, x, weight, eps, _OVERLAP)
    return out


def fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """`residual` becomes `residual` + `x`, and `x` [rows, columns] its norm."""
    torch.ops.sgl_kernel.fused_add_rmsnorm.default(x, residual, weight, eps, _OVERLAP)
