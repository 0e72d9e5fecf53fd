"""What `engine.model_runner` runs of a model: its forward pass over a step's batch, and its head.

Two bodies: `fused.FusedDecoder` for plain layers on a GPU's kernels, `ModuleBody` for all others. With
kernels everything that differs between steps is in tensors on the device, and nothing waits for the host,
so that a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from baton.layers.batch import Batch
from baton.models.decoder import Decoder, LanguageModel, plain_layers


class Body(Protocol):
    def forward(self, batch: Batch) -> torch.Tensor:
        """-> final normalized hidden states [wanted tokens, hidden]. Writes keys and values of all tokens
        into the pool."""
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab], into `out` if given: float32, with kernels in the model's dtype;
        with several ranks on rank 0, [rows, 0] on others."""
        ...


def make_body(model: LanguageModel, kernels: bool, context_length: int, invariant: bool = False) -> Body:
    """`kernels`: the layers write into the pool by kernels of their own (`Batch.caches`); `context_length`:
    positions that will be used; `invariant`: a token is computed in the same order whatever else is in the
    step. Raises ValueError if that cannot be."""
    problem = why_not_fused(model)
    if kernels and problem is None:
        from baton.models.fused import FusedDecoder

        assert isinstance(model, Decoder)
        return FusedDecoder(model, context_length, invariant)
    if invariant:
        raise ValueError(problem or "it needs kernels for GPUs")
    return ModuleBody(model, kernels, context_length)


def why_not_fused(model: LanguageModel) -> str | None:
    """Why `FusedDecoder` does not take the model; None: it does."""
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"fused kernels compute bfloat16 and float16, not {str(model.dtype).removeprefix('torch.')}"
    if plain_layers(model) is None:
        return f"{model.config.architecture} has layers that fused kernels do not know"
    return None


class ModuleBody:
    """The model's modules, one after the other."""

    def __init__(self, model: LanguageModel, kernels: bool, context_length: int) -> None:
        """With kernels mixtures of experts get a form that does not wait for the host."""
        self._model = model
        self._kernels = model if kernels and isinstance(model, Decoder) else None
        if self._kernels is None:
            return
        from baton.models.device_mixture import device_mixture

        for rope in self._kernels.ropes:
            rope.prepare_kernels(context_length, model.device)
        for mixture in self._kernels.mixtures:
            mixture.kernels = device_mixture(mixture)

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = self._model.forward(batch)
        return hidden if batch.wanted is None else hidden.index_select(0, batch.wanted)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        model = self._kernels
        if model is None:
            return self._model.logits(hidden)
        logits = model.gathered(model.head(hidden))
        if model.shard.rank:
            return logits
        return logits.contiguous() if out is None else out.copy_(logits)
