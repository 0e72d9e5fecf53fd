"""GGUF's blocks of 4 bits that are groups of 32 columns with a scale and a least value: Q4_0, Q4_1 and Q4_K.

The layouts are ggml's (ggml-common.h: block_q4_0, block_q4_1, block_q4_K).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.layers.quantization.quantized_tensor import QuantizedTensor

GROUP = 32

_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Parts of blocks [n, bytes]: codes [n, groups, 32]; scale and least value [n, groups], float32"""


def decode(kind: str, rows: torch.Tensor) -> QuantizedTensor:
    """uint8 [out, bytes], rows of whole blocks of a type in `BLOCKS`."""
    size, parts = BLOCKS[kind]
    codes, scale, least = parts(rows.reshape(-1, size))
    # A group of one value has no scale: its codes become 0, and least = (0 - 1) * -least.
    flat = scale == 0
    codes = codes.masked_fill(flat[..., None], 0)
    scale = torch.where(flat, -least, scale)
    zero = torch.where(flat, torch.ones_like(least), -least / torch.where(flat, 1, scale))
    outputs = len(rows)
    return QuantizedTensor(
        codes.reshape(outputs, -1), scale.reshape(outputs, -1), GROUP, zero.reshape(outputs, -1)
    )


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """The halves of each byte from the first on: its low four bits, then its high ones. uint8 [n, 1, 32]"""
    data = blocks[:, first:]
    return torch.cat((data & 15, data >> 4), 1)[:, None]


def _float16(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """float32 [n, 1]"""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _q4_0(blocks: torch.Tensor) -> _Parts:
    scale = _float16(blocks, 0)
    return _halves(blocks, 2), scale, scale * -8


def _q4_1(blocks: torch.Tensor) -> _Parts:
    return _halves(blocks, 4), _float16(blocks, 0), _float16(blocks, 2)


def _q4_k(blocks: torch.Tensor) -> _Parts:
    """Eight groups, whose scales and least values are numbers of 6 bits: four of each in the low bits of
    bytes, the others' low halves in further bytes, their high bits above the former."""
    low, high, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, both & 15 | low >> 6 << 4), 1)
    leasts = torch.cat((high & 63, both >> 4 | high >> 6 << 4), 1)
    data = blocks[:, 16:].reshape(-1, 4, 1, GROUP)
    codes = torch.cat((data & 15, data >> 4), 2).reshape(-1, 8, GROUP)
    return codes, _float16(blocks, 0) * scales, _float16(blocks, 2) * leasts.float().neg_()


BLOCKS: dict[str, tuple[int, Callable[[torch.Tensor], _Parts]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
}
"""Bytes of a block, and what takes it apart."""
