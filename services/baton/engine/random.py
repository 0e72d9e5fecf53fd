"""Counter-based randomness for sampling: a pure function of (seed, position, id of a token or group).

The generator is SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA
2014) with Stafford's mix 13. A row's state is the seed mixed with the position; token t takes the stream's
output t. Nothing else enters, so that neither batch, slot, process nor device can change what is drawn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB

FIRST_GROUP = 2**32
"""A row's stream gives noise to token ids first, and from here on to groups of them."""


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def row_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """One generator state per row, from its seed and the position that it samples."""
    mixed = _mix_numpy(seeds + np.uint64(_GAMMA))
    return _mix_numpy(mixed + (positions + np.uint64(1)) * np.uint64(_GAMMA)).view(np.int64)


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 in (-2.9, 37.5), for int64 row keys and ids of broadcastable shapes."""
    z = keys + (ids + 1) * _signed(_GAMMA)
    z = (z ^ _shift(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX2)
    z = z ^ _shift(z, 31)
    # 53 bits as float32: values near 0, which make the large noise that decides, keep their precision.
    uniform = _shift(z, 11).to(torch.float32).add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix_numpy(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    return z ^ (z >> np.uint64(31))
