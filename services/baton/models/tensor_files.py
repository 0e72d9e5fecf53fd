"""The files that hold a checkpoint's tensors, as the loader reads them: safetensors, or one GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from baton.checkpoint_limits import read_json
from baton.layers.quantization.quantized_tensor import CheckpointFormat, Parts
from baton.layers.tensor_parallel import NO_CUTS, Cuts
from baton.models.config import ModelError
from baton.models.gguf_checkpoint import GgufTensors
from baton.models.mxfp4 import Mxfp4Tensors
from baton.models.packed_experts import PackedExperts, are_packed
from baton.models.quantization_config import quantization_config, read_format
from baton.models.quantized_file import QuantizedFile


class TensorFile(Protocol):
    """Methods raise CheckpointError if the file cannot be read. Threads may read at the same time."""

    path: Path

    def shapes(self) -> dict[str, list[int]]:
        """Shapes of all tensors, by the names of Hugging Face checkpoints."""
        ...

    def quantized(self) -> Collection[str]:
        """Names of the matrices that can be read as they are quantized."""
        ...

    def read(
        self, names: Collection[str], whole: Collection[str], cuts: Cuts = NO_CUTS, kept: Collection[str] = ()
    ) -> Parts:
        """Reads these tensors in turn, each in one or several parts along its first axis: name, where the
        part begins, part. One part at a time is in memory. Those named in `whole` come in one part,
        quantized ones always do. Of those in `cuts`, which are in `whole` too, only that is returned;
        quantized ones come as if there were none. `kept`: will be kept in groups of 4 bits; blocks of
        a GGUF file that are such come quantized, and dequantized otherwise."""
        ...

    def sample(self, update: Callable[[bytes], None]) -> None:
        """Calls `update` with what tells the file's tensors from others: 64 bytes from the start, middle and
        end of each, and the file's header if that says more than the names and shapes."""
        ...


def tensor_files(path: Path) -> list[TensorFile]:
    """Files of a checkpoint: a directory, or a GGUF file. Raises CheckpointError when one is missing, or
    cannot be read."""
    if path.is_file():
        return [GgufTensors(path)]
    files = [SafetensorsFile(file) for file in file_names(path)]
    format = stored_format(path)
    if format is not None:
        where = {name: file for file in files for name in file.shapes()}
        return [QuantizedFile(file, where, format) for file in files]
    if any(name.endswith("_blocks") for file in files for name in file.shapes()):
        return [Mxfp4Tensors(file, files) for file in files]
    kind = read_json(path / "config.json").get("model_type", "")
    if kind != "gpt_oss" and are_packed(files):  # whose own layout it is
        return [PackedExperts(file, kind) for file in files]
    return [*files]


def stored_format(path: Path) -> CheckpointFormat | None:
    """Storage format of a checkpoint's quantized matrices. Raises CheckpointError for one that is not
    supported."""
    if path.is_file():
        return None
    return read_format(quantization_config(path))


def file_names(path: Path) -> list[Path]:
    """A checkpoint's safetensors files. Raises ModelError when one is missing."""
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelError(f"{index} is damaged: weight_map does not name the file of each tensor")
        if outside := [name for name in names.values() if Path(name).name != name]:
            raise ModelError(f"{index} names {outside[0]!r}, which is no file beside it; get it again")
        files = [path / name for name in sorted(set(names.values()))]
    elif single.is_file():
        files = [single]
    else:
        raise ModelError(f"{path} has no model.safetensors; only safetensors and GGUF files are read")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing")
    return files


WRAPPED = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
"""How names of a language model's tensors start inside a wrapper, and by itself."""


def _unwrapped(name: str) -> str:
    for start, plain in WRAPPED.items():
        if name.startswith(start):
            return plain + name[len(start) :]
    return name


class SafetensorsFile:
    """One of a checkpoint's safetensors files; a TensorFile. The language model of a wrapper has the names
    that it has by itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def shapes(self) -> dict[str, list[int]]:
        return {name: tensors.get_slice(stored).get_shape() for name, stored, tensors in self._tensors()}

    def quantized(self) -> Collection[str]:
        return ()

    def read(
        self, names: Collection[str], whole: Collection[str], cuts: Cuts = NO_CUTS, kept: Collection[str] = ()
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Reads tensors; of one that is cut, nothing else is read."""
        wanted = set(names)
        for name, stored, tensors in self._tensors():
            if name not in wanted:
                continue
            if name not in cuts:
                yield name, 0, tensors.get_tensor(stored)
                continue
            part, cut = tensors.get_slice(stored), cuts[name]
            axes = (slice(None),) * cut.axis
            pieces = [part[(*axes, slice(first, first + count))] for first, count in cut.spans]
            yield name, 0, pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.axis)

    def _tensors(self) -> Iterator[tuple[str, str, Any]]:
        """Each tensor's name, its name in the file, and the open file."""
        try:
            with safe_open(self.path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    yield _unwrapped(name), name, tensors
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.path} cannot be read: {error}") from error

    def sample(self, update: Callable[[bytes], None]) -> None:
        with self.path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > 100_000_000:
                raise ModelError(f"{self.path} is not a safetensors file")
            header = stream.read(size)
            update(header)
            for name, entry in sorted(json.loads(header).items()):
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                for offset in (begin, (begin + end) // 2, max(begin, end - 64)):
                    stream.seek(8 + size + offset)
                    update(stream.read(min(64, end - offset)))
