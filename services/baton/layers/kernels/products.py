"""Products of matrices of 8 bits with activations of 8 bits, by sgl_kernel's kernels. Needs a Hopper GPU:
import it where one is in use."""

from __future__ import annotations

import torch
from sgl_kernel import fp8_blockwise_scaled_mm, fp8_scaled_mm, int8_scaled_mm

from baton.layers.kernels.quantize import Quantized
from baton.layers.weights.method import QuantizedWeight


def scaled_product(
    x: Quantized, weight: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b, [tokens, out] in `dtype`, of x quantized likewise."""
    codes = weight.codes.t()
    out: torch.Tensor
    if weight.block > 1:
        out = fp8_blockwise_scaled_mm(x.codes, codes, x.scale, weight.scale.t(), dtype)
        return out if bias is None else out.add_(bias)
    product = fp8_scaled_mm if weight.floating else int8_scaled_mm
    out = product(x.codes, codes, x.scale, weight.scale, dtype, bias)
    return out
