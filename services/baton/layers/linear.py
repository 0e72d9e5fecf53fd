"""A linear layer. On a CPU its weight gets the layout that is measured fastest.

torch.nn.functional.linear reads a weight [out, in]. Measured, 16 rows in float32: on an AMD processor
oneDNN's blocked layout takes a third of its time; on an Intel one it takes up to 3 times as long, since each
call of oneDNN costs 50 microseconds there, and the transposed weight two thirds. So it is measured here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from baton.layers.quantization.cpu import Bf16Int4, InFloat32, MakeProduct, Product, exact_products
from baton.layers.quantization.weight_method import QuantizedWeight
from baton.layers.tensor_parallel import Communicator

TYPICAL_ROWS = (1, 16)
"""Rows of decode steps. With hundreds of rows all layouts are equally fast."""
REPEATS = 40
SAMPLE = 2**23
"""Weights at most that products are tried with: in float64 they take 8 bytes each."""
BUDGET_SECONDS = 0.02
"""The processor's time for measuring all layouts with one number of rows; each is measured at least twice."""
DEQUANTIZING = 1.5
"""A product that dequantizes counts as so many times what it takes. Each worker measures by itself, and where
two products are equally fast workers would choose differently; then so do their tokens, by rounding."""
ROUNDING = 1.25
"""What a product counts that rounds activations to bfloat16, where another computes in float32."""


class Transposed:
    """[in, out]"""

    __slots__ = ("_matrix",)

    def __init__(self, weight: torch.Tensor) -> None:
        self._matrix = weight.t().contiguous()

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.mm(x, self._matrix) if bias is None else torch.addmm(bias, x, self._matrix)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        residual.addmm_(x, self._matrix)
        return residual if bias is None else residual.add_(bias)


class Blocked:
    """oneDNN's layout for a batch of 64. At 1 row it is as fast as the layout that oneDNN chooses for 1
    row, which is up to 2 times slower with more rows."""

    __slots__ = ("_matrix",)

    def __init__(self, weight: torch.Tensor) -> None:
        self._matrix = torch.ops.mkldnn._reorder_linear_weight(weight, 64)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self._matrix, bias, "none", [], "")  # type: ignore[no-any-return]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._matrix, bias, "add")  # type: ignore[no-any-return]


WeightLayout = type[Transposed] | type[Blocked]


def fastest_layout(weight: torch.Tensor) -> WeightLayout:
    """For weights of this shape and dtype, by measuring (some tens of milliseconds, more for large ones).

    With one thread, by the time that the processor gave it, and the shortest of many times: other processes
    may be running on the same cores.
    """
    if not blocked_available(weight.dtype):
        return Transposed
    layouts: tuple[WeightLayout, ...] = (Transposed, Blocked)
    return layouts[_fastest([layout(weight) for layout in layouts], weight.shape[1], weight.dtype)]


def fastest_product(weight: QuantizedWeight, dtype: torch.dtype, measure: bool = True) -> MakeProduct:
    """For quantized weights of this kind in a model of this dtype. That of 4 bits by measuring likewise, with
    a part of a large one; without measuring the first that computes with the codes, where there is one."""
    if weight.bits == 8:
        return InFloat32
    outputs, inputs = weight.shape
    most = max(64, SAMPLE // inputs // 64 * 64)
    # Kernels take numbers of outputs that 16 or 64 divide: the part is divisible like the whole.
    part = outputs if outputs <= most else most - -outputs % 64
    made = exact_products(weight.rows(0, part), dtype)
    if not measure:
        return type(made[min(1, len(made) - 1)])
    return type(made[_fastest(made, weight.shape[1], dtype, DEQUANTIZING)])


def _fastest(made: Sequence[Product], inputs: int, dtype: torch.dtype, first: float = 1.0) -> int:
    """The index of the one that takes least of typical steps; `first`: what the first one's times count."""
    if len(made) == 1:
        return 0
    costs = [0.0] * len(made)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for rows in TYPICAL_ROWS:
            times = _times(made, torch.randn(rows, inputs).to(dtype))
            least = max(min(times), 1e-9)  # 0: a clock whose ticks are longer
            costs = [cost + t / least for cost, t in zip(costs, times, strict=True)]
    finally:
        torch.set_num_threads(threads)
    costs[0] *= first
    costs = [cost * (ROUNDING if isinstance(p, Bf16Int4) else 1) for cost, p in zip(costs, made, strict=True)]
    return costs.index(min(costs))


def _times(layouts: Sequence[Product], x: torch.Tensor) -> list[float]:
    """The shortest time of each layout in seconds; measured in turns, so that a disturbance affects all."""
    times: list[list[float]] = [[] for _ in layouts]
    ending = time.thread_time() + BUDGET_SECONDS
    for repeat in range(REPEATS):
        for layout, layout_times in zip(layouts, times, strict=True):
            started = time.thread_time()
            layout.apply(x, None)
            layout_times.append(time.thread_time() - started)
        if repeat and time.thread_time() > ending:
            break
    return [min(layout_times) for layout_times in times]


def blocked_available(dtype: torch.dtype) -> bool:
    """Whether oneDNN has its layout for this dtype here: in bfloat16 it needs AVX-512 or AVX-NE-CONVERT."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear:
    """y = x W^T + b. Made from weight [out, in] and bias [out] or None, which can be filled until `pack`."""

    __slots__ = ("_communicator", "_packed", "bias", "quantized", "weight")

    def __init__(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        """`communicator`: x are this rank's inputs, and y is the sum over all ranks."""
        self.weight: torch.Tensor | None = None
        self.quantized: QuantizedWeight | None = None
        """The weight, where it stays quantized; on a CPU until it is packed."""
        if isinstance(weight, QuantizedWeight):
            self.quantized = weight
        else:
            self.weight = weight
        self.bias = bias
        self._communicator = communicator
        self._packed: Product | None = None

    def pack(self, layout: WeightLayout) -> None:
        """Converts the weight to a layout and drops the plain one. Once, and on a CPU only."""
        assert self.weight is not None
        self._packed = layout(self.weight)
        self.weight = None

    def pack_quantized(self, product: MakeProduct, dtype: torch.dtype) -> None:
        """Packs a quantized weight; `dtype` is the model's."""
        self.use(product, dtype)
        self.quantized = None

    def use(self, product: MakeProduct, dtype: torch.dtype) -> None:
        """Computes with a quantized weight by this product from now on."""
        assert self.quantized is not None
        self._packed = product(self.quantized, dtype)

    def use_kernels(self, product: Product) -> None:
        """Computes with the plain weight by this product from now on."""
        self._packed = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]"""
        return self.summed(self._product(x))

    def summed(self, y: torch.Tensor) -> torch.Tensor:
        """This rank's product -> the sum over all ranks, if each has some of the inputs alone; in place."""
        return y if self._communicator is None else self._communicator.all_reduce(y)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._packed.apply(x, self.bias)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes y of a layer without bias into `out` [rows, out]; not on a CPU."""
        assert self.bias is None
        if self.weight is None or (self._packed is not None and len(x) == 1):
            out.copy_(self(x))
        else:
            torch.mm(x, self.weight.t(), out=out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y, [rows, out]; `residual` may be overwritten."""
        if self._packed is not None and self._communicator is None:
            return self._packed.add_to(residual, x, self.bias)
        return residual.add_(self(x))
