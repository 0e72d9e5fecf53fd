"""Rotary position embedding: Su et al., RoFormer, arXiv:2104.09864, in the half-split form of Llama."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    # kind: parameters needed, parameters allowed
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            {
                "original_max_position_embeddings",
                "attention_factor",
                "mscale",
                "mscale_all_dim",
                "beta_fast",
                "beta_slow",
                "truncate",
            }
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Frequencies and scale of the rotation."""

    frequencies: tuple[float, ...]
    """Radians per position of each of the head_dim / 2 pairs, float32 values."""
    scale: float
    """Multiplies cosine and sine."""

    @staticmethod
    def make(
        kind: str, head_dim: int, theta: float, context: int, parameters: Mapping[str, Any]
    ) -> RopeConfig:
        """`kind`: "default", "linear", "llama3" or "yarn"; `parameters`: config.json's rope_parameters.

        Raises ValueError for another kind, and for parameters that are missing or unknown.
        """
        if kind not in _KEYS:
            raise ValueError(f"rope_type {kind!r} is not supported; supported are {', '.join(sorted(_KEYS))}")
        given = {k: v for k, v in parameters.items() if v is not None}
        needed, allowed = _KEYS[kind]
        if missing := needed - given.keys():
            raise ValueError(f"rope_type {kind!r} needs {', '.join(sorted(missing))}")
        if unknown := given.keys() - needed - allowed:
            raise ValueError(f"rope_type {kind!r} does not know {', '.join(sorted(unknown))}")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
        base = 1.0 / (theta**exponents)
        scale = 1.0
        if kind == "linear":
            base = base / float(given["factor"])
        elif kind == "llama3":
            base = _llama3(base, given)
        elif kind == "yarn":
            base, scale = _yarn(theta**exponents, head_dim, theta, context, given)
        return RopeConfig(tuple(base.tolist()), scale)

    def table(self, positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Cosines and sines of the first positions for `apply_rope`: [positions, 2, head_dim], computed in
        float32."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        return table.to(device=device, dtype=dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [tokens, heads, head_dim] by cos and sin [tokens, 1, head_dim]; the first half of `sin` is
    negative, so that it multiplies the swapped halves."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _llama3(frequencies: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor, original = float(given["factor"]), float(given["original_max_position_embeddings"])
    low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
    turns = original * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def _yarn(
    powers: torch.Tensor, head_dim: int, theta: float, context: int, given: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Peng et al., YaRN, arXiv:2309.00071: frequencies, and the scale of cosine and sine."""
    factor = float(given["factor"])
    original = float(given.get("original_max_position_embeddings", context))

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(given.get("beta_fast", 32)))
    high = dimension(float(given.get("beta_slow", 1)))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    frequencies = (1 - keep) / (factor * powers) + keep / powers

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = given.get("attention_factor")
    if scale is None:
        mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
        scale = temperature(mscale) / temperature(all_dim) if mscale and all_dim else temperature(1.0)
    return frequencies, float(scale)
