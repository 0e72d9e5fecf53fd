"""GGUF files, llama.cpp's format: metadata and packed tensors, by the `gguf` package. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize

from baton.model_path import CheckpointError, split_name

SUPPORTED = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
"""Types of tensors that are read: those that the `gguf` package unpacks and llama.cpp writes."""

PIECE = 2**20
"""Weights that are unpacked at a time: unpacking takes about 20 bytes of memory a weight."""

CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6
"""Values in tokenizer.ggml.token_type."""

_END_NAMES = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"),
        *("<|return|>", "<|call|>"),
    )
)
"""Special tokens that end a generation by their name, as in llama.cpp (src/llama-vocab.cpp): files often
state only one of a model's end tokens."""


class GgufFile:
    """One file, or the files of a split model by the first of them, mapped into memory.

    Raises CheckpointError with one line for a file that cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        first = _open(path)
        readers = [(path, first), *_further_parts(path, first)]
        self.metadata: dict[str, Any] = first.values
        self.tensors: dict[str, ReaderTensor] = {}
        self.header = b"".join(reader.data[: reader.data_offset].tobytes() for _, reader in readers)
        """Everything before the tensors."""
        for part, reader in readers:
            for tensor in reader.tensors:
                if tensor.name in self.tensors:
                    raise CheckpointError(f"{part} holds tensor {tensor.name}, as an earlier part does")
                if tensor.tensor_type.name not in SUPPORTED:
                    raise CheckpointError(
                        f"{part}: tensor {tensor.name} has type {tensor.tensor_type.name}: not supported; "
                        f"supported are {', '.join(SUPPORTED)}"
                    )
                self.tensors[tensor.name] = tensor
        stated = self.metadata.get("split.tensors.count", len(self.tensors))
        if stated != len(self.tensors):
            raise CheckpointError(
                f"{path} says that the model has {stated} tensors, its parts hold {len(self.tensors)}; "
                "get all parts again, from one place"
            )

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """Metadata `key`; "*." at its beginning stands for the architecture. Raises CheckpointError if it is
        not there and there is no default, and if it is not of this kind (a float may be an int)."""
        if key.startswith("*."):
            key = f"{self.value('general.architecture', str)}{key[1:]}"
        found = self.metadata.get(key, default)
        if found is None:
            raise CheckpointError(f"{self.path} lacks {key}")
        if found is not default and not isinstance(found, (int, float) if kind is float else kind):
            raise CheckpointError(f"{self.path}: {key} is no {kind.__name__}")
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outermost dimension first."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def unpack(self, name: str, rows: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Some rows of a tensor (elements, if it has one dimension), by an index or a slice of the first axis
        or by those of the first two: float32."""
        tensor = self.tensors[name]
        unpacked: np.ndarray[Any, np.dtype[np.float32]] = dequantize(tensor.data[rows], tensor.tensor_type)
        return unpacked

    def kind(self, name: str) -> str:
        """A tensor's type, such as Q4_K."""
        return str(self.tensors[name].tensor_type.name)

    def blocks(self, name: str, rows: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Rows of a tensor as they are stored: uint8 [rows, bytes]."""
        stored: np.ndarray[Any, np.dtype[np.uint8]] = self.tensors[name].data[rows]
        return stored

    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: those that the file states, and those whose names say it."""
        tokens = self.value("tokenizer.ggml.tokens", list)
        types = self.value("tokenizer.ggml.token_type", list, [])
        found = {
            self.metadata[key]
            for name in ("eos", "eot", "eom")
            if (key := f"tokenizer.ggml.{name}_token_id") in self.metadata
        }
        found.update(
            index
            for index, (token, type) in enumerate(zip(tokens, types, strict=False))
            if type == CONTROL and token in _END_NAMES
        )
        names = {tokens[index]: index for index in found if 0 <= index < len(tokens)}
        if {"<|return|>", "<|call|>", "<|end|>"} <= names.keys():
            found.remove(names["<|end|>"])  # gpt-oss: it ends a message, and another may follow
        return tuple(sorted(found))


def opened(path: Path) -> GgufFile:
    """The last file that was opened here, if this is it and neither it nor a part has changed: reading a head
    takes a tenth of a second and more, and a worker's start asks for it ten times. Raises CheckpointError."""
    name = split_name(path.name)
    try:
        parts = [path] if name is None else sorted(path.parent.glob(f"{escape(name)}-*.gguf"))
        states = [each.stat() for each in parts]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(path, error)}") from error
    return _opened(path, tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in states))


def close_opened() -> None:
    """Frees the memory of it (11 MiB for 49,152 tokens), once nobody holds it."""
    _opened.cache_clear()


@lru_cache(maxsize=1)  # of the process: what is in it follows from the files alone
def _opened(path: Path, states: tuple[tuple[int, int, int], ...]) -> GgufFile:
    return GgufFile(path)


def _open(path: Path) -> _ArrayReader:
    try:
        with np.errstate(over="raise"):  # offsets are added in 64 bits
            reader = _ArrayReader(path)
    except Exception as error:  # the package raises whatever an arbitrary file leads it to
        raise CheckpointError(f"{path} cannot be read: {_reason(path, error)}") from error
    if reader.byte_order != "I":
        raise CheckpointError(f"{path} is big-endian; only little-endian GGUF files are read")
    end = reader.data_offset
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.data_offset):
        if tensor.data_offset < end:
            raise CheckpointError(
                f"{path} is damaged: tensor {tensor.name} lies over what is before it; get it again"
            )
        end = tensor.data_offset + tensor.n_bytes
    return reader


def _further_parts(path: Path, first: _ArrayReader) -> Iterator[tuple[Path, _ArrayReader]]:
    """All parts of a split model but the first, which is open; nothing for a model in one file."""
    count, number = first.values.get("split.count", 0), first.values.get("split.no", 0)
    if not isinstance(count, int) or not isinstance(number, int):
        raise CheckpointError(f"{path}: split.count or split.no is no int")
    if count <= 1:
        return
    name = split_name(path.name)
    names = [f"{name}-{index + 1:05}-of-{count:05}.gguf" for index in range(min(count, 10_000))]
    if name is None:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model; keep their names: NAME-00001-of-{count:05}.gguf"
        )
    if number != 0:
        raise CheckpointError(
            f"{path} is part {number + 1} of {count} of a model; give the first: {names[0]}"
        )
    for index, each in enumerate(names[1:], 1):
        part = path.with_name(each)
        if not part.is_file():
            raise CheckpointError(f"{path} is the first of {count} parts of a model, and {each} is missing")
        reader = _open(part)
        if (reader.values.get("split.no"), reader.values.get("split.count")) != (index, count):
            raise CheckpointError(f"{part} is not part {index + 1} of {count} of a model, as its name says")
        yield part, reader


class _ArrayReader(GGUFReader):
    """Reads an array at once. The parent makes several numpy arrays for each of its elements, which takes
    seconds for a vocabulary."""

    def __init__(self, path: Path) -> None:
        self.values: dict[str, Any] = {}
        """All metadata: numbers, strings and lists of them."""
        super().__init__(path)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray[Any, Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if kind == GGUFValueType.STRING:
            end = start
            view = memoryview(self.data)  # type: ignore[arg-type]
            for _ in range(length):
                end += 8 + int.from_bytes(view[end : end + 8], "little")
                if end > len(view):
                    raise IndexError(f"an array of {length} strings goes beyond the file's end")
            part = self.data[start:end]
        else:
            part = self._get(start, self.gguf_scalar_to_np[kind], length)
            if len(part) != length:
                raise IndexError(f"an array of {length} numbers goes beyond the file's end")
        return 12 + part.nbytes, [self.data[orig_offs:start], part], [1], [GGUFValueType.ARRAY, kind]

    def _push_field(self, field: Any, skip_sum: bool = False) -> int:
        self.values[field.name] = _value(field)
        return super()._push_field(field, skip_sum)


def _value(field: Any) -> Any:
    part = field.parts[field.data[0]]
    if field.types == [GGUFValueType.ARRAY, GGUFValueType.STRING]:
        strings, raw, at = [], part.tobytes(), 0
        while at < len(raw):
            end = at + 8 + int.from_bytes(raw[at : at + 8], "little")
            # Tokens of old vocabularies may be parts of characters.
            strings.append(raw[at + 8 : end].decode(errors="replace"))
            at = end
        return strings
    if field.types[0] == GGUFValueType.STRING:
        return part.tobytes().decode(errors="replace")
    return part.tolist() if field.types[0] == GGUFValueType.ARRAY else part.tolist()[0]


def _reason(path: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            return "it is not a GGUF file"
    text = " ".join(str(error).split())
    if "GGMLQuantizationType" in text:
        return f"a tensor is of an unknown type ({text})"
    return f"it is truncated or damaged ({text})"
