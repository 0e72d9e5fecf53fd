"""Loads a checkpoint to a device, and computes its fingerprint."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch

from baton.models.config import ModelError, read_config
from baton.models.decoder import Model
from baton.models.reader import Progress, read_weights, weight_files
from baton.models.weights import Slot, allocate


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
        read_weights(path, slots, config.tied, report)
    else:
        raise ModelError(f"load format {load_format!r} is not known; known are 'auto' and 'dummy'")
    weights.pack()
    return Model(config, weights, sum(slot.shape.numel() for slot in slots.values()), context_length)


def weight_bytes(path: Path, dtype: torch.dtype | None = None, context_length: int | None = None) -> int:
    """Bytes of the weights that `load_model` would allocate, by config.json alone. Raises ModelError."""
    config = read_config(path, context_length)
    _, slots = allocate(config, dtype or config.dtype, torch.device("meta"))
    return sum(slot.target.nbytes for slot in slots.values())


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
    """Identifies a checkpoint quickly: a hash of the dtype, config.json, and of every safetensors file its
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
