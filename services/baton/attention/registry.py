"""Attention backends by name."""

from __future__ import annotations

from collections.abc import Collection

import torch

from baton.attention.base import AttentionBackend
from baton.attention.fa3 import Fa3Attention, FixedFa3Attention
from baton.attention.flashinfer_paged import FlashInferAttention
from baton.attention.mixed import MixedAttention
from baton.attention.mla_paged import Fa3MlaAttention, TritonMlaAttention
from baton.attention.torch_mla import TorchMlaAttention
from baton.attention.torch_sdpa import TorchAttention
from baton.attention.triton_paged import FixedTritonAttention, TritonAttention

BACKENDS: dict[str, type[AttentionBackend]] = {
    "fa3": Fa3Attention,
    "fa3-fixed": FixedFa3Attention,
    "fa3-mla": Fa3MlaAttention,
    "flashinfer": FlashInferAttention,
    "mixed": MixedAttention,
    "torch": TorchAttention,
    "torch-mla": TorchMlaAttention,
    "triton": TritonAttention,
    "triton-fixed": FixedTritonAttention,
    "triton-mla": TritonMlaAttention,
}

_PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("torch", "torch-mla"),
    "cuda": ("mixed", "fa3", "triton", "torch", "fa3-mla", "triton-mla", "torch-mla"),
}
"""By device type, best first."""

INVARIANT = ("fa3-fixed", "triton-fixed")
"""Those whose results do not depend on what else is in the batch, best first; on NVIDIA GPUs."""


class NoBackend(Exception):
    """No such backend, or it does not work here; the message says which do."""


def resolve(
    name: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    head_dims: Collection[int] = (),
    features: frozenset[str] = frozenset(),
    invariant: bool = False,
) -> tuple[type[AttentionBackend], str]:
    """The backend called `name`, or for "auto" the best that works on `device`, and why it was chosen.

    `dtype` None, `head_dims` empty: not known yet; `features`: those of `AttentionBackend.features` that the
    model needs; `invariant`: "auto" is the best of INVARIANT. Raises NoBackend.
    """

    def problem_of(backend: type[AttentionBackend]) -> str | None:
        if missing := features - backend.features:
            return f"does not compute attention with {', '.join(sorted(missing))}"
        sizes: list[int | None] = [*sorted(head_dims)] or [None]
        problem = next(filter(None, (backend.available(device, dtype, size) for size in sizes)), None)
        if problem is None and "latent" in backend.features - features:
            return "it is for models of latents, and this is none"
        return problem

    if name == "auto":
        reasons: list[str] = []
        what = "does not depend on the batch" if invariant else f"works on {device.type}"
        for candidate in INVARIANT if invariant else _PREFERENCE.get(device.type, _PREFERENCE["cpu"]):
            problem = problem_of(BACKENDS[candidate])
            if problem is None:
                rest = f" ({'; '.join(reasons)})" if reasons else ""
                return BACKENDS[candidate], f"{candidate}: the best that {what}{rest}"
            reasons.append(f"not {candidate}: {problem}")
        raise NoBackend(f"no attention backend that {what} can be used on {device}: {'; '.join(reasons)}")
    if name not in BACKENDS:
        raise NoBackend(
            f"attention backend {name!r} is not known; known are auto, {', '.join(sorted(BACKENDS))}"
        )
    problem = problem_of(BACKENDS[name])
    if problem is not None:
        raise NoBackend(f"attention backend {name!r} does not work on {device}: {problem}")
    return BACKENDS[name], f"{name}: asked for"
