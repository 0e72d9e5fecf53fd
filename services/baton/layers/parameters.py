"""A model's tensors: allocated as its modules declare them, each noted by its name in the checkpoint.

Loader, memory estimate, dummy weights and fingerprint read these declarations and nothing else of a model.
On the `meta` device nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from baton.layers.linear import Linear
from baton.layers.weights.method import QuantizedWeight, WeightPlan

Fill = Literal["normal", "ones", "zeros"]


@dataclass(slots=True)
class Parameter:
    """One tensor of the checkpoint and where it goes."""

    target: torch.Tensor | QuantizedWeight
    """A view of the model's memory. A norm that all heads share is broadcast to it."""
    shape: torch.Size
    """In the checkpoint."""
    fill: Fill = "normal"
    """Its contents in a model of random weights."""
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None
    """From the checkpoint's tensor, on the host, to what is copied to `target`. That of a matrix only
    reorders its rows."""


@dataclass(slots=True)
class Parameters:
    """Declares the tensors below a prefix of the checkpoint's names."""

    dtype: torch.dtype
    device: torch.device
    prefix: str = ""
    table: dict[str, Parameter] = field(default_factory=dict)
    """By the checkpoint's name; shared by all prefixes."""
    linears: list[Linear] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """How names start of tensors that a checkpoint may hold and the model does not use."""
    plan: WeightPlan = field(default_factory=WeightPlan)

    def under(self, name: str) -> Parameters:
        """Those below `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def ignore(self, prefix: str) -> None:
        """Tensors below this prefix may be in the checkpoint and are not read."""
        self.ignored.append(self.prefix + prefix)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory that `add` gives names to."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def add(
        self,
        name: str,
        target: torch.Tensor | QuantizedWeight,
        *,
        shape: torch.Size | None = None,
        fill: Fill = "normal",
        convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`shape`: in the checkpoint, where it is not the target's."""
        self.table[self.prefix + name] = Parameter(target, shape or torch.Size(target.shape), fill, convert)

    def tensor(self, name: str, *shape: int, fill: Fill = "normal") -> torch.Tensor:
        """A tensor that lies in memory as it does in the checkpoint."""
        target = self.empty(*shape)
        self.add(name, target, fill=fill)
        return target

    def linear(
        self,
        parts: Mapping[str, int],
        inputs: int,
        bias: bool = False,
        convert: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
        *,
        quantize: bool = True,
    ) -> Linear:
        """Projections of one input, merged: name -> outputs. `convert`: reorders the rows of a part's weight
        and bias, by name. `quantize`: may be quantized while loading."""
        sizes, convert = list(parts.values()), convert or {}
        plan = self.plan if quantize or self.plan.stored is not None else WeightPlan()
        method = plan.method_of([f"{self.prefix}{name}.weight" for name in parts], inputs)
        if method is not None:
            quantized, first = QuantizedWeight(method, sum(sizes), inputs, self.device), 0
            for name, size in parts.items():
                self.add(f"{name}.weight", quantized.rows(first, size), convert=convert.get(name))
                first += size
            return self._linear(quantized, parts, bias, convert)
        weight = self.empty(sum(sizes), inputs)
        for name, view in zip(parts, torch.split(weight, sizes), strict=True):
            self.add(f"{name}.weight", view, convert=plan.rounding(convert.get(name)))
        return self._linear(weight, parts, bias, convert)

    def _linear(
        self,
        weight: torch.Tensor | QuantizedWeight,
        parts: Mapping[str, int],
        bias: bool,
        convert: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    ) -> Linear:
        """With its bias declared."""
        sizes = list(parts.values())
        biases = self.empty(sum(sizes)) if bias else None
        if biases is not None:
            for name, view in zip(parts, torch.split(biases, sizes), strict=True):
                self.add(f"{name}.bias", view, fill="zeros", convert=convert.get(name))
        linear = Linear(weight, biases)
        self.linears.append(linear)
        return linear

    @property
    def nbytes(self) -> int:
        return sum(parameter.target.nbytes for parameter in self.table.values())
