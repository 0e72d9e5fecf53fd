"""DeepSeek-V3.2 (arXiv:2512.02556): V3 with sparse attention; and what GLM-5 does otherwise."""

from __future__ import annotations

from functools import partial

from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.layers.sparse_mla import IndexShape, SparseMlaAttention
from baton.models import deepseek_v2, deepseek_v3, llama
from baton.models.config import ModelConfig, require_silu
from baton.models.decoder import Decoder


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    return sparse_model(config, parameters, interleaved=False)


def sparse_model(config: ModelConfig, parameters: Parameters, *, interleaved: bool) -> Decoder:
    """`interleaved`: the checkpoint's rotation of index heads pairs neighbours."""
    require_silu(config)
    dense = min(config.hf.first_k_dense_replace, config.num_layers)
    kinds = ["dense"] * dense + ["sparse"] * (config.num_layers - dense)
    deepseek_v2.require(config, "mlp_layer_types", kinds)
    deepseek_v2.require(config, "scoring_func", "sigmoid")
    deepseek_v2.require(config, "topk_method", "noaux_tc")
    attention = partial(_attention, interleaved=interleaved)
    return llama.llama_like(config, parameters, deepseek_v3.feed_forward, attention)


def _attention(
    config: ModelConfig, parameters: Parameters, index: int, rope: Rope, *, interleaved: bool
) -> SparseMlaAttention:
    hf = config.hf
    kinds = getattr(hf, "indexer_types", None) or ["full"] * config.num_layers
    shape = deepseek_v2.mla_shape(config)
    return SparseMlaAttention(
        parameters,
        index,
        config.hidden_size,
        shape,
        rope,
        deepseek_v2.attention_scale(config, shape),
        IndexShape(hf.index_n_heads, hf.index_head_dim, hf.index_topk, interleaved),
        shared=kinds[index] == "shared",
        bias=hf.attention_bias,
    )
