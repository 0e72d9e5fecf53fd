"""From a checkpoint to a model on a device: read it, tell its version."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from baton.models.config import ModelError, read_config
from baton.models.decoder import Model
from baton.models.weights import Slot, allocate

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def load_model(
    path: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    progress: Progress | None = None,
    context_length: int | None = None,
) -> Model:
    """Reads a checkpoint's safetensors straight to the device.

    `dtype` None: the checkpoint's own. `load_format` "dummy": random weights, always the same, no files but
    config.json needed. `context_length`: how far the model will be used, if less than it can.
    Raises ModelError naming the tensor that is missing, unexpected or of another shape.
    """
    config = read_config(path, context_length)
    weights, slots = allocate(config, dtype or config.dtype, torch.device(device))
    report = progress or (lambda done, total: None)
    if load_format == "dummy":
        _fill(slots, report)
    elif load_format == "auto":
        _read(path, slots, config.tied, report)
    else:
        raise ModelError(f"load format {load_format!r} is not known; known are 'auto' and 'dummy'")
    weights.pack()
    return Model(config, weights, sum(slot.shape.numel() for slot in slots.values()), context_length)


def weight_files(path: Path) -> list[Path]:
    """The checkpoint's safetensors files. Raises ModelError when there are none or one is missing."""
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is damaged: {error}") from error
        files = [path / name for name in names]
    elif single.is_file():
        files = [single]
    else:
        raise ModelError(f"{path} has no model.safetensors; only safetensors checkpoints are read")
    for file in files:
        if not file.is_file() or (file.resolve().parent != file.parent.resolve() and ".." in file.parts):
            raise ModelError(f"{file} is missing")
    return files


def _read(path: Path, slots: dict[str, Slot], tied: bool, report: Progress) -> None:
    total = sum(slot.target.numel() for slot in slots.values()) * next(iter(slots.values())).target.itemsize
    done = 0
    missing = dict(slots)
    report(0, total)
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    slot = missing.pop(name, None)
                    if slot is None:
                        if _ignorable(name, tied):
                            continue
                        raise ModelError(f"{file.name} holds unexpected tensor {name}")
                    source = tensors.get_tensor(name)
                    if source.shape != slot.shape:
                        raise ModelError(
                            f"tensor {name} has shape {list(source.shape)}, "
                            f"config.json asks for {list(slot.shape)}"
                        )
                    slot.target.copy_(source)
                    done += slot.target.nbytes
                    report(done, total)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{path} lacks tensor {next(iter(missing))}{more}")


def _ignorable(name: str, tied: bool) -> bool:
    """Tensors that some checkpoints carry although config.json determines them."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _fill(slots: dict[str, Slot], report: Progress) -> None:
    """Normal with deviation 1 / sqrt(inputs), so that activations neither vanish nor explode."""
    total = sum(slot.target.nbytes for slot in slots.values())
    done = 0
    for index, slot in enumerate(slots.values()):
        if slot.norm:
            slot.target.fill_(1.0)
        elif slot.bias:
            slot.target.zero_()
        else:
            generator = torch.Generator(slot.target.device).manual_seed(index)
            slot.target.normal_(0.0, 1 / math.sqrt(slot.target.shape[1]), generator=generator)
        done += slot.target.nbytes
        report(done, total)


def fingerprint(path: Path, dtype: torch.dtype, load_format: str = "auto") -> str:
    """Tells checkpoints apart, quickly: a hash of the dtype, config.json, and of every safetensors file its
    header (names, shapes, dtypes, offsets) and 64 bytes from the start, middle and end of each tensor.

    Two checkpoints that differ only in bytes between those samples get the same fingerprint; fine-tuning and
    re-quantization change every tensor, so that this does not happen by accident. 16 hexadecimal digits.
    """
    digest = hashlib.sha256(f"{dtype} {load_format}".encode())
    try:
        digest.update((path / "config.json").read_bytes())
        for file in weight_files(path) if load_format != "dummy" else []:
            _sample(file, digest.update)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


def _sample(file: Path, update: Callable[[bytes], None]) -> None:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > 100_000_000:
            raise ModelError(f"{file} is not a safetensors file")
        header = stream.read(size)
        update(header)
        for name, entry in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            for offset in (begin, (begin + end) // 2, max(begin, end - 64)):
                stream.seek(8 + size + offset)
                update(stream.read(min(64, end - offset)))
