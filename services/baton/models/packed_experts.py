"""Experts in one tensor a projection, as transformers 5 keeps them in memory and some files store them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from baton.layers.quantization.quantized_tensor import NONE_KEPT, Kept, Parts, QuantizedTensor
from baton.layers.tensor_parallel import NO_CUTS, Cuts, TensorSlice

if TYPE_CHECKING:
    from baton.models.tensor_files import TensorFile

_PACKED = re.compile(
    r"(.*\.)(?:(\w+\.experts)\.|block_sparse_moe\.(?=\w+_linear))"
    r"(gate_up_proj|input_linear\.weight|down_proj|output_linear\.weight)"
)
"""The names in transformers, and Granite's."""
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def are_packed(files: Collection[TensorFile]) -> bool:
    return any(_PACKED.fullmatch(name) for file in files for name in file.shapes())


class PackedExperts:
    """A TensorFile that shows each expert's matrices under the names that published checkpoints have."""

    def __init__(self, file: TensorFile, model_type: str, hidden: int = 0) -> None:
        """`hidden`: the model's hidden size."""
        self.path, self._file = file.path, file
        self._mixtral = model_type == "mixtral"
        self._turned: set[str] = set()
        """Tensors whose matrices are stored as [in, out]: Llama 4's, and Qwen3-VL's but where transformers 5
        has saved them."""
        self._of: dict[str, tuple[str, int, slice]] = {}
        """Name of an expert's matrix -> the tensor that holds it, number of the expert, rows."""
        self._shapes: dict[str, list[int]] = {}
        self._stored: dict[str, str] = {}
        for name, shape in file.shapes().items():
            match = _PACKED.fullmatch(name)
            if match is None or len(shape) != 3:
                usual = re.sub(r"\.mlp\.gate\.", ".block_sparse_moe.gate.", name) if self._mixtral else name
                self._shapes[usual], self._stored[usual] = shape, name
                continue
            inner_first = match[3] in ("gate_up_proj", "input_linear.weight")
            parts = ("gate_proj", "up_proj") if inner_first else ("down_proj",)
            count, outputs, columns = shape
            inputs_first = outputs == hidden if inner_first else columns == hidden
            told = model_type == "qwen3_vl_moe" and inputs_first and outputs != columns
            if told or model_type in ("llama4", "llama4_text"):
                self._turned.add(name)
                outputs, columns = columns, outputs
            rows = outputs // len(parts)
            inside = None if self._mixtral else match[2]
            base = f"{match[1]}{inside or 'block_sparse_moe.experts'}"
            for at, part in enumerate(parts):
                kind = _MIXTRAL[part] if self._mixtral else part
                for expert in range(count):
                    usual = f"{base}.{expert}.{kind}.weight"
                    self._shapes[usual] = [rows, columns]
                    self._of[usual] = name, expert, slice(at * rows, (at + 1) * rows)

    def shapes(self) -> dict[str, list[int]]:
        return self._shapes

    def quantized(self) -> Collection[str]:
        return self._file.quantized()

    def read(
        self, names: Collection[str], whole: Collection[str], cuts: Cuts = NO_CUTS, kept: Kept = NONE_KEPT
    ) -> Parts:
        """Reads tensors; of one with all experts no more than the one that is asked for."""
        plain = {self._stored[name]: name for name in names if name not in self._of}
        stored_cuts = {stored: cuts[name] for stored, name in plain.items() if name in cuts}
        for stored, start, tensor in self._file.read(plain, plain, stored_cuts):
            yield plain[stored], start, tensor
        together: dict[tuple[str, int], list[tuple[str, slice]]] = {}
        for name in names:
            if name in self._of:
                stored, expert, rows = self._of[name]
                together.setdefault((stored, expert), []).append((name, rows))
        for (stored, expert), parts in together.items():
            for _, _, tensor in self._file.read([stored], [stored], {stored: TensorSlice(0, ((expert, 1),))}):
                assert not isinstance(tensor, QuantizedTensor)  # formats know matrices alone
                both = tensor[0].t() if stored in self._turned else tensor[0]
                for name, rows in parts:
                    matrix = both[rows]
                    yield name, 0, cuts[name].of(matrix) if name in cuts else matrix

    def sample(self, update: Callable[[bytes], None]) -> None:
        self._file.sample(update)
