"""Scales of an FP8 KV cache: the checkpoint's, else 1.

Numbers of e4m3 have the same relative precision from 2^-6 to 448, so that a scale matters at the ends of this
range alone. Scales that nodes found in their own prompts would differ, and so would their pages.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch

from baton.models.config import ModelError
from baton.models.tensor_files import SafetensorsFile, file_names

_NAME = re.compile(r"layers\.(\d+)\.self_attn\.(?:(kv?|v)_scale|([kv])_proj\.(?:[kv]_scale|output_scale))$")
"""Names of scales that vLLM, ModelOpt and compressed-tensors write."""


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is such a scale."""
    return _NAME.search(name) is not None


def digest(scales: torch.Tensor) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(scales.contiguous().numpy().tobytes()).hexdigest()[:16]


def read_kv_scales(path: Path, layers: int, kv_heads: int, load_format: str = "auto") -> torch.Tensor:
    """float32 [layers, 2, kv heads]: of keys, of values. Raises ModelError for scales of another shape, and
    for those that are not positive."""
    scales = torch.ones(layers, 2, kv_heads)
    if path.is_file() or load_format == "dummy":
        return scales
    for file in map(SafetensorsFile, file_names(path)):
        names = [name for name in file.shapes() if is_kv_scale(name)]
        for name, _, tensor in file.read(names, ()):
            match = _NAME.search(name)
            assert match is not None
            layer, part = int(match[1]), match[2] or match[3]
            values = tensor.float().flatten()
            if layer >= layers or values.numel() not in (1, kv_heads):
                shape = list(tensor.shape)
                raise ModelError(f"tensor {name} has shape {shape}, which is not one scale, nor {kv_heads}")
            if not bool((values.isfinite() & (values > 0)).all()):
                raise ModelError(f"tensor {name} holds a scale that is not positive")
            scales[layer, slice(None) if part == "kv" else 0 if part == "k" else 1] = values
    return scales
