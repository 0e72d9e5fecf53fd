"""The files that hold a checkpoint's tensors, as the loader reads them: safetensors, or one GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from baton.checkpoint_limits import read_json
from baton.layers.quantization.quantized_tensor import NONE_KEPT, CheckpointFormat, Kept, Parts
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
        self, names: Collection[str], whole: Collection[str], cuts: Cuts = NO_CUTS, kept: Kept = NONE_KEPT
    ) -> Parts:
        """Reads these tensors in turn, each in one or several parts along its first axis: name, where the
        part begins, part. One part at a time is in memory. Those named in `whole` come in one part,
        quantized ones always do. Of those in `cuts`, which are in `whole` too, only that is returned;
        quantized ones come as if there were none. `kept`: blocks of a GGUF file that are such groups
        come quantized, and dequantized otherwise."""
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
    files = _safetensors_files(path)
    if any(name.endswith("_blocks") for file in files for name in file.shapes()):
        return [Mxfp4Tensors(file, files) for file in files]
    return _with_single_experts(path, _with_matrices(path, files))


def _with_matrices(path: Path, files: Sequence[SafetensorsFile]) -> Sequence[TensorFile]:
    """The files, as those of the matrices that quantized tensors stand for."""
    format = stored_format(path)
    if format is None:
        return files
    where = {name: file for file in files for name in file.shapes()}
    return [QuantizedFile(file, where, format) for file in files]


def _with_single_experts(path: Path, files: Sequence[TensorFile]) -> list[TensorFile]:
    """The files, as those with tensors of single experts."""
    config = read_json(path / "config.json")
    kind = config.get("model_type", "")
    if kind != "gpt_oss" and are_packed(files):  # whose own layout it is
        hidden = config.get("text_config", config).get("hidden_size", 0)
        return [PackedExperts(file, kind, hidden) for file in files]
    return [*files]


def stored_format(path: Path) -> CheckpointFormat | None:
    """Storage format of a checkpoint's quantized matrices. Raises CheckpointError for one that is not
    supported."""
    if path.is_file():
        return None
    return read_format(quantization_config(path))


INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(model-)(\d{5})(-of-(\d{5})\.safetensors)")


def file_names(path: Path) -> list[Path]:
    """A checkpoint's safetensors files: those that its index names, the single one, or all shards. Raises
    ModelError when one is missing."""
    single = path / "model.safetensors"
    if names := _index(path):
        files = [path / name for name in sorted(set(names.values()))]
    elif single.is_file():
        files = [single]
    elif shard := next(
        filter(None, map(_SHARD.fullmatch, sorted(each.name for each in path.iterdir()))), None
    ):
        files = [path / f"{shard[1]}{number:05}{shard[3]}" for number in range(1, int(shard[4]) + 1)]
    else:
        raise ModelError(f"{path} has no model.safetensors; only safetensors and GGUF files are read")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing")
    return files


def _index(path: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file; empty: there is no index. Raises ModelError."""
    index = path / INDEX
    if not index.is_file():
        return {}
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()) or not names:
        raise ModelError(f"{index} is damaged: weight_map does not name the file of each tensor")
    if outside := [name for name in names.values() if Path(name).name != name]:
        raise ModelError(f"{index} names {outside[0]!r}, which is no file beside it; get it again")
    return names


def _safetensors_files(path: Path) -> list[SafetensorsFile]:
    index = _index(path)
    return [SafetensorsFile(file, index) for file in file_names(path)]


def stored_shapes(path: Path) -> dict[str, list[int]]:
    """Shapes of a directory's tensors by the names that they have in its files, for transformers to load.
    Raises ModelError for files that it does not load, or of which it might take another tensor."""
    files = file_names(path)
    if len(files) > 1 and not _index(path):
        raise ModelError(f"{path} has shards but no {INDEX}, which transformers' code needs; get it again")
    shapes, where = dict[str, list[int]](), dict[str, Path]()
    for file in files:
        for _, name, tensors in SafetensorsFile(file)._tensors():
            if name in where:
                raise twice(name, where[name], file)
            shapes[name], where[name] = tensors.get_slice(name).get_shape(), file
    return shapes


def twice(name: str, one: Path, other: Path) -> ModelError:
    """The error of a tensor that two files have, where nothing says which is the right one."""
    return ModelError(f"tensor {name} is in two files, {one.name} and {other.name}; get the checkpoint again")


WRAPPED = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    **{part: f"model.{part}" for part in ("layers.", "embed_tokens.", "norm.", "visual.")},
}
"""How names of a language model's tensors start inside a wrapper or without a head, and by itself."""


_KIMI_DENSE = re.compile(r"block_sparse_moe\.(?=(?:gate|up|down)_proj\.)")
"""transformers saves Kimi Linear's dense layers under the name of those with experts; published are `mlp.`"""


def _unwrapped(name: str) -> str:
    name = _KIMI_DENSE.sub("mlp.", name)
    for start, plain in WRAPPED.items():
        if name.startswith(start):
            return plain + name[len(start) :]
    return name


class SafetensorsFile:
    """One of a checkpoint's safetensors files; a TensorFile. The language model of a wrapper, and one without
    a head, have the names that they have by themselves."""

    def __init__(self, path: Path, index: Mapping[str, str] = MappingProxyType({})) -> None:
        """`index`: the name of the file of each tensor; of copies in other files nothing is read."""
        self.path, self._index = path, index

    def shapes(self) -> dict[str, list[int]]:
        return {name: tensors.get_slice(stored).get_shape() for name, stored, tensors in self._tensors()}

    def quantized(self) -> Collection[str]:
        return ()

    def read(
        self, names: Collection[str], whole: Collection[str], cuts: Cuts = NO_CUTS, kept: Kept = NONE_KEPT
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Reads tensors; of one that is cut, nothing else is read."""
        missing = set(names)
        for name, stored, tensors in self._tensors():
            if name not in missing:
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
                    if self._index.get(name, self.path.name) == self.path.name:
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
