"""Models in GGUF files: their configuration, and their tensors under the names of Hugging Face checkpoints.

transformers' own GGUF reader is not used: it ignores `rope.scaling.*`, `rope_freqs` and
`attention.key_length`, and unpacks the whole file at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.gguf_file import PIECE, GgufFile, opened
from baton.layers.quantization.gguf import BLOCKS, decode
from baton.layers.quantization.quantized_tensor import NONE_KEPT, Kept, Parts, QuantizedTensor
from baton.layers.quantization.weight_method import WeightMethod
from baton.layers.tensor_parallel import NO_CUTS, Cuts
from baton.model_path import CheckpointError
from baton.models.gguf_families import family_of
from baton.models.gguf_family import LAYER, OTHERS, FloatArray, IntArray, common, largest, layers

_CONFIGURATION = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that are read as part of the configuration."""


def read_hf_config(file: GgufFile) -> Any:
    """The transformers configuration of the model in a file. Raises CheckpointError."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = family_of(file)
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} lacks tensor token_embd.weight")
    options = {"model_type": family.model_type, **common(file), **family.options(file)}
    kind = options.pop("model_type")
    return AutoConfig.for_model(kind, architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]], **options)


class _Rows:
    """Where a tensor of a Hugging Face checkpoint comes from: a tensor of the file, or a part of it."""

    def __init__(
        self,
        file: GgufFile,
        name: str,
        expert: int | None = None,
        rows: IntArray | None = None,
        columns: IntArray | None = None,
        shape: tuple[int, ...] | None = None,
        value: Callable[[FloatArray], FloatArray] | None = None,
    ) -> None:
        """`expert`: of those in the tensor; otherwise see `Change`."""
        self._file, self._name, self._expert, self._order = file, name, expert, rows
        self._columns, self._value = columns, value
        stored = file.shape(name)[0 if expert is None else 1 :]
        stored = stored if rows is None else (len(rows), *stored[1:])
        self.shape = shape or stored
        self._reshaped = self.shape != stored
        kind = file.kind(name)
        as_it_is = len(stored) == 2 and value is None and not self._reshaped
        self.kind = kind if as_it_is and (columns is None or _in_groups(columns, kind)) else None
        """The type of its blocks, where they can be read as they are."""

    def read(self, rows: slice) -> FloatArray:
        if self._reshaped:  # these are small
            piece = self._file.unpack(self._name, self._index(slice(None))).reshape(self.shape)[rows]
        else:
            piece = self._file.unpack(self._name, self._index(rows))
        piece = piece if self._columns is None else piece[:, self._columns]
        return piece if self._value is None else self._value(piece)

    def quantized(self) -> QuantizedTensor:
        """[rows, columns], of a type in BLOCKS."""
        assert self.kind is not None
        tensor = decode(self.kind, torch.from_numpy(np.require(self.blocks(), requirements=("C", "W"))))
        if self._columns is None:
            return tensor
        groups = self._columns[:: tensor.group] // tensor.group
        scale, zero = tensor.scale[:, groups], None if tensor.zero is None else tensor.zero[:, groups]
        return QuantizedTensor(tensor.codes[:, self._columns], scale, tensor.group, zero)

    def blocks(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """[rows, bytes]"""
        return self._file.blocks(self._name, self._index(slice(None)))

    def _index(self, rows: slice) -> Any:
        index: Any = rows if self._order is None else self._order[rows]
        return index if self._expert is None else (self._expert, index)


def _in_groups(columns: IntArray, kind: str) -> bool:
    """Whether columns of a group, which have a scale, stay one."""
    if kind not in BLOCKS or len(columns) % (size := BLOCKS[kind].group):
        return False
    first = columns[::size]
    return not (first % size).any() and bool(
        (columns.reshape(-1, size) - first[:, None] == np.arange(size)).all()
    )


class _Below(_Rows):
    """The rows of one tensor, and below them those of another."""

    def __init__(self, file: GgufFile, names: Sequence[str]) -> None:
        super().__init__(file, names[0])
        self._parts = [_Rows(file, name) for name in names]
        kinds = {part.kind for part in self._parts}
        self.kind = kinds.pop() if len(kinds) == 1 else None
        self.shape = (sum(part.shape[0] for part in self._parts), *self.shape[1:])

    def read(self, rows: slice) -> FloatArray:
        first, pieces = 0, []
        for part in self._parts:
            taken = slice(max(0, rows.start - first), min(part.shape[0], rows.stop - first))
            if taken.start < taken.stop:
                pieces.append(part.read(taken))
            first += part.shape[0]
        return np.concatenate(pieces)

    def blocks(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.concatenate([part.blocks() for part in self._parts])


class _Half(_Rows):
    """The gate (0) or the up projection (1) of one expert, which the file has below each other."""

    def __init__(self, file: GgufFile, name: str, expert: int, half: int) -> None:
        super().__init__(file, name, expert)
        rows = self.shape[0] // 2
        self.shape = (rows, *self.shape[1:])
        self._order = np.arange(half * rows, (half + 1) * rows)


class _LatentUp(_Rows):
    """DeepSeek's projection from latents: the keys' part, which the file has transposed, and the values' of
    each head in turn."""

    def __init__(self, file: GgufFile, keys: str, values: str) -> None:
        super().__init__(file, keys)
        self._names = keys, values
        (heads, rank, plain), (_, value, _) = file.shape(keys), file.shape(values)
        self.shape = (heads * (plain + value), rank)

    def read(self, rows: slice) -> FloatArray:
        keys, values = (self._file.unpack(name, slice(None)) for name in self._names)
        merged: FloatArray = np.concatenate((keys.swapaxes(1, 2), values), 1).reshape(self.shape)
        return merged[rows]


def _halves(count: int, heads: int) -> IntArray:
    """Where the rows of a Hugging Face checkpoint's tensor are in one whose heads' rows are interleaved.

    Rotation pairs each dimension with the one half a head away in Hugging Face checkpoints, and with the
    next one in "llama" files: convert_hf_to_gguf.py interleaves the two halves of each head's rows.
    """
    return np.arange(count).reshape(heads, count // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _minus_one(piece: FloatArray) -> FloatArray:
    return piece - np.float32(1)


def _sources(file: GgufFile) -> dict[str, _Rows]:
    """By the names of Hugging Face checkpoints; an unknown tensor keeps its name."""
    family, count = family_of(file), layers(file)
    heads = largest(file, "attention.head_count")
    of_heads = {"attn_q": heads, "attn_k": largest(file, "attention.head_count_kv", heads)}
    names, others, changes = {**LAYER, **family.names}, {**OTHERS, **family.others}, family.changes(file)
    below = {name: pair for pair in family.merged for name in pair[:2]}
    projections = dict(zip(("gate", "up", "down"), family.experts[1:], strict=True))
    found: dict[str, _Rows] = {}
    for name in file.tensors:
        if name in _CONFIGURATION:
            continue
        value = _minus_one if family.norms_plus_one and name.endswith("norm.weight") else None
        if not (match := re.fullmatch(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias))?", name)):
            part, _, kind = name.rpartition(".")
            found[f"{others[part]}.{kind}" if part in others else name] = _Rows(file, name, value=value)
            continue
        layer, part, kind = match.groups()
        if int(layer) >= count:
            continue  # it predicts further tokens
        prefix, suffix = f"{family.prefix}.{layer}.", name.split(".", 2)[2]
        experts = f"{prefix}{family.experts[0]}."
        if suffix in changes:
            for change in changes[suffix]:
                found[prefix + change.name] = _Rows(
                    file, name, None, change.rows, change.columns, change.shape, change.value
                )
        elif suffix in below and all(f"blk.{layer}.{each}" in file.tensors for each in below[suffix][:2]):
            *pair, merged = below[suffix]
            found[prefix + merged] = _Below(file, [f"blk.{layer}.{each}" for each in pair])
        elif part in ("attn_k_b", "attn_v_b") and family.model_type == "deepseek_v2":
            keys, values = (f"blk.{layer}.{each}.weight" for each in ("attn_k_b", "attn_v_b"))
            if f"blk.{layer}.attn_kv_b.weight" not in file.tensors:
                if not {keys, values} <= file.tensors.keys():
                    raise CheckpointError(f"{file.path} has {name} but not both of {keys} and {values}")
                found[f"{prefix}self_attn.kv_b_proj.weight"] = _LatentUp(file, keys, values)
        elif match := re.fullmatch(r"ffn_(gate|up|down)_exps", part):
            for expert in range(file.shape(name)[0]):
                found[f"{experts}{expert}.{projections[match[1]]}.{kind}"] = _Rows(file, name, expert)
        elif part == "ffn_gate_up_exps":
            for expert in range(file.shape(name)[0]):
                for half, each in enumerate(("gate", "up")):
                    source = _Half(file, name, expert, half)
                    found[f"{experts}{expert}.{projections[each]}.{kind}"] = source
        elif match := re.fullmatch(r"ffn_(gate|up|down)\.(\d+)", part):  # files before April 2024
            found[f"{experts}{match[2]}.{projections[match[1]]}.{kind}"] = _Rows(file, name)
        else:
            known = names.get(suffix) or (f"{names[part]}.{kind}" if part in names else None)
            rows = None
            if family.interleaved and part in of_heads:
                rows = _halves(file.shape(name)[0], of_heads[part])
            found[prefix + known if known else name] = _Rows(file, name, rows=rows, value=value)
    return found


class GgufTensors:
    """A file's tensors for the loader (`TensorFile`), unpacked in pieces when they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = opened(path)
        self._sources = _sources(self._file)

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(source.shape) for name, source in self._sources.items()}

    def quantized(self) -> dict[str, WeightMethod]:
        """The matrices that can be read as they are quantized, by name."""
        return {
            name: WeightMethod(block.bits, block.group)
            for name, source in self._sources.items()
            if (block := BLOCKS.get(source.kind or "")) is not None
        }

    def read(
        self, names: Collection[str], whole: Collection[str], cuts: Cuts = NO_CUTS, kept: Kept = NONE_KEPT
    ) -> Parts:
        quantized = self.quantized()
        for name in names:
            source = self._sources[name]
            method = quantized.get(name)
            if source.kind and method is not None and kept.get(name) == (method.bits, method.group):
                yield name, 0, source.quantized()
                continue
            count, *inner = source.shape
            step = count if name in whole else max(1, PIECE // math.prod(inner))
            for start in range(0, count, step):
                piece = source.read(slice(start, start + step))
                tensor = torch.from_numpy(np.require(piece, requirements="W"))
                yield name, start, cuts[name].of(tensor) if name in cuts else tensor

    def sample(self, update: Callable[[bytes], None]) -> None:
        for name in sorted(self._file.tensors):
            data = self._file.tensors[name].data.reshape(-1).view(np.uint8)
            for offset in (0, data.size // 2, max(0, data.size - 64)):
                update(data[offset : offset + 64].tobytes())
