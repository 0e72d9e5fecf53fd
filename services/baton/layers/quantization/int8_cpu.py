"""Product of float32 rows with a matrix of 8-bit integers on a CPU, compiled by Numba for its processor.

Steps of few tokens are bound by reading the weights, which take a quarter of float32's bytes here. A code
becomes float32 in a register, so that no more is rounded than with float32 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
MOST_ROWS = 64
"""For more, torch multiplies by a float32 copy of the codes, of so many at a time:"""
PIECE = 2**22
GRAIN = 2**21
"""Multiplications that a further thread is worth: they take 0.15 ms, to wake it up to 0.05 ms."""


class Int8Matrix:
    """values[o, i] = codes[o, i] * scale[o]"""

    __slots__ = ("_arrays", "_codes", "_kernel", "_scale")

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """int8 [out, in] and float32 [out], both contiguous and kept."""
        self._codes, self._scale = codes, scale
        self._arrays = codes.numpy(), scale.numpy()
        self._kernel = _compiled()

    def multiply(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, in] -> x values^T [rows, out], or the sum with `add_to`, which is overwritten; float32 and
        contiguous. A row's products are added up in another order beside others than alone."""
        outputs, inputs = self._codes.shape
        rows = x.shape[0]
        out = torch.empty(rows, outputs) if add_to is None else add_to
        if rows > MOST_ROWS:
            step = max(1, PIECE // inputs)
            for part in (slice(first, first + step) for first in range(0, outputs, step)):
                product = (x @ self._codes[part].float().t()).mul_(self._scale[part])
                out[:, part] = product if add_to is None else product.add_(add_to[:, part])
            return out
        arguments = x.numpy(), *self._arrays, out.numpy(), add_to is not None
        share_outputs(self._kernel, arguments, outputs, rows * outputs * inputs)
        return out


def share_outputs(
    kernel: Callable[..., None], arguments: tuple[Any, ...], outputs: int, products: int
) -> None:
    """Calls `kernel` with the arguments and a range of outputs in each of several threads. `products`:
    multiplications of them all."""
    threads = min(torch.get_num_threads(), products // GRAIN, outputs)
    if threads < 2:
        kernel(*arguments, 0, outputs)
        return
    bounds = [outputs * part // threads for part in range(threads + 1)]
    mine, *others = pairwise(bounds)
    waiting = [_threads().submit(kernel, *arguments, *part) for part in others]
    kernel(*arguments, *mine)
    for each in waiting:
        each.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="int8")


@cache
def _compiled() -> Callable[..., None]:
    signature = "void(float32[:,::1], int8[:,::1], float32[::1], float32[:,::1], boolean, intp, intp)"
    return compiled(_outputs, signature)


def compiled(function: Callable[..., None], signature: str) -> Callable[..., None]:
    """Takes a second or two, once for each user of a machine. Numba takes 100 MB of a process's memory."""
    import numba

    # With NaN and infinity as they are: no `nnan` and `ninf`.
    options: dict[str, Any] = {"fastmath": {"reassoc", "contract"}, "nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):  # what is compiled can be kept neither beside this file nor in a home
        return numba.njit(signature, **options)(function)


def _outputs(x: Array, codes: Array, scale: Array, out: Array, add: bool, first: int, last: int) -> None:
    """Some of the outputs. Four rows share what it takes to read a code and convert it."""
    rows, inputs = x.shape
    fours = rows // 4 * 4
    for row in range(0, fours, 4):
        for output in range(first, last):
            a = b = c = d = np.float32(0)
            for i in range(inputs):
                code = np.float32(codes[output, i])
                a += x[row, i] * code
                b += x[row + 1, i] * code
                c += x[row + 2, i] * code
                d += x[row + 3, i] * code
            for next_row, total in ((row, a), (row + 1, b), (row + 2, c), (row + 3, d)):
                before = out[next_row, output] if add else np.float32(0)
                out[next_row, output] = before + total * scale[output]
    for row in range(fours, rows):
        for output in range(first, last):
            a = np.float32(0)
            for i in range(inputs):
                a += x[row, i] * np.float32(codes[output, i])
            before = out[row, output] if add else np.float32(0)
            out[row, output] = before + a * scale[output]
