"""A model's tensors: allocated as its modules declare them, each noted by its name in the checkpoint.

Loader, memory estimate, dummy weights and fingerprint read these declarations and nothing else of a model.
On the `meta` device nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from baton.layers.linear import Linear
from baton.layers.quantization.weight_method import QuantizedWeight, WeightMethod, WeightPlan
from baton.layers.tensor_parallel import ONE_RANK, Communicator, IndexRange, Shard, TensorSlice
from baton.model_path import CheckpointError

Fill = Literal["normal", "ones", "zeros"]


@dataclass(slots=True)
class Parameter:
    """One tensor of the checkpoint and where it goes."""

    target: torch.Tensor | QuantizedWeight
    """A view of the model's memory. A norm that all heads share is broadcast to it."""
    shape: torch.Size
    """In the checkpoint."""
    fill: Fill = "normal"
    """The parameter's contents in a model of random weights."""
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None
    """From the checkpoint's tensor, on the host, to what is copied to `target`. That of a matrix only
    reorders its rows."""
    cut: TensorSlice | None = None
    """The part of the checkpoint's tensor that is read and, if `convert` says so, converted; None: all of
    it."""


@dataclass(slots=True)
class Parameters:
    """Declares the tensors below a prefix of the checkpoint's names."""

    dtype: torch.dtype
    device: torch.device
    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the checkpoint calls modules and tensors directly below the prefix that have other names here."""
    table: dict[str, Parameter] = field(default_factory=dict)
    """By the checkpoint's name; shared by all prefixes."""
    linears: list[Linear] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """How names start of tensors that a checkpoint may hold and the model does not use."""
    elsewhere: set[str] = field(default_factory=set)
    """Tensors that only other ranks use."""
    plan: WeightPlan = field(default_factory=WeightPlan)
    shard: Shard = ONE_RANK
    communicator: Communicator | None = None
    """Communicator of the ranks that share the model; None: there is one."""

    def under(self, name: str) -> Parameters:
        """The parameters below `name`."""
        return replace(self, prefix=f"{self._full(name)}.", names={})

    def named(self, names: Mapping[str, str]) -> Parameters:
        """These parameters, some of which the checkpoint calls otherwise: name here -> name there."""
        return replace(self, names=names)

    def _full(self, name: str) -> str:
        """The checkpoint's name of a tensor or module."""
        for here, there in self.names.items():
            if name == here or name.startswith(f"{here}."):
                return self.prefix + there + name[len(here) :]
        return self.prefix + name

    def ignore(self, prefix: str) -> None:
        """Tensors below this prefix may be in the checkpoint and are not read."""
        self.ignored.append(self._full(prefix))

    def leave(self, name: str) -> None:
        """Another rank reads this tensor."""
        self.elsewhere.add(self._full(name))

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
        cut: TensorSlice | None = None,
    ) -> None:
        """`shape`: in the checkpoint, where it is not the target's. Raises CheckpointError if it is empty."""
        declared = shape or torch.Size(target.shape)
        if not declared.numel():
            raise CheckpointError(
                f"by config.json the tensor {self._full(name)} is empty: its shape is {list(declared)}"
            )
        self.table[self._full(name)] = Parameter(target, declared, fill, convert, cut)

    def tensor(
        self, name: str, *shape: int, fill: Fill = "normal", cut: TensorSlice | None = None
    ) -> torch.Tensor:
        """A tensor that lies in memory as it does in the checkpoint, where it has this shape."""
        whole = torch.Size(shape)
        target = self.empty(*(whole if cut is None else cut.shape(whole)))
        self.add(name, target, shape=whole, fill=fill, cut=cut)
        return target

    def linear(
        self,
        parts: Mapping[str, int],
        inputs: int,
        bias: bool = False,
        convert: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
        *,
        quantize: bool = True,
        rows: Mapping[str, Sequence[IndexRange]] | None = None,
        columns: IndexRange | None = None,
        reduce: bool = True,
        memory: QuantizedWeight | None = None,
    ) -> Linear:
        """Projections of one input, merged: name -> outputs. `convert`: reorders the rows of a part's weight
        and bias, by name. `quantize`: may be quantized while loading; `memory`: where it lies if it is, else
        in memory of its own.

        With several ranks: `rows`: those of each part that this rank holds, where it does not hold all.
        `columns`: the inputs that it has, of whose products the sum over all ranks is taken unless `reduce`
        is false; the bias is then rank 0's.
        """
        single = self.shard.size == 1
        cuts = {
            name: None if single else TensorSlice(0, tuple(spans)) for name, spans in (rows or {}).items()
        }
        sizes = [
            size if (cut := cuts.get(name)) is None else cut.shape(torch.Size([size]))[0]
            for name, size in parts.items()
        ]
        shapes = {name: torch.Size([size, inputs]) for name, size in parts.items()}
        if columns is not None and not single:
            assert rows is None
            cuts = dict.fromkeys(parts, TensorSlice(1, (columns,)))
            whole, inputs = inputs, columns[1]
            self._check_columns(whole, inputs, next(iter(parts)))
        else:
            whole = inputs
        plan = self.plan if quantize or self.plan.stored is not None else WeightPlan()
        names = [self._full(f"{name}.weight") for name in parts]
        method = plan.method_of(names, inputs)
        held = [cut for name in parts if (cut := cuts.get(name)) is not None]
        if columns is not None and not single and method is None and plan.method_of(names, whole) is not None:
            self.check_whole_blocks(names[0])
        if method is not None and not _whole_blocks(method, sizes, bool(convert), held):
            if _whole_blocks(method, list(parts.values()), bool(convert), ()):
                self.check_whole_blocks(names[0])
            method = None
        weight: torch.Tensor | QuantizedWeight | None = memory
        if weight is None and method is not None:
            weight = QuantizedWeight(method, sum(sizes), inputs, self.device)
        elif weight is None:
            weight = self.empty(sum(sizes), inputs)
        convert = convert or {}
        first = 0
        for (name, shape), size in zip(shapes.items(), sizes, strict=True):
            conversion = convert.get(name)
            if isinstance(weight, QuantizedWeight):
                part: torch.Tensor | QuantizedWeight = weight.rows(first, size)
            else:
                part, conversion = weight[first : first + size], plan.rounding(conversion)
            self.add(f"{name}.weight", part, shape=shape, convert=conversion, cut=cuts.get(name))
            first += size
        summed = columns is not None and not single
        biases = self._biases(shapes, sizes, convert, {} if summed else cuts) if bias else None
        if summed and self.shard.rank:
            biases = None  # rank 0 adds it
        linear = Linear(weight, biases, self.communicator if summed and reduce else None)
        self.linears.append(linear)
        return linear

    def check_whole_blocks(self, name: str) -> None:
        """Raises CheckpointError for a matrix that stays quantized on one rank but, on a GPU, not on several
        that divide blocks with one scale: it would take twice the memory, and its products would round
        otherwise than those of workers of other sizes, with which pages are shared."""
        if self.plan.on_gpu:
            raise CheckpointError(
                f"{name}: {self.shard.size} ranks take blocks apart that share a scale; lower --tp, or keep "
                "weights in 16 bits with --quantization none"
            )

    def _check_columns(self, whole: int, columns: int, name: str) -> None:
        """Raises CheckpointError for a matrix that is quantized while loading, but not if it is divided:
        workers of other sizes, with which pages are shared, would have other weights."""
        method = self.plan.method
        if method is not None and self.plan.online and method.fits(whole) and not method.fits(columns):
            raise CheckpointError(
                f"{self._full(name)}: {columns} columns a rank cannot be quantized to {method.name}; lower "
                "--tp or leave out --quantization"
            )

    def _biases(
        self,
        shapes: Mapping[str, torch.Size],
        sizes: Sequence[int],
        convert: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
        cuts: Mapping[str, TensorSlice | None],
    ) -> torch.Tensor:
        biases = self.empty(sum(sizes))
        for (name, shape), view in zip(shapes.items(), torch.split(biases, list(sizes)), strict=True):
            conversion, cut = convert.get(name), cuts.get(name)
            self.add(f"{name}.bias", view, shape=shape[:1], fill="zeros", convert=conversion, cut=cut)
        return biases

    @property
    def nbytes(self) -> int:
        return sum(parameter.target.nbytes for parameter in self.table.values())


def _whole_blocks(
    method: WeightMethod, sizes: Sequence[int], reordered: bool, held: Sequence[TensorSlice]
) -> bool:
    """Whether blocks that share a scale stay whole: none reaches across merged matrices, and neither
    reordering nor what this rank holds takes one apart."""
    if method.rows == 1:
        return True
    ends = [(cut, end) for cut in held for span in cut.spans for end in span]
    whole = not any(end % (method.group if cut.axis else method.rows) for cut, end in ends)
    return whole and not (reordered or any(size % method.rows for size in sizes[:-1]))
