"""From a safetensors checkpoint to a model on a device: its tensors, reading them, its fingerprint."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from baton.layers.linear import Linear
from baton.models.config import ModelConfig, ModelError, read_config
from baton.models.decoder import LayerWeights, Model, Weights


@dataclass(slots=True)
class Slot:
    """Where one tensor of the checkpoint goes."""

    target: torch.Tensor
    """A view of the merged weights. Of a head norm: [heads, head_dim], each head gets a copy."""
    norm: bool = False
    bias: bool = False

    @property
    def shape(self) -> torch.Size:
        """Of the tensor in the checkpoint."""
        return self.target.shape[-1:] if self.norm else self.target.shape


def allocate(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Weights, dict[str, Slot]]:
    """Uninitialized weights, and every checkpoint tensor's place in them by its name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    slots: dict[str, Slot] = {}

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def norm(name: str, size: int) -> torch.Tensor:
        tensor = new(size)
        slots[name] = Slot(tensor, norm=True)
        return tensor

    def linear(prefix: str, parts: dict[str, int], width: int, biased: bool) -> Linear:
        sizes = list(parts.values())
        weight, bias = new(sum(sizes), width), new(sum(sizes)) if biased else None
        for name, view in zip(parts, torch.split(weight, sizes), strict=True):
            slots[f"{prefix}.{name}.weight"] = Slot(view)
        if bias is not None:
            for name, view in zip(parts, torch.split(bias, sizes), strict=True):
                slots[f"{prefix}.{name}.bias"] = Slot(view, bias=True)
        return Linear(weight, bias)

    embedding = new(config.vocab_size, hidden)
    slots["model.embed_tokens.weight"] = Slot(embedding)
    layers: list[LayerWeights] = []
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        qkv = linear(attention, {"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, config.qkv_bias)
        output = linear(attention, {"o_proj": hidden}, q, config.output_bias)
        gate_up = linear(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias)
        down = linear(mlp, {"down_proj": hidden}, inner, config.mlp_bias)
        qk_norm: torch.Tensor | None = None
        if config.architecture.qk_norm:
            qk_norm = new(config.num_heads + config.num_kv_heads, config.head_dim)
            slots[f"{attention}.q_norm.weight"] = Slot(qk_norm[: config.num_heads], norm=True)
            slots[f"{attention}.k_norm.weight"] = Slot(qk_norm[config.num_heads :], norm=True)
        input_norm = norm(f"{layer}.input_layernorm.weight", hidden)
        post_norm = norm(f"{layer}.post_attention_layernorm.weight", hidden)
        layers.append(LayerWeights(input_norm, qkv, qk_norm, output, post_norm, gate_up, down))
    final = norm("model.norm.weight", hidden)
    head = embedding
    if not config.tied:
        head = new(config.vocab_size, hidden)
        slots["lm_head.weight"] = Slot(head)
    return Weights(embedding, layers, final, Linear(head)), slots


Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_THREADS = 8
_PIECE = 16 * 2**20
"""Bytes that are copied to a GPU at a time. Measured on an H200's host, from the page cache: 8 threads over
pinned pieces 30 to 45 GB/s, one thread or pageable memory 10; safetensors' own loading to the device 11 to
37, with whole tensors beside the weights in the device's memory."""


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


def read_weights(path: Path, slots: dict[str, Slot], tied: bool, report: Progress) -> None:
    """Fills all slots. Names and shapes are checked before anything is copied.

    Raises ModelError naming the tensor that is missing, unexpected or of another shape.
    """
    found = _check(path, slots, tied)
    progress = _Progress(sum(slots[name].target.nbytes for name in itertools.chain(*found.values())), report)
    count = min(_THREADS, os.cpu_count() or 1)
    stripes = -(-count // len(found))
    with ThreadPoolExecutor(count, "weights") as threads:
        work = [
            threads.submit(_copy, file, names[first::stripes], slots, progress)
            for file, names in found.items()
            for first in range(stripes)
        ]
        try:
            for part in work:
                part.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _check(path: Path, slots: dict[str, Slot], tied: bool) -> dict[Path, list[str]]:
    """The tensors to read from each file."""
    missing = set(slots)
    found: dict[Path, list[str]] = {}
    for file in weight_files(path):
        found[file] = []
        for name, tensors in _tensors(file):
            if name not in missing:
                if _ignorable(name, tied):
                    continue
                raise ModelError(f"{file.name} holds unexpected tensor {name}")
            shape, wanted = tensors.get_slice(name).get_shape(), list(slots[name].shape)
            if shape != wanted:
                raise ModelError(f"tensor {name} has shape {shape}, config.json asks for {wanted}")
            missing.discard(name)
            found[file].append(name)
    if missing:
        first = next(name for name in slots if name in missing)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{path} lacks tensor {first}{more}")
    return found


def _tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """The file's names, each with the open file. Raises ModelError."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _ignorable(name: str, tied: bool) -> bool:
    """Tensors that some checkpoints carry although config.json determines them."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _copy(file: Path, names: list[str], slots: dict[str, Slot], progress: _Progress) -> None:
    """One thread's share; returns when all of it has arrived."""
    wanted = set(names)
    device = next(iter(slots.values())).target.device
    staging = _Staging(device) if device.type == "cuda" and names else None
    for name, tensors in _tensors(file):
        if name in wanted:
            slot, source = slots[name], tensors.get_tensor(name)
            if staging is None or slot.norm:
                slot.target.copy_(source)
            else:
                staging.copy(source.flatten(), slot.target.view(-1))
            progress.add(slot.target.nbytes)
    if staging is not None:
        staging.wait()


class _Staging:
    """Two pinned pieces: one is filled while the other is copied to the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pieces = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._gone = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Flat tensors; the host converts to the target's dtype."""
        step = _PIECE // target.itemsize
        for part, there in zip(torch.split(source, step), torch.split(target, step), strict=True):
            self._turn ^= 1
            self._gone[self._turn].synchronize()
            piece = self._pieces[self._turn][: there.nbytes].view(target.dtype)
            piece.copy_(part)
            with torch.cuda.stream(self._stream):
                there.copy_(piece, non_blocking=True)
            self._gone[self._turn].record(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()


class _Progress:
    """Counts what all threads have copied; reports never overlap and never step back."""

    def __init__(self, total: int, report: Progress) -> None:
        self._total = total
        self._report = report
        self._done = 0
        self._lock = threading.Lock()
        report(0, total)

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._report(self._done, self._total)


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
