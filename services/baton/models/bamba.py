"""Bamba (IBM, 2024): Mamba-2, and between them attention whose heads are rotated in part."""

from __future__ import annotations

from baton.layers.attention import AttentionModule
from baton.layers.mlp import GatedMlp
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.recurrent import RecurrentModule
from baton.models.config import ModelConfig, make_rope, require_silu
from baton.models.decoder import Decoder, DecoderLayer
from baton.models.granite_moe_hybrid import mamba
from baton.models.llama import llama_attention


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    require_silu(config)
    hf, hidden, eps = config.hf, config.hidden_size, config.rms_norm_eps
    rope = make_rope(config, partial=True)
    layers = []
    for index, kind in enumerate(hf.layers_block_type):
        layer = parameters.under(f"model.layers.{index}")
        mixer: AttentionModule | RecurrentModule
        if kind == "linear_attention":
            mixer = mamba(config, layer.under("mamba"), index)
        else:
            mixer = llama_attention(config, layer.under("self_attn"), index, rope)
        layers.append(
            DecoderLayer(
                RmsNorm(layer, "input_layernorm", hidden, eps),
                mixer,
                RmsNorm(layer, "pre_ff_layernorm", hidden, eps),
                GatedMlp(layer.under("feed_forward"), hidden, hf.intermediate_size, bias=hf.mlp_bias),
            )
        )
    return Decoder(config, parameters.named({"model.norm": "model.final_layernorm"}), layers)
