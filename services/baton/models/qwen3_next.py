"""Qwen3-Next (Qwen3-Next-80B-A3B, Qwen Team 2025): three of four layers are Gated DeltaNet, the others gated
attention whose heads are rotated in part; mixtures with a shared expert; norms whose weights are stored minus
one."""

from __future__ import annotations

from baton.layers.attention import Attention
from baton.layers.gated_delta_net import DeltaNetShape, GatedDeltaNet
from baton.layers.mlp import GatedMlp
from baton.layers.moe import Experts, GatedExpert, Mixture
from baton.layers.moe_routing import MoeGate, Routing
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models.config import ModelConfig, ModelError, make_rope, require_silu
from baton.models.decoder import Decoder, DecoderLayer, FeedForward
from baton.models.mtp_layer import MtpLayer


def build(
    config: ModelConfig, parameters: Parameters, rope: Rope | None = None, *, by_key_head: bool = True
) -> Decoder:
    """`rope`: None: the one that the configuration names; `by_key_head`: see GatedDeltaNet."""
    require_silu(config)
    parameters.ignore("mtp.")  # read by `models.mtp`
    rope = rope or make_rope(config, partial=True)
    hf, hidden, eps = config.hf, config.hidden_size, config.rms_norm_eps
    layers = []
    for index, kind in enumerate(hf.layer_types):
        layer = parameters.under(f"model.layers.{index}")
        mixer: Attention | GatedDeltaNet
        if kind == "linear_attention":
            under = layer.under("linear_attn")
            mixer = GatedDeltaNet(under, index, hidden, _shape(config), eps, by_key_head=by_key_head)
        elif kind == "full_attention":
            mixer = _attention(config, layer.under("self_attn"), index, rope)
        else:
            raise ModelError(f"layer_types has {kind!r}; supported are linear_attention and full_attention")
        layers.append(_layer(config, layer, mixer, index))
    return Decoder(config, parameters, layers, norm_plus_one=True)


def build_mtp(config: ModelConfig, parameters: Parameters) -> MtpLayer:
    """Raises ModelError for what is not supported."""
    if getattr(config.hf, "mtp_use_dedicated_embeddings", False):
        raise ModelError("layers of multi-token prediction with embeddings of their own are not supported")
    mtp, hidden, eps = parameters.under("mtp"), config.hidden_size, config.rms_norm_eps
    layer = mtp.under("layers.0")
    mixer = _attention(config, layer.under("self_attn"), 0, make_rope(config, partial=True))
    return MtpLayer(
        RmsNorm(mtp, "pre_fc_norm_embedding", hidden, eps, plus_one=True),
        RmsNorm(mtp, "pre_fc_norm_hidden", hidden, eps, plus_one=True),
        mtp.linear({"fc": hidden}, 2 * hidden),
        _layer(config, layer, mixer, 0),
        RmsNorm(mtp, "norm", hidden, eps, plus_one=True),
    )


def _layer(
    config: ModelConfig, layer: Parameters, mixer: Attention | GatedDeltaNet, index: int
) -> DecoderLayer:
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return DecoderLayer(
        RmsNorm(layer, "input_layernorm", hidden, eps, plus_one=True),
        mixer,
        RmsNorm(layer, "post_attention_layernorm", hidden, eps, plus_one=True),
        _feed_forward(config, layer.under("mlp"), index),
    )


def _attention(config: ModelConfig, parameters: Parameters, index: int, rope: Rope) -> Attention:
    bias = bool(config.hf.attention_bias)
    return Attention(
        parameters,
        index,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        rope,
        qkv_bias=bias,
        output_bias=bias,
        norm_eps=config.rms_norm_eps,
        norm_plus_one=True,
        gated=True,
    )


def _shape(config: ModelConfig) -> DeltaNetShape:
    hf = config.hf
    keys, values = hf.linear_num_key_heads, hf.linear_num_value_heads
    if keys < 1 or values % keys:
        raise ModelError(f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}")
    return DeltaNetShape(
        keys, values, hf.linear_key_head_dim, hf.linear_value_head_dim, hf.linear_conv_kernel_dim
    )


def _feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> FeedForward:
    hf, hidden = config.hf, config.hidden_size
    count, sparse = getattr(hf, "num_experts", 0), getattr(hf, "decoder_sparse_step", 1)
    if not count or index in (getattr(hf, "mlp_only_layers", None) or ()) or (index + 1) % sparse:
        return GatedMlp(parameters, hidden, hf.intermediate_size)
    routing = Routing(hf.num_experts_per_tok, renormalize=getattr(hf, "norm_topk_prob", True))
    return Mixture(
        MoeGate(parameters, "gate", hidden, count, routing),
        Experts(parameters.under("experts"), count, hidden, hf.moe_intermediate_size),
        GatedExpert(parameters, "shared_expert", hidden, hf.shared_expert_intermediate_size),
    )
