"""FP8 (E4M3) as DeepSeek-V3, Qwen3-FP8 and vLLM's checkpoints store it (quant_method "fp8").

Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433; blocks: DeepSeek-AI, arXiv:2412.19437.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from baton.layers.quantization.quantized_tensor import QuantizedTensor, by_row

E4M3_MAX = 448.0
IGNORED = ("input_scale", "k_scale", "v_scale")
"""Scales of activations, and of an FP8 KV cache: not used."""


class Fp8:
    """One scale a tensor, or one a row."""

    name = "FP8 with a scale for each tensor or row (fp8)"
    marker, weight = "weight_scale", "weight"
    needed, optional = ("weight_scale",), IGNORED

    def shape(self, stored: Sequence[int]) -> list[int]:
        return list(stored)

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
        codes = check_e4m3(tensors["weight"])
        return QuantizedTensor(codes, by_row(tensors["weight_scale"], len(codes)), codes.shape[1])


class Fp8Blocks:
    """One scale a block."""

    marker, weight = "weight_scale_inv", "weight"
    needed, optional = ("weight_scale_inv",), IGNORED

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.name = f"FP8 in blocks of {rows} x {columns} (fp8)"

    def shape(self, stored: Sequence[int]) -> list[int]:
        return list(stored)

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
        codes = check_e4m3(tensors["weight"])
        scale = of_blocks(tensors["weight_scale_inv"], codes.shape, self.rows, self.columns)
        return QuantizedTensor(codes, scale, self.columns)


def of_blocks(scale: torch.Tensor, shape: Sequence[int], rows: int, columns: int) -> torch.Tensor:
    """Scales of blocks as float32 [out, groups]. Raises ValueError."""
    expected = [-(-shape[0] // rows), -(-shape[1] // columns)]
    if list(scale.shape) != expected:
        raise ValueError(f"scales of shape {list(scale.shape)} instead of {expected}")
    return scale.float().repeat_interleave(rows, 0)[: shape[0]]


def check_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Raises ValueError for codes that are not E4M3."""
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"codes are {str(codes.dtype).removeprefix('torch.')} instead of float8_e4m3fn")
    return codes


def quantize(weight: torch.Tensor) -> QuantizedTensor:
    """[out, in] with a scale a row, rounded to nearest."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / E4M3_MAX
    codes = (weight.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return QuantizedTensor(codes, scale, weight.shape[1])


def quantize_blocks(weight: torch.Tensor, rows: int, columns: int) -> QuantizedTensor:
    """[out, in] with a scale a block, rounded to nearest."""
    size = weight.shape
    padded = F.pad(weight.float(), (0, -size[1] % columns, 0, -size[0] % rows)).abs()
    blocks = padded.view(padded.shape[0] // rows, rows, -1, columns).amax((1, 3))
    scale = of_blocks(blocks.clamp_min_(1e-12).div_(E4M3_MAX), size, rows, columns)
    values = weight.float() / scale.repeat_interleave(columns, 1)[:, : size[1]]
    return QuantizedTensor(values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale, columns)
