"""GGUF's blocks that a CPU computes with: groups of columns with a scale, of 4 bits with a least value too.

The layouts are ggml's (ggml-common.h: block_q4_0, block_q4_1, block_q4_K, block_q6_K, block_q8_0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.layers.quantization.quantized_tensor import QuantizedTensor

_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Parts of blocks [n, bytes]: codes [n, groups, group]; scale and least value [n, groups], float32. Without
least values codes are int8."""


def decode(kind: str, rows: torch.Tensor) -> QuantizedTensor:
    """uint8 [out, bytes], rows of whole blocks of a type in `BLOCKS`."""
    block, outputs = BLOCKS[kind], len(rows)
    codes, scale, least = block.parts(rows.reshape(-1, block.size))
    if least is None:
        return QuantizedTensor(codes.reshape(outputs, -1), scale.reshape(outputs, -1), block.group)
    # A group of one value has no scale: its codes become 0, and least = (0 - 1) * -least.
    flat = scale == 0
    codes = codes.masked_fill(flat[..., None], 0)
    scale = torch.where(flat, -least, scale)
    zero = torch.where(flat, torch.ones_like(least), -least / torch.where(flat, 1, scale))
    return QuantizedTensor(
        codes.reshape(outputs, -1), scale.reshape(outputs, -1), block.group, zero.reshape(outputs, -1)
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
    data = blocks[:, 16:].reshape(-1, 4, 1, 32)
    codes = torch.cat((data & 15, data >> 4), 2).reshape(-1, 8, 32)
    return codes, _float16(blocks, 0) * scales, _float16(blocks, 2) * leasts.float().neg_()


def _q6_k(blocks: torch.Tensor) -> _Parts:
    """Sixteen groups of 16, two halves of 128 codes: low halves of bytes, high ones, and two bits of each
    code in further bytes; scales are int8."""
    low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    fours = torch.cat((low & 15, low >> 4), 2).reshape(-1, 2, 4, 32)
    twos = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    codes = (fours | twos << 4).view(torch.int8).sub_(32).reshape(-1, 16, 16)
    return codes, _float16(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8), None


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return blocks[:, 2:].contiguous().view(torch.int8)[:, None], _float16(blocks, 0), None


@dataclass(frozen=True, slots=True)
class Block:
    """A type of blocks. `size`: bytes; `bits`: of a code in memory; `group`: columns that share a scale."""

    size: int
    parts: Callable[[torch.Tensor], _Parts]
    bits: int = 4
    group: int = 32


BLOCKS = {
    "Q4_0": Block(18, _q4_0),
    "Q4_1": Block(20, _q4_1),
    "Q4_K": Block(144, _q4_k),
    "Q6_K": Block(210, _q6_k, 8, 16),
    "Q8_0": Block(34, _q8_0, 8),
}
