"""Maps a checkpoint's tensors to their places in the merged weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.layers.linear import Linear
from baton.models.config import ModelConfig
from baton.models.decoder import LayerWeights, Weights


@dataclass(slots=True)
class Slot:
    """Where one tensor of the checkpoint goes."""

    target: torch.Tensor
    """A view of the merged weights. Of a head norm: [heads, head_dim], each head gets a copy."""
    norm: bool = False
    bias: bool = False

    @property
    def shape(self) -> torch.Size:
        """Of the tensor in the checkpoint."""
        return self.target.shape[-1:] if self.norm else self.target.shape


def allocate(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Weights, dict[str, Slot]]:
    """Uninitialized weights, and every checkpoint tensor's place in them by its name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    slots: dict[str, Slot] = {}

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def norm(name: str, size: int) -> torch.Tensor:
        tensor = new(size)
        slots[name] = Slot(tensor, norm=True)
        return tensor

    def linear(prefix: str, parts: dict[str, int], width: int, biased: bool) -> Linear:
        sizes = list(parts.values())
        weight, bias = new(sum(sizes), width), new(sum(sizes)) if biased else None
        for name, view in zip(parts, torch.split(weight, sizes), strict=True):
            slots[f"{prefix}.{name}.weight"] = Slot(view)
        if bias is not None:
            for name, view in zip(parts, torch.split(bias, sizes), strict=True):
                slots[f"{prefix}.{name}.bias"] = Slot(view, bias=True)
        return Linear(weight, bias)

    embedding = new(config.vocab_size, hidden)
    slots["model.embed_tokens.weight"] = Slot(embedding)
    layers: list[LayerWeights] = []
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        qkv = linear(attention, {"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, config.qkv_bias)
        output = linear(attention, {"o_proj": hidden}, q, config.output_bias)
        gate_up = linear(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias)
        down = linear(mlp, {"down_proj": hidden}, inner, config.mlp_bias)
        qk_norm: torch.Tensor | None = None
        if config.architecture.qk_norm:
            qk_norm = new(config.num_heads + config.num_kv_heads, config.head_dim)
            slots[f"{attention}.q_norm.weight"] = Slot(qk_norm[: config.num_heads], norm=True)
            slots[f"{attention}.k_norm.weight"] = Slot(qk_norm[config.num_heads :], norm=True)
        input_norm = norm(f"{layer}.input_layernorm.weight", hidden)
        post_norm = norm(f"{layer}.post_attention_layernorm.weight", hidden)
        layers.append(LayerWeights(input_norm, qkv, qk_norm, output, post_norm, gate_up, down))
    final = norm("model.norm.weight", hidden)
    head = embedding
    if not config.tied:
        head = new(config.vocab_size, hidden)
        slots["lm_head.weight"] = Slot(head)
    return Weights(embedding, layers, final, Linear(head)), slots
