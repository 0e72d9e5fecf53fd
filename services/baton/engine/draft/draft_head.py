"""The interface of heads that read a model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.layers.attention import AttentionOptions
from baton.layers.batch import Batch
from baton.layers.moe import Mixture
from baton.layers.parameters import Parameters


class DraftHead(Protocol):
    name: str
    """Name of the head's kind in metrics."""
    tap: tuple[int, ...]
    """Hidden states of the model that it reads: see `layers.batch.HiddenTap.layers`."""

    values: int
    """Number of values that a token has in these hidden states."""
    mixtures: Sequence[Mixture]
    """Mixtures of the head's layers."""
    parameters: Parameters
    """Those that are the head's own, not the model's."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def heads(self) -> int:
        """Attention heads of each layer."""

    @property
    def attention_options(self) -> Sequence[AttentionOptions]: ...

    def use_kernels(self, context: int, rows: int) -> bool:
        """For CUDA graphs of so many rows at most, with positions below `context`. -> whether its layers then
        write keys and values by kernels of their own, with `Batch.caches`."""

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the model's hidden states [tokens, values] become: [tokens, hidden]."""

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Next tokens, and hidden states before them [tokens, hidden] -> hidden states at them, likewise."""

    def write(self, tokens: torch.Tensor, hidden: torch.Tensor, batch: Batch) -> None:
        """What `forward` does to the pool; `hidden` may be overwritten."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """-> [rows, the model's vocabulary], float32 without kernels"""
