"""Which matrices of a model stay quantized in memory: by checkpoint, device, and what was asked for."""

from __future__ import annotations

from pathlib import Path

import torch

from baton.layers.quantization.awq import Awq
from baton.layers.quantization.compressed_tensors import Compressed, Packed
from baton.layers.quantization.fp8 import Fp8, Fp8Blocks
from baton.layers.quantization.gptq import Gptq
from baton.layers.quantization.quantized_tensor import CheckpointFormat
from baton.layers.quantization.weight_method import INT4_GROUPS, WeightMethod, WeightPlan
from baton.models.config import ModelError
from baton.models.gguf_checkpoint import GgufTensors
from baton.models.tensor_files import stored_format, tensor_files

QUANTIZATIONS = ("auto", "none", "fp8", "int8", "int4")
ONLINE_GROUP = {"cpu": 32, "cuda": 64}
"""Group size of 4 bits that are quantized while loading. Blocks of GGUF's Q4_1 have 32 columns, and stay
as they are."""
FP8_BLOCK = 128
"""Rows and columns of blocks that GPUs have kernels for."""


def weight_plan(
    path: Path,
    device: torch.device,
    quantization: str = "auto",
    head: bool = False,
    load_format: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
) -> WeightPlan:
    """`quantization`: "auto": what a checkpoint has quantized stays so where `device` computes with it;
    "none": everything is dequantized while loading; otherwise what is not quantized is, while loading.
    `head`: the head, too. `dtype`: the model's. Whatever the plan, experts with biases are dequantized
    (`layers.experts`): no kernel computes them from codes. Raises CheckpointError.
    """
    if quantization not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise ModelError(f"quantization {quantization!r} is not known; known are {known}")
    format = stored_format(path)
    online = quantization not in ("auto", "none")
    on_gpu = device.type == "cuda"
    if head and quantization not in (("fp8", "int8", "int4") if on_gpu else ("int8", "int4")):
        raise ModelError("--quantize-head needs --quantization int8 or int4, or on a GPU fp8")
    if online and format is not None:
        raise ModelError(
            f"--quantization {quantization} is for checkpoints that are not quantized; this one has "
            f"{format.name}; leave it out"
        )
    problem = unsuited(device, dtype) if on_gpu else None
    if online and problem is not None:
        raise ModelError(f"--quantization {quantization} cannot be used: {problem}")
    if quantization == "fp8":
        if not on_gpu:
            return WeightPlan(head=head, fp8=True)
        return WeightPlan(WeightMethod(8, floating=True), head=head, on_gpu=True)
    if online:
        group = ONLINE_GROUP["cuda" if on_gpu else "cpu"]
        return WeightPlan(
            WeightMethod(8) if quantization == "int8" else WeightMethod(4, group), head=head, on_gpu=on_gpu
        )
    if path.is_file() and quantization == "auto" and not on_gpu:
        return _blocks(path)
    method = _kept(format, on_gpu) if format is not None and quantization == "auto" else None
    if method is None or problem is not None:
        return WeightPlan()
    if load_format == "dummy":
        return WeightPlan(method, on_gpu=on_gpu, dummy=True)
    stored = {name: method for file in tensor_files(path) for name in file.quantized()}
    return WeightPlan(method, stored, on_gpu=on_gpu)


def _blocks(path: Path) -> WeightPlan:
    """A CPU computes with those of a GGUF file that it has kernels for."""
    stored = GgufTensors(path).quantized()
    fours = {method for method in stored.values() if method.bits == 4}
    return WeightPlan(next(iter(fours), None), stored) if stored else WeightPlan()


def unsuited(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this GPU computes with no quantized weights; None: it does."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) != (9, 0):
        return "kernels for quantized weights are for Hopper GPUs alone"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"kernels for quantized weights compute bfloat16 and float16, not {str(dtype)[6:]}"
    try:
        import sgl_kernel  # noqa: F401
    except (ImportError, OSError) as error:
        return f"sgl_kernel cannot be loaded ({str(error).splitlines()[0]}); pip install 'baton-serve[gpu]'"
    return None


def _kept(format: CheckpointFormat, on_gpu: bool) -> WeightMethod | None:
    """What a CPU or a GPU computes with as it is stored."""
    if on_gpu and isinstance(format, Fp8):
        return WeightMethod(8, floating=True)
    if on_gpu and isinstance(format, Fp8Blocks):
        return _fp8_blocks(format.rows, format.columns)
    if on_gpu and isinstance(format, Compressed) and format.floating and format.symmetric:
        return WeightMethod(8, floating=True) if format.group < 0 else _fp8_blocks(format.rows, format.group)
    if isinstance(format, Compressed) and not format.floating and format.symmetric and format.group < 0:
        return WeightMethod(8)
    if isinstance(format, Packed) and format.bits == 8 and format.symmetric and format.group < 0:
        return WeightMethod(8)
    if isinstance(format, Gptq) and format.reordered:
        return None
    if isinstance(format, Gptq | Awq | Packed) and format.bits == 4 and format.group in INT4_GROUPS:
        return WeightMethod(4, format.group)
    return None


def _fp8_blocks(rows: int, columns: int) -> WeightMethod | None:
    if (rows, columns) != (FP8_BLOCK, FP8_BLOCK):
        return None
    return WeightMethod(8, columns, floating=True, rows=rows)


def describe(
    path: Path,
    device: torch.device,
    quantization: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    load_format: str = "auto",
) -> str:
    """For people: what is quantized, and what becomes of it; empty: nothing is. Raises CheckpointError."""
    plan, format = weight_plan(path, device, quantization, False, load_format, dtype), stored_format(path)
    if plan.fp8:
        return "rounded to FP8 while loading, and kept in the model's dtype"
    if format is None and plan.stored is not None:
        return "blocks of 4, 6 and 8 bits (GGUF) stay so in memory, other types are dequantized while loading"
    if format is None:
        return "" if plan.method is None else f"quantized to {plan.method.name} while loading"
    if plan.method is None:
        return f"{format.name}, dequantized while loading"
    return f"{format.name}, stays {plan.method.name} in memory"
