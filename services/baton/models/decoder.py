"""The dense decoder that all architectures share: weights, and the forward pass over a ragged batch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
import torch.nn.functional as F

from baton.layers.rope import apply_rope
from baton.models.config import ModelConfig


class Attend(Protocol):
    """Writes a layer's keys and values of all tokens into the pool and attends."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv heads, head_dim] -> [tokens, heads * head_dim]."""
        ...


@dataclass(slots=True)
class LayerWeights:
    """One layer; matrices are [out, in] as in the checkpoint, merged along `out`."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(slots=True)
class Weights:
    embedding: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor
    """The embedding itself where the checkpoint ties them."""


class Model:
    """A decoder on one device."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._rope = config.rope.table(config.context_length, self.dtype, self.device)

    @property
    def num_parameters(self) -> int:
        """Number of weights; tied ones count once."""
        tensors: dict[int, int] = {}
        for part in (self.weights, *self.weights.layers):
            for item in fields(part):
                value = getattr(part, item.name)
                if isinstance(value, torch.Tensor):
                    tensors[value.data_ptr()] = value.numel()
        return sum(tensors.values())

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Token ids and positions, int64 [tokens] -> final normalized hidden states [tokens, hidden]."""
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        eps, count = config.rms_norm_eps, tokens.shape[0]
        hidden_shape, dim_shape = (config.hidden_size,), (dim,)
        cos, sin = self._rope.index_select(0, positions).unsqueeze(2).unbind(1)
        hidden = F.embedding(tokens, self.weights.embedding)
        for index, w in enumerate(self.weights.layers):
            x = F.rms_norm(hidden, hidden_shape, w.input_norm, eps)
            qkv = F.linear(x, w.qkv, w.qkv_bias).view(count, heads + 2 * kv_heads, dim)
            q, k, v = torch.split(qkv, (heads, kv_heads, kv_heads), 1)
            if w.q_norm is not None:
                q = F.rms_norm(q, dim_shape, w.q_norm, eps)
                k = F.rms_norm(k, dim_shape, w.k_norm, eps)
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            hidden = hidden + F.linear(attend(index, q, k, v), w.output, w.output_bias)
            x = F.rms_norm(hidden, hidden_shape, w.post_norm, eps)
            gate, up = F.linear(x, w.gate_up, w.gate_up_bias).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate).mul_(up), w.down, w.down_bias)
        return F.rms_norm(hidden, hidden_shape, self.weights.norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> float32 [rows, vocab]."""
        return F.linear(hidden, self.weights.head).float()
