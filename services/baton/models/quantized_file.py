"""A safetensors file with quantized matrices, read as the matrices that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from baton.layers.quantization.fp8 import IGNORED
from baton.layers.quantization.quantized_tensor import NONE_KEPT, CheckpointFormat, Kept, Parts
from baton.layers.tensor_parallel import NO_CUTS, Cuts
from baton.models.config import ModelError

if TYPE_CHECKING:
    from baton.models.tensor_files import SafetensorsFile

_UNUSED = tuple(f".{end}" for end in IGNORED)


class QuantizedFile:
    """A TensorFile. A matrix whose tensors are in several files belongs to the one with its codes."""

    def __init__(
        self, file: SafetensorsFile, where: Mapping[str, SafetensorsFile], format: CheckpointFormat
    ) -> None:
        """`where`: the file of each tensor of the checkpoint."""
        self.path = file.path
        self._file, self._where, self._format = file, where, format
        self._beside = {*format.needed, *format.optional}

    def _quantized(self, name: str) -> bool:
        """Whether a tensor holds the codes of a quantized matrix."""
        base, _, end = name.rpartition(".")
        return end == self._format.weight and f"{base}.{self._format.marker}" in self._where

    def quantized(self) -> frozenset[str]:
        """Names of the quantized matrices, as in `shapes`."""
        names = [name for name in self._file.shapes() if self._quantized(name)]
        return frozenset(f"{name.removesuffix(self._format.weight)}weight" for name in names)

    def shapes(self) -> dict[str, list[int]]:
        found = {}
        for name, shape in self._file.shapes().items():
            base, _, end = name.rpartition(".")
            if self._quantized(name):
                found[f"{base}.weight"] = self._format.shape(shape)
            elif not name.endswith(_UNUSED) and not (
                end in self._beside and f"{base}.{self._format.weight}" in self._where
            ):
                found[name] = shape
        return found

    def read(
        self, names: Collection[str], whole: Collection[str], cuts: Cuts = NO_CUTS, kept: Kept = NONE_KEPT
    ) -> Parts:
        stored = {}
        for name in names:
            base, _, end = name.rpartition(".")
            codes = f"{base}.{self._format.weight}"
            stored[codes if end == "weight" and self._quantized(codes) else name] = name
        beside = self._read_beside([name for name in stored if self._quantized(name)])
        plain = {name: cut for name, cut in cuts.items() if name in stored and not self._quantized(name)}
        for stored_name, start, tensor in self._file.read(stored, whole, plain):
            name = stored[stored_name]
            if not self._quantized(stored_name):
                yield name, start, tensor
                continue
            try:
                yield name, 0, self._format.decode({self._format.weight: tensor, **beside.pop(stored_name)})
            except (ValueError, RuntimeError) as error:
                raise ModelError(
                    f"tensor {stored_name} is not as {self._format.name} asks: {error}"
                ) from error

    def _read_beside(self, codes: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
        """What lies beside these codes, by the ends of the names."""
        names_by_file: dict[str, dict[str, tuple[str, str]]] = {}
        for stored_name in codes:
            base = stored_name.removesuffix(self._format.weight)
            for end in self._beside:
                file = self._where.get(base + end)
                if file is not None:
                    names_by_file.setdefault(str(file.path), {})[base + end] = stored_name, end
                elif end in self._format.needed:
                    raise ModelError(f"{self.path.parent} lacks tensor {base}{end}")
        found: dict[str, dict[str, torch.Tensor]] = {stored_name: {} for stored_name in codes}
        for names in names_by_file.values():
            file = self._where[next(iter(names))]
            for name, _, tensor in file.read(names, ()):
                stored_name, end = names[name]
                found[stored_name][end] = tensor
        return found

    def sample(self, update: Callable[[bytes], None]) -> None:
        self._file.sample(update)
