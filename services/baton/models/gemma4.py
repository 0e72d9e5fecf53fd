"""Gemma 4, text (google/gemma-4): beside what Gemma 3 has, heads of two sizes, keys that serve as values,
layers that share keys and values, an embedding for each layer, experts beside the feed-forward layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from baton.layers.attention import Attention, AttentionModule, AttentionOptions
from baton.layers.batch import Batch
from baton.layers.mlp import ACTIVATIONS, GatedMlp
from baton.layers.moe import Experts, Mixture
from baton.layers.moe_routing import MoeGate, Routing
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope, apply_rope
from baton.layers.tensor_parallel import times
from baton.models.config import ModelConfig, ModelError, make_rope, window
from baton.models.decoder import Decoder

HEADS_DIFFER = True
"""Each layer's number and size of KV heads are read here."""


class Gemma4Attention(Attention):
    """Queries, keys and values of each head are normalized, values without a weight."""

    def split(self, projected: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return super().split(self._with_values(projected), batch)

    def write(self, projected: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().write(self._with_values(projected), batch)

    def _with_values(self, projected: torch.Tensor) -> torch.Tensor:
        """Queries, keys and, if they are projected, values -> [tokens, (heads + 2 kv heads) * head_dim]"""
        heads = projected.view(len(projected), -1, self.head_dim)
        before = self.heads + self.kv_heads
        values = F.rms_norm(heads[:, -self.kv_heads :], (self.head_dim,), None, self.norm_eps)
        return torch.cat((heads[:, :before], values), 1).flatten(1)


class SharedAttention(AttentionModule):
    """Has queries alone, and reads the keys and values of a layer before it."""

    def __init__(self, config: ModelConfig, parameters: Parameters, source: Gemma4Attention) -> None:
        self.index, self.rope, self.options = source.index, source.rope, source.options
        self.cache = None
        self._heads, self._head_dim, self._eps = source.heads, source.head_dim, config.rms_norm_eps
        head_range = parameters.shard.split(config.num_heads, "attention heads")
        size, queries = config.num_heads * source.head_dim, times(head_range, source.head_dim)
        bias = config.hf.attention_bias
        self.input = parameters.linear({"q_proj": size}, config.hidden_size, bias, rows={"q_proj": [queries]})
        self.output = parameters.linear({"o_proj": config.hidden_size}, size, bias, columns=queries)
        self._norm = RmsNorm(parameters, "q_norm", source.head_dim, config.rms_norm_eps)
        for unused in ("k_proj.", "v_proj.", "k_norm.", "v_norm."):  # which published checkpoints hold
            parameters.ignore(unused)

    def _attend(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        q = self._norm(self.input(x).view(len(x), self._heads, self._head_dim))
        q = apply_rope(q, *batch.rotation(self.rope))
        out = torch.empty_like(q)
        batch.attention.attend(self.index, q, out)
        return out.flatten(1)


class Gemma4Router(MoeGate):
    """Normalizes what it sees by itself, and weighs experts further."""

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        hidden, count = config.hidden_size, config.hf.num_experts
        super().__init__(parameters, "proj", hidden, count, Routing(config.hf.top_k_experts))
        self._scale = parameters.empty(hidden)
        by = hidden**-0.5
        parameters.add("scale", self._scale, fill="ones", convert=lambda scale: scale.float() * by)
        self._eps = config.rms_norm_eps
        self._expert_scale = parameters.empty(count, dtype=torch.float32)
        parameters.add("per_expert_scale", self._expert_scale, fill="ones")

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = super().__call__(F.rms_norm(x, x.shape[1:], self._scale, self._eps))
        return weights * self._expert_scale[experts], experts


class Gemma4Layer:
    """Attention, then the feed-forward layer, each between two norms; experts see what the feed-forward layer
    sees, under norms of their own. At the end the layer's own embedding, gated, is added."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, attention: AttentionModule, inner: int
    ) -> None:
        """`inner`: inner values of the feed-forward layer."""
        hf, hidden = config.hf, config.hidden_size

        def norm(name: str) -> RmsNorm:
            return RmsNorm(parameters, name, hidden, config.rms_norm_eps)

        self.attention = attention
        self.input_norm = norm("input_layernorm")
        self.post_attention_norm = norm("post_attention_layernorm")
        self.pre_feed_forward_norm = norm("pre_feedforward_layernorm")
        self.post_feed_forward_norm = norm("post_feedforward_layernorm")
        activation = hf.hidden_activation
        self.mlp = GatedMlp(parameters.under("mlp"), hidden, inner, activation=activation)
        self.mixture: Mixture | None = None
        if getattr(hf, "enable_moe_block", False):
            sizes = hf.num_experts, hidden, hf.moe_intermediate_size
            self.mixture = Mixture(
                Gemma4Router(config, parameters.under("router")),
                Experts(parameters.under("experts"), *sizes, activation=activation),
                expert_norm=norm("pre_feedforward_layernorm_2"),
            )
            self.post_mlp_norm = norm("post_feedforward_layernorm_1")
            self.post_mixture_norm = norm("post_feedforward_layernorm_2")
        if embedding_size := per_layer_size(config):
            self.gate = parameters.linear({"per_layer_input_gate": embedding_size}, hidden)
            self.projection = parameters.linear({"per_layer_projection": hidden}, embedding_size)
            self.post_projection_norm = norm("post_per_layer_input_norm")
            self._activation: Callable[[torch.Tensor], torch.Tensor] = ACTIVATIONS[activation]
        self.scale = parameters.tensor("layer_scalar", 1, fill="ones")

    def __call__(
        self, hidden: torch.Tensor, batch: Batch, embedded: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`embedded`: [tokens, values of a layer's embedding]"""
        hidden = hidden + self.post_attention_norm(self.attention(self.input_norm(hidden), batch))
        out = self.mlp(self.pre_feed_forward_norm(hidden))
        if self.mixture is not None:
            out = self.post_mlp_norm(out) + self.post_mixture_norm(self.mixture(hidden))
        hidden = hidden + self.post_feed_forward_norm(out)
        if embedded is not None:
            gated = self._activation(self.gate(hidden)) * embedded
            hidden = hidden + self.post_projection_norm(self.projection(gated))
        return hidden * self.scale


class LayerEmbeddings:
    """For each layer a vector of each token, made of the token and of its embedding."""

    def __init__(self, config: ModelConfig, parameters: Parameters, size: int) -> None:
        hf, parameters = config.hf, parameters.under("model")
        self._shape = config.num_layers, size
        self._scale = torch.tensor(math.sqrt(size)).to(parameters.dtype).item()
        # As the checkpoint holds it: rows alone are read, and it is most of a small model.
        self._table = parameters.empty(
            hf.vocab_size_per_layer_input, config.num_layers * size, dtype=config.dtype
        )
        parameters.add("embed_tokens_per_layer.weight", self._table)
        self._projection = parameters.linear(
            {"per_layer_model_projection": config.num_layers * size}, config.hidden_size
        )
        self._projection_scale = config.hidden_size**-0.5
        self._norm = RmsNorm(parameters, "per_layer_projection_norm", size, config.rms_norm_eps)

    def __call__(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Ids [tokens] and their embeddings [tokens, hidden] -> [layers, tokens, size]"""
        embedded = F.embedding(tokens, self._table).to(hidden.dtype) * self._scale
        seen = self._norm((self._projection(hidden) * self._projection_scale).view(-1, *self._shape))
        return ((seen + embedded.view(-1, *self._shape)) * 2**-0.5).transpose(0, 1)


class Gemma4Decoder(Decoder):
    def __init__(self, config: ModelConfig, parameters: Parameters, layers: list[Gemma4Layer]) -> None:
        scale = math.sqrt(config.hidden_size)
        cap = getattr(config.hf, "final_logit_softcapping", None)
        super().__init__(config, parameters, layers, embedding_scale=scale, logit_softcap=cap)
        self._own_layers = layers
        self._layer_embeddings: LayerEmbeddings | None = None
        if embedding_size := per_layer_size(config):
            self._layer_embeddings = LayerEmbeddings(config, parameters, embedding_size)

    def forward(self, batch: Batch) -> torch.Tensor:
        if self._layer_embeddings is None:
            return super().forward(batch)
        hidden = self.embed(batch.tokens)
        embedded = self._layer_embeddings(batch.tokens, hidden)
        for layer, embedded_layer in zip(self._own_layers, embedded, strict=True):
            hidden = layer(hidden, batch, embedded_layer)
        return batch.chosen(self.norm(hidden))


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    """The last `num_kv_shared_layers` layers read what the last one of their kind before them writes."""
    hf = config.hf
    own_layers = config.num_layers - (getattr(hf, "num_kv_shared_layers", 0) or 0)
    layers: list[Gemma4Layer] = []
    sources: dict[str, Gemma4Attention] = {}
    ropes: dict[str, Rope] = {}
    for index, kind in enumerate(hf.layer_types):
        layer, inner = parameters.under(f"model.layers.{index}"), hf.intermediate_size
        attention_parameters = layer.under("self_attn")
        attention: AttentionModule
        if index < own_layers:
            of_layer = hf.per_layer_config[index]
            if kind not in ropes:
                ropes[kind] = make_rope(replace(config, hf=of_layer, head_dim=of_layer.head_dim), kind)
            attention = sources[kind] = _attention(config, attention_parameters, index, of_layer, ropes[kind])
        elif kind not in sources:
            raise ModelError(f"num_kv_shared_layers: no layer before layer {index} is of its kind, {kind}")
        else:
            attention = SharedAttention(config, attention_parameters, sources[kind])
            inner *= 2 if hf.use_double_wide_mlp else 1
        layers.append(Gemma4Layer(config, layer, attention, inner))
    return Gemma4Decoder(config, parameters, layers)


def _attention(
    config: ModelConfig, parameters: Parameters, index: int, of_layer: Any, rope: Rope
) -> Gemma4Attention:
    """`of_layer`: transformers' configuration of this layer."""
    hf = config.hf
    return Gemma4Attention(
        parameters,
        index,
        config.hidden_size,
        config.num_heads,
        of_layer.num_key_value_heads,
        of_layer.head_dim,
        rope,
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        norm_eps=config.rms_norm_eps,
        options=AttentionOptions(scale=1.0, window=window(config, index)),
        values=not (hf.attention_k_eq_v and hf.layer_types[index] == "full_attention"),
    )


def per_layer_size(config: ModelConfig) -> int:
    """Values of a layer's embedding of a token; 0: layers have none."""
    return getattr(config.hf, "hidden_size_per_layer_input", None) or 0
