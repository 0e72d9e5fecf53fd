"""The dense decoder that all architectures share: weights, and the forward pass over a ragged batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from baton.layers.linear import CpuLayout, Linear, fastest_layout
from baton.layers.rope import apply_rope
from baton.models.config import ModelConfig


class Attend(Protocol):
    """Writes a layer's keys and values of all tokens into the pool and attends."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv heads, head_dim] -> [tokens, heads * head_dim]."""
        ...


@dataclass(slots=True)
class LayerWeights:
    """One layer; projections that read the same input are merged."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    """[heads + kv heads, head_dim]: the weight of each head's norm."""
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(slots=True)
class Weights:
    embedding: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: Linear
    """Its weight is the embedding if the checkpoint ties them."""

    def pack(self) -> None:
        """On a CPU: brings the matrices into the layout that computes fastest, one by one."""
        if self.embedding.device.type != "cpu":
            return
        layouts: dict[torch.Size, type[CpuLayout]] = {}
        linears = [x for w in self.layers for x in (w.qkv, w.output, w.gate_up, w.down)]
        for linear in (*linears, self.head):
            weight = linear.weight
            assert weight is not None
            if weight.shape not in layouts:
                layouts[weight.shape] = fastest_layout(weight)
            linear.pack(layouts[weight.shape])


class Model:
    """A decoder on one device."""

    def __init__(
        self, config: ModelConfig, weights: Weights, num_parameters: int, context_length: int | None = None
    ) -> None:
        """`num_parameters`: number of weights, tied ones once; `context_length`: how far positions will go,
        if less than the checkpoint allows."""
        self.config = config
        self.weights = weights
        self.num_parameters = num_parameters
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        positions = min(context_length or config.context_length, config.context_length)
        self._rope = config.rope.table(positions, self.dtype, self.device)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Token ids and positions, int64 [tokens] -> final normalized hidden states [tokens, hidden]."""
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        rotated, all_heads = heads + kv_heads, heads + 2 * kv_heads
        eps, count = config.rms_norm_eps, tokens.shape[0]
        hidden_shape, dim_shape = (config.hidden_size,), (dim,)
        cos, sin = self._rope.index_select(0, positions).unsqueeze(2).unbind(1)
        hidden = F.embedding(tokens, self.weights.embedding)
        for index, w in enumerate(self.weights.layers):
            qkv = w.qkv(F.rms_norm(hidden, hidden_shape, w.input_norm, eps)).view(count, all_heads, dim)
            qk = qkv[:, :rotated]
            if w.qk_norm is not None:
                qk = F.rms_norm(qk, dim_shape, None, eps).mul_(w.qk_norm)
            qk = apply_rope(qk, cos, sin)
            attended = attend(index, qk[:, :heads], qk[:, heads:], qkv[:, rotated:])
            hidden = w.output.add_to(hidden, attended)
            x = F.rms_norm(hidden, hidden_shape, w.post_norm, eps)
            gate, up = w.gate_up(x).chunk(2, -1)
            hidden = w.down.add_to(hidden, F.silu(gate).mul_(up))
        return F.rms_norm(hidden, hidden_shape, self.weights.norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> float32 [rows, vocab]."""
        return self.weights.head(hidden).float()
