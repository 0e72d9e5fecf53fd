"""Llama: Touvron et al., arXiv:2307.09288; and what families with similar layers are made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from baton.layers.attention import NONE, Attention, AttentionModule, AttentionOptions
from baton.layers.mlp import GatedMlp
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models.config import ModelConfig, make_rope, require_silu, window
from baton.models.decoder import Decoder, DecoderLayer, FeedForward
from baton.models.mtp_layer import MtpLayer


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    """A sliding_window, which other families have left behind in config.json, means nothing."""
    require_silu(config)
    return llama_like(config, parameters, feed_forward, partial(llama_attention, options=NONE))


def llama_attention(
    config: ModelConfig,
    parameters: Parameters,
    index: int,
    rope: Rope,
    *,
    options: AttentionOptions | None = None,
    qkv_bias: bool | None = None,
    output_bias: bool | None = None,
    norms: bool = False,
    norm_plus_one: bool = False,
    merged: str | None = None,
) -> Attention:
    """`options`: None: the window alone that config.json names for this layer. `qkv_bias` and `output_bias`:
    None: as its attention_bias says. `norms`: queries and keys of each head are normalized."""
    bias = bool(getattr(config.hf, "attention_bias", False))
    return Attention(
        parameters,
        index,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        rope,
        qkv_bias=bias if qkv_bias is None else qkv_bias,
        output_bias=bias if output_bias is None else output_bias,
        norm_eps=config.rms_norm_eps if norms else None,
        norm_plus_one=norm_plus_one,
        options=AttentionOptions(window=window(config, index)) if options is None else options,
        merged=merged,
    )


def llama_like(
    config: ModelConfig,
    parameters: Parameters,
    feed_forward: Callable[[ModelConfig, Parameters, int], FeedForward],
    attention: Callable[[ModelConfig, Parameters, int, Rope], AttentionModule] = llama_attention,
    rope: Rope | None = None,
) -> Decoder:
    """`feed_forward` and `attention` make those of a layer, whose parameters and number they get; `rope`:
    None: whole heads are rotated."""
    rope = rope or make_rope(config)
    for index in range(getattr(config.hf, "num_nextn_predict_layers", None) or 0):
        # They predict further tokens, for speculation: `models.mtp` reads them.
        parameters.ignore(f"model.layers.{config.num_layers + index}.")
    layers = []
    for index in range(config.num_layers):
        layer = parameters.under(f"model.layers.{index}")
        mixer, rest = (
            attention(config, layer.under("self_attn"), index, rope),
            feed_forward(config, layer, index),
        )
        layers.append(_layer(config, layer, mixer, rest))
    return Decoder(config, parameters, layers)


def nextn_layer(
    config: ModelConfig,
    parameters: Parameters,
    feed_forward: Callable[[ModelConfig, Parameters, int], FeedForward],
    attention: Callable[[ModelConfig, Parameters, int, Rope], AttentionModule],
    rope: Rope | None = None,
) -> MtpLayer:
    """The first layer behind the model's own, in DeepSeek's layout (num_nextn_predict_layers); see
    `llama_like`."""
    index, hidden, eps = config.num_layers, config.hidden_size, config.rms_norm_eps
    layer = parameters.under(f"model.layers.{index}")
    mixer = attention(config, layer.under("self_attn"), 0, rope or make_rope(config))
    return MtpLayer(
        RmsNorm(layer, "enorm", hidden, eps),
        RmsNorm(layer, "hnorm", hidden, eps),
        layer.linear({"eh_proj": hidden}, 2 * hidden),
        _layer(config, layer, mixer, feed_forward(config, layer, index)),
        RmsNorm(layer, "shared_head.norm", hidden, eps),
    )


def _layer(
    config: ModelConfig, layer: Parameters, attention: AttentionModule, feed_forward: FeedForward
) -> DecoderLayer:
    hidden, eps = config.hidden_size, config.rms_norm_eps
    before = RmsNorm(layer, "input_layernorm", hidden, eps)
    return DecoderLayer(
        before, attention, RmsNorm(layer, "post_attention_layernorm", hidden, eps), feed_forward
    )


def feed_forward(
    config: ModelConfig, parameters: Parameters, index: int, merged: str | None = None
) -> GatedMlp:
    return GatedMlp(
        parameters.under("mlp"),
        config.hidden_size,
        config.hf.intermediate_size,
        bias=bool(getattr(config.hf, "mlp_bias", False)),
        merged=merged,
    )
