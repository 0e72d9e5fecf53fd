"""MXFP4 tensors of gpt-oss checkpoints, dequantized: OCP Microscaling Formats (MX) Specification 1.0.

32 neighbours of a row share a scale, a power of two with the exponent scale - 127. Two values are a byte, the
first in its low half: a sign and one of eight magnitudes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from baton.layers.quantization.quantized_tensor import NONE_KEPT, Kept
from baton.layers.tensor_parallel import NO_CUTS, Cuts
from baton.models.config import ModelError

if TYPE_CHECKING:
    from baton.models.tensor_files import SafetensorsFile

BLOCK = 32
_ONE_AT_A_TIME = threading.Lock()
"""A layer's experts are gigabytes."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [..., blocks of a row, 16] and uint8 [..., blocks of a row] -> bfloat16 [..., row], exact"""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=torch.bfloat16)
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), -1).flatten(-2)
    exponents = (scales.to(torch.int32) - 127).unsqueeze(-1)
    return torch.ldexp(values[pairs.int()], exponents).to(torch.bfloat16).flatten(-2)


class Mxfp4Tensors:
    """A safetensors file whose NAME_blocks and NAME_scales are read as NAME, [experts, columns, rows]; a
    TensorFile."""

    def __init__(self, file: SafetensorsFile, files: Sequence[SafetensorsFile]) -> None:
        """`files`: all of the checkpoint; a tensor's scales may be in another one than its blocks."""
        self.path = file.path
        self._file, self._files = file, files

    def shapes(self) -> dict[str, list[int]]:
        found = {}
        for name, shape in self._file.shapes().items():
            if name.endswith("_blocks"):
                experts, rows, blocks, _ = shape
                found[name.removesuffix("_blocks")] = [experts, blocks * BLOCK, rows]
            elif not name.endswith("_scales"):
                found[name] = shape
        return found

    def quantized(self) -> Collection[str]:
        return ()

    def read(
        self, names: Collection[str], whole: Collection[str], cuts: Cuts = NO_CUTS, kept: Kept = NONE_KEPT
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        packed = {f"{name}_blocks": name for name in names}
        for stored, start, tensor in self._file.read([*names, *packed], whole, cuts):
            if stored in packed:
                scales = self._scales(packed[stored])
                with _ONE_AT_A_TIME:
                    experts = [dequantize(*each) for each in zip(tensor, scales, strict=True)]
                    name, merged = packed[stored], torch.stack(experts).transpose(1, 2)
                    yield name, 0, cuts[name].of(merged) if name in cuts else merged
            else:
                yield stored, start, tensor

    def _scales(self, name: str) -> torch.Tensor:
        for file in self._files:
            for _, _, scales in file.read([f"{name}_scales"], ()):
                return scales
        raise ModelError(f"{self.path.parent} lacks tensor {name}_scales")

    def sample(self, update: Callable[[bytes], None]) -> None:
        self._file.sample(update)
