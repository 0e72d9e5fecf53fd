"""What `engine.cuda_runner` needs of a model: its forward pass over a step's tokens, in a form that a CUDA
graph can hold. Two bodies: `fused.FusedDecoder` for plain layers, `module_body.ModuleBody` for all others.

Everything that differs between steps is in tensors on the device, and nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.kvcache.kv_pool import PagePool
from baton.layers.forward_batch import AttendPages
from baton.models.decoder import Decoder, plain_layers


@dataclass(frozen=True, slots=True)
class Step:
    """A step's tokens."""

    tokens: torch.Tensor
    """Ids, int32 [tokens]"""
    positions: torch.Tensor
    """int32 [tokens]"""
    slots: torch.Tensor
    """Batch slots, int32 [tokens]"""
    damage: torch.Tensor
    """See `Place`."""
    attend: AttendPages
    wanted: torch.Tensor | None = None
    """The tokens whose states are wanted, [n]; None: all."""
    decode: bool = False
    """Every token is a row's only one."""


class Body(Protocol):
    """Bound to one pool and the page tables of its batch slots."""

    def forward(self, step: Step) -> torch.Tensor:
        """-> final normalized hidden states [wanted tokens, hidden]. Writes keys and values of all tokens
        into the pool."""
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] in the model's dtype, into `out` if given; with several ranks on
        rank 0, [rows, 0] on others."""
        ...


def make_body(
    model: Decoder,
    pool: PagePool,
    tables: Sequence[torch.Tensor],
    context_length: int,
    invariant: bool = False,
) -> Body:
    """`tables`: of each KV group int32 [slots, pages]; `context_length`: positions that will be used;
    `invariant`: a token is computed in the same order whatever else is in the step. Raises ValueError if that
    cannot be."""
    problem = why_not_fused(model)
    if problem is None:
        from baton.models.fused import FusedDecoder

        return FusedDecoder(model, pool, tables, context_length, invariant)
    if invariant:
        raise ValueError(problem)
    from baton.models.module_body import ModuleBody

    return ModuleBody(model, pool, tables, context_length)


def why_not_fused(model: Decoder) -> str | None:
    """Why `FusedDecoder` does not take the model; None: it does."""
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"fused kernels compute bfloat16 and float16, not {str(model.dtype).removeprefix('torch.')}"
    if plain_layers(model) is None:
        return f"{model.config.architecture} has layers that fused kernels do not know"
    return None
