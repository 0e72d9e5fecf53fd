"""Gemma 3, text: Gemma Team, arXiv:2503.19786."""

from __future__ import annotations

import math

import torch

from baton.layers.attention import Attention, AttentionOptions
from baton.layers.batch import Batch
from baton.layers.mlp import GatedMlp
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.models.config import ModelConfig, ModelError, make_rope, window
from baton.models.decoder import Decoder
from baton.models.llama import llama_attention


class GemmaLayer:
    """Attention and feed-forward layer, each between two norms."""

    mixture = None

    def __init__(self, config: ModelConfig, parameters: Parameters, index: int, attention: Attention) -> None:
        def norm(name: str) -> RmsNorm:
            return RmsNorm(parameters, name, config.hidden_size, config.rms_norm_eps, plus_one=True)

        hf = config.hf
        self.attention = attention
        self.input_norm = norm("input_layernorm")
        self.post_attention_norm = norm("post_attention_layernorm")
        self.pre_feed_forward_norm = norm("pre_feedforward_layernorm")
        self.post_feed_forward_norm = norm("post_feedforward_layernorm")
        self.mlp = GatedMlp(
            parameters.under("mlp"), config.hidden_size, hf.intermediate_size, activation=hf.hidden_activation
        )

    def __call__(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        hidden = hidden + self.post_attention_norm(self.attention(self.input_norm(hidden), batch))
        return hidden + self.post_feed_forward_norm(self.mlp(self.pre_feed_forward_norm(hidden)))


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    """Layers with a window rotate otherwise than those without."""
    hf = config.hf
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        value = getattr(hf, name, None)
        if value is not None and value is not False:  # a cap of 0.0 is refused, too
            raise ModelError(f"{name} of Gemma 3 is not supported")
    ropes = {kind: make_rope(config, kind) for kind in set(hf.layer_types)}
    layers = []
    for index, kind in enumerate(hf.layer_types):
        layer = parameters.under(f"model.layers.{index}")
        attention = llama_attention(
            config,
            layer.under("self_attn"),
            index,
            ropes[kind],
            options=AttentionOptions(scale=hf.query_pre_attn_scalar**-0.5, window=window(config, index)),
            norms=True,
            norm_plus_one=True,
        )
        layers.append(GemmaLayer(config, layer, index, attention))
    scale = math.sqrt(config.hidden_size)
    return Decoder(config, parameters, layers, norm_plus_one=True, embedding_scale=scale)
