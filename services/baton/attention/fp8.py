"""Keys and values in FP8: e4m3, divided by a scale a head, rounded to the nearest, limited."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


def quantize(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x [tokens, kv heads, head_dim], scales float32 [kv heads] -> codes uint8 of x's shape."""
    return (x.float() / scales[:, None]).clamp_(-LARGEST, LARGEST).to(E4M3).view(torch.uint8)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 codes of any shape, times scales that broadcast with it, rounded to `dtype`."""
    return codes.view(E4M3).float().mul_(scales).to(dtype)
