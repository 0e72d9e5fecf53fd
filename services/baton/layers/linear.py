"""A linear layer whose weight is laid out for the processor it runs on."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_PACK_BATCH = 64
"""The batch that oneDNN chooses its weight layout for. Measured: a layout for 64 rows is as fast at 1 row as
the best, one for 1 row is up to 2 times slower at more."""


class Linear:
    """y = x W^T + b. Made from weight [out, in] and bias [out] or None, which can be filled until `pack`."""

    __slots__ = ("_packed", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight: torch.Tensor | None = weight
        self.bias = bias
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        """On a CPU: hands the weight to oneDNN in its blocked layout and drops the plain one.

        torch.nn.functional.linear takes float32 to MKL, which is slow on AMD processors: packed, a batch of
        16 rows takes a third of the time. Elsewhere, or where torch has no oneDNN, does nothing.
        """
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or not _can_pack(weight.dtype):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_BATCH)
        self.weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]"""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes y of a layer without bias into `out` [rows, out]; not on a CPU."""
        assert self.weight is not None and self.bias is None
        torch.mm(x, self.weight.t(), out=out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y, [rows, out]; `residual` may be overwritten."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")  # type: ignore[no-any-return]
        return residual.add_(self(x))


def _can_pack(dtype: torch.dtype) -> bool:
    return (
        dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
