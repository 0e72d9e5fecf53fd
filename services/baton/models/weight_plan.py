"""Which matrices of a model stay quantized in memory: by checkpoint, device, and what was asked for."""

from __future__ import annotations

from pathlib import Path

import torch

from baton.layers.weights.awq import Awq
from baton.layers.weights.compressed import Compressed, Packed
from baton.layers.weights.gptq import Gptq
from baton.layers.weights.method import INT4_GROUPS, Method, WeightPlan
from baton.layers.weights.quantized import Format
from baton.models.config import ModelError
from baton.models.quantized_file import QuantizedFile
from baton.models.tensor_files import stored_format, tensor_files

QUANTIZATIONS = ("auto", "none", "fp8", "int8", "int4")
ONLINE_GROUP = 32
"""Of 4 bits that are quantized while loading. Blocks of GGUF's Q4_1 have this size, and stay as they are."""


def weight_plan(
    path: Path,
    device: torch.device,
    quantization: str = "auto",
    head: bool = False,
    load_format: str = "auto",
) -> WeightPlan:
    """`quantization`: "auto": what a checkpoint has quantized stays so where `device` computes with it;
    "none": everything is dequantized while loading; otherwise what is not quantized is, while loading.
    `head`: the head, too. Raises CheckpointError.
    """
    if quantization not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise ModelError(f"quantization {quantization!r} is not known; known are {known}")
    format = stored_format(path)
    online = quantization not in ("auto", "none")
    if head and quantization not in ("int8", "int4"):
        raise ModelError("--quantize-head needs --quantization int8 or int4")
    if online and format is not None:
        raise ModelError(
            f"--quantization {quantization} is for checkpoints that are not quantized; this one has "
            f"{format.name}; leave it out"
        )
    if online and device.type not in ("cpu", "meta"):
        raise ModelError(f"--quantization {quantization} works on a CPU only, not on {device.type}")
    if quantization == "fp8":
        return WeightPlan(head=head, fp8=True)
    if online:
        return WeightPlan(Method(8) if quantization == "int8" else Method(4, ONLINE_GROUP), head=head)
    method = _kept(format) if format is not None and quantization == "auto" else None
    if method is None or device.type == "cuda":
        return WeightPlan()
    if load_format == "dummy":
        return WeightPlan(method)
    files = [file for file in tensor_files(path) if isinstance(file, QuantizedFile)]
    return WeightPlan(method, frozenset().union(*(file.quantized() for file in files)))


def _kept(format: Format) -> Method | None:
    """What a CPU computes with as it is stored."""
    if isinstance(format, Compressed) and not format.floating and format.symmetric and format.group < 0:
        return Method(8)
    if isinstance(format, Packed) and format.bits == 8 and format.symmetric and format.group < 0:
        return Method(8)
    if isinstance(format, Gptq) and format.reordered:
        return None
    if isinstance(format, Gptq | Awq | Packed) and format.bits == 4 and format.group in INT4_GROUPS:
        return Method(4, format.group)
    return None


def describe(path: Path, device: torch.device, quantization: str = "auto") -> str:
    """For people: what is quantized, and what becomes of it; empty: nothing is. Raises CheckpointError."""
    plan, format = weight_plan(path, device, quantization), stored_format(path)
    if plan.fp8:
        return "rounded to FP8 while loading, and kept in the model's dtype"
    if format is None:
        return "" if plan.method is None else f"quantized to {plan.method.name} while loading"
    if plan.method is None:
        return f"{format.name}, dequantized while loading"
    return f"{format.name}, stays {plan.method.name} in memory"
