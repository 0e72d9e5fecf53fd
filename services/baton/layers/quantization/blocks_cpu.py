"""Product of float32 rows with a matrix of 4 or 8 bits, whose groups of columns have scales, on a CPU.

Compiled by Numba for its processor. A code becomes float32 in a register, so that no more is rounded than
with float32 weights. Outputs are neighbours in memory: a group's products are added up for many outputs at
once, each in its own part of a register, and multiplied by their scales then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from baton.layers.quantization.int8_cpu import MOST_ROWS, PIECE, Array, compiled, share_outputs
from baton.layers.quantization.quantized_tensor import QuantizedTensor

WORD = 8
"""Codes of 4 bits in a word of 32."""


class BlockMatrix:
    """values[o, i] = codes[o, i] * scale[o, g] + least[o, g], where g is the group of column i."""

    __slots__ = ("_arrays", "_kernel", "_outputs", "_parts")

    def __init__(self, weight: QuantizedTensor) -> None:
        """Codes of 4 bits where there are zeros, int8 where not. Groups that 8 divides."""
        outputs, inputs = weight.shape
        groups, group = inputs // weight.group, weight.group
        width = 128 if outputs % 128 == 0 else 64
        rows = -outputs % width

        def by_outputs(each: torch.Tensor) -> torch.Tensor:
            """[out, any] -> [blocks of outputs, any, width]"""
            padded = F.pad(each, (0, 0, 0, rows))
            return padded.view(-1, width, each.shape[1]).transpose(1, 2).contiguous()

        codes, scale = by_outputs(weight.codes), by_outputs(weight.scale)
        if weight.zero is None:
            least = scale[:0]
            codes = codes.view(len(codes), groups, group, width)
        else:
            least = by_outputs(-weight.zero * weight.scale)
            parts = codes.view(len(codes), groups, group // WORD, WORD, width)
            codes = torch.zeros_like(parts[:, :, :, 0], dtype=torch.int32)
            for nibble in range(WORD):
                codes |= parts[:, :, :, nibble].to(torch.int32) << 4 * nibble
        self._outputs, self._parts = outputs, (codes, scale, least)
        self._arrays = codes.numpy(), scale.numpy(), least.numpy()
        self._kernel = _of_8_bits() if weight.zero is None else _of_4_bits()

    def multiply(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, in] -> x values^T [rows, out], or the sum with `add_to`, which is overwritten; float32 and
        contiguous. A row's products are added up in another order beside others than alone."""
        rows, inputs = x.shape
        blocks, _, width = self._parts[1].shape
        padded = blocks * width > self._outputs
        adds = add_to is not None and not padded
        out = add_to if add_to is not None and adds else torch.empty(rows, blocks * width)
        if rows > MOST_ROWS:
            step = max(1, PIECE // (inputs * width))
            for first in range(0, blocks, step):
                part = slice(first * width, (first + step) * width)
                product = (x @ self._values(slice(first, first + step))).transpose(0, 1).flatten(1)
                out[:, part] = product.add_(out[:, part]) if adds else product
        else:
            arguments = x.numpy(), *self._arrays, out.numpy(), adds
            share_outputs(self._kernel, arguments, blocks, rows * blocks * width * inputs)
        if not padded:
            return out
        out = out[:, : self._outputs]
        return out.contiguous() if add_to is None else add_to.add_(out)

    def _values(self, blocks: slice) -> torch.Tensor:
        """float32 [blocks, in, width]"""
        codes, scale, least = (each[blocks] for each in self._parts)
        if not len(least):
            return (codes.float() * scale[:, :, None]).flatten(1, 2)
        shifts = 4 * torch.arange(WORD, dtype=torch.int32)[:, None]
        values = (codes[:, :, :, None] >> shifts & 15).flatten(2, 3).float()
        return values.mul_(scale[:, :, None]).add_(least[:, :, None]).flatten(1, 2)


_SCALES = "float32[:,:,::1]"
_SIGNATURE = (
    f"void(float32[:,::1], {{}}[:,:,:,::1], {_SCALES}, {_SCALES}, float32[:,::1], boolean, intp, intp)"
)


@cache
def _of_8_bits() -> Callable[..., None]:
    return compiled(_blocks_of_8_bits, _SIGNATURE.format("int8"))


@cache
def _of_4_bits() -> Callable[..., None]:
    return compiled(_blocks_of_4_bits, _SIGNATURE.format("int32"))


def _blocks_of_8_bits(
    x: Array, codes: Array, scale: Array, least: Array, out: Array, add: bool, first: int, last: int
) -> None:
    """Some blocks of outputs. x [rows, in], codes [blocks, groups, group, width], scale [blocks, groups,
    width], out [rows, blocks * width]. Four rows share what it takes to read a code and convert it."""
    rows, fours = len(x), len(x) // 4 * 4
    _, groups, group, width = codes.shape
    part = np.empty((4, width), np.float32)
    p, q, r, s = part
    for block in range(first, last):
        row, outputs = 0, slice(block * width, (block + 1) * width)
        while row < rows:
            count = 4 if row < fours else 1
            if not add:
                out[row : row + count, outputs] = np.float32(0)
            for g in range(groups):
                part[:count] = np.float32(0)
                for i in range(0, group, 4):
                    c0, c1, c2, c3 = codes[block, g, i : i + 4]
                    at = slice(g * group + i, g * group + i + 4)
                    x0, x1, x2, x3 = x[row, at]
                    if count == 1:
                        for j in range(width):
                            p[j] += (x0 * np.float32(c0[j]) + x1 * np.float32(c1[j])) + (
                                x2 * np.float32(c2[j]) + x3 * np.float32(c3[j])
                            )
                        continue
                    y0, y1, y2, y3 = x[row + 1, at]
                    u0, u1, u2, u3 = x[row + 2, at]
                    v0, v1, v2, v3 = x[row + 3, at]
                    for j in range(width):
                        d0, d1 = np.float32(c0[j]), np.float32(c1[j])
                        d2, d3 = np.float32(c2[j]), np.float32(c3[j])
                        p[j] += x0 * d0 + x1 * d1 + x2 * d2 + x3 * d3
                        q[j] += y0 * d0 + y1 * d1 + y2 * d2 + y3 * d3
                        r[j] += u0 * d0 + u1 * d1 + u2 * d2 + u3 * d3
                        s[j] += v0 * d0 + v1 * d1 + v2 * d2 + v3 * d3
                for m in range(count):
                    total, sums, scales = out[row + m, outputs], part[m], scale[block, g]
                    for j in range(width):
                        total[j] += sums[j] * scales[j]
            row += count


def _blocks_of_4_bits(
    x: Array, codes: Array, scale: Array, least: Array, out: Array, add: bool, first: int, last: int
) -> None:
    """Multiplies by words of eight codes of 4 bits: codes [blocks, groups, words, width]."""
    rows, fours = len(x), len(x) // 4 * 4
    _, groups, words, width = codes.shape
    part = np.empty((4, width), np.float32)
    p, q, r, s = part
    for block in range(first, last):
        row, outputs = 0, slice(block * width, (block + 1) * width)
        while row < rows:
            count = 4 if row < fours else 1
            if not add:
                out[row : row + count, outputs] = np.float32(0)
            for g in range(groups):
                part[:count] = np.float32(0)
                for word in range(words):
                    c, i = codes[block, g, word], (g * words + word) * 8
                    if count == 1:
                        x0, x1, x2, x3 = x[row, i : i + 4]
                        y0, y1, y2, y3 = x[row, i + 4 : i + 8]
                        for j in range(width):
                            w = c[j]
                            p[j] += (
                                (x0 * np.float32(w & 15) + x1 * np.float32(w >> 4 & 15))
                                + (x2 * np.float32(w >> 8 & 15) + x3 * np.float32(w >> 12 & 15))
                            ) + (
                                (y0 * np.float32(w >> 16 & 15) + y1 * np.float32(w >> 20 & 15))
                                + (y2 * np.float32(w >> 24 & 15) + y3 * np.float32(w >> 28 & 15))
                            )
                        continue
                    for half in range(0, 8, 4):
                        at = slice(i + half, i + half + 4)
                        x0, x1, x2, x3 = x[row, at]
                        y0, y1, y2, y3 = x[row + 1, at]
                        u0, u1, u2, u3 = x[row + 2, at]
                        v0, v1, v2, v3 = x[row + 3, at]
                        for j in range(width):
                            w = c[j] >> 4 * half
                            d0, d1 = np.float32(w & 15), np.float32(w >> 4 & 15)
                            d2, d3 = np.float32(w >> 8 & 15), np.float32(w >> 12 & 15)
                            p[j] += x0 * d0 + x1 * d1 + x2 * d2 + x3 * d3
                            q[j] += y0 * d0 + y1 * d1 + y2 * d2 + y3 * d3
                            r[j] += u0 * d0 + u1 * d1 + u2 * d2 + u3 * d3
                            s[j] += v0 * d0 + v1 * d1 + v2 * d2 + v3 * d3
                for m in range(count):
                    inputs = np.float32(0)
                    for i in range(g * words * 8, (g + 1) * words * 8):
                        inputs += x[row + m, i]
                    total, sums = out[row + m, outputs], part[m]
                    scales, leasts = scale[block, g], least[block, g]
                    for j in range(width):
                        total[j] += sums[j] * scales[j] + inputs * leasts[j]
            row += count
