"""Products of matrices of 8 bits with activations of 8 bits, by sgl_kernel's kernels or cuBLASLt. Needs a
Hopper GPU: import it where one is in use."""

from __future__ import annotations

import torch
from sgl_kernel import fp8_blockwise_scaled_mm, fp8_scaled_mm, int8_scaled_mm

from baton.layers.kernels.quantize import Quantized
from baton.layers.quantization.weight_method import QuantizedWeight

CUBLAS_TOKENS = 4096
"""Tokens from which on cuBLASLt multiplies FP8 with a scale a row: on an H200 a layer of 8B takes 2,535
instead of 2,744 us at 8,192 tokens, 1,268 instead of 1,338 at 4,096."""


def scaled_product(
    x: Quantized, weight: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b, [tokens, out] in `dtype`, of x quantized likewise."""
    codes = weight.codes.t()
    out: torch.Tensor
    if weight.block > 1:
        out = fp8_blockwise_scaled_mm(x.codes, codes, x.scale, weight.scale.t(), dtype)
        return out if bias is None else out.add_(bias)
    many = len(x.codes) >= CUBLAS_TOKENS
    if many and weight.floating and dtype == torch.bfloat16 and bias is None:  # what torch has it for
        scales = x.scale, weight.scale.view(1, -1)
        out = torch._scaled_mm(x.codes, codes, *scales, out_dtype=dtype, use_fast_accum=True)
        return out
    product = fp8_scaled_mm if weight.floating else int8_scaled_mm
    out = product(x.codes, codes, x.scale, weight.scale, dtype, bias)
    return out
