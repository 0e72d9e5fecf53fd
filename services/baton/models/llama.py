"""Llama: Touvron et al., arXiv:2307.09288; and what differs from it by an option: Mistral (arXiv:2310.06825),
Phi-3 (arXiv:2404.14219) and 4 (arXiv:2412.08905), Qwen 2 (arXiv:2407.10671) and 3 (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton.layers.attention import NONE, Attention, AttentionModule, AttentionOptions
from baton.layers.mlp import GatedMlp
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models.config import ModelConfig, make_rope, window
from baton.models.decoder import Decoder, DecoderLayer, FeedForward


def llama_attention(
    config: ModelConfig,
    parameters: Parameters,
    index: int,
    rope: Rope,
    options: AttentionOptions = NONE,
    norm_plus_one: bool = False,
) -> Attention:
    """Qwen 2 has biases of queries, keys and values, Qwen 3 and Gemma 3 norms of each query and key,
    GLM-4-MoE either by options, Phi-3 one projection. `options`: those beside the window."""
    bias = bool(getattr(config.hf, "attention_bias", False))
    qwen2 = config.architecture.startswith("Qwen2")
    glm = config.architecture == "Glm4MoeForCausalLM"
    norms = config.hf.use_qk_norm if glm else config.architecture.startswith(("Qwen3", "Gemma3"))
    return Attention(
        parameters,
        index,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        rope,
        qkv_bias=bias or qwen2,
        output_bias=bias and not qwen2 and not glm,
        norm_eps=config.rms_norm_eps if norms else None,
        norm_plus_one=norm_plus_one,
        options=replace(options, window=window(config, index)),
        merged="qkv_proj" if config.architecture == "Phi3ForCausalLM" else None,
    )


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    return llama_like(config, parameters, feed_forward)


def llama_like(
    config: ModelConfig,
    parameters: Parameters,
    feed_forward: Callable[[ModelConfig, Parameters, int], FeedForward],
    attention: Callable[[ModelConfig, Parameters, int, Rope], AttentionModule] = llama_attention,
) -> Decoder:
    """`feed_forward` and `attention` make those of a layer, whose parameters and number they get."""
    rope = make_rope(config)
    for index in range(getattr(config.hf, "num_nextn_predict_layers", None) or 0):
        # They predict further tokens, for speculation, and are not used.
        parameters.ignore(f"model.layers.{config.num_layers + index}.")
    hidden, eps = config.hidden_size, config.rms_norm_eps
    layers = []
    for index in range(config.num_layers):
        own = parameters.under(f"model.layers.{index}")
        layers.append(
            DecoderLayer(
                RmsNorm(own, "input_layernorm", hidden, eps),
                attention(config, own.under("self_attn"), index, rope),
                RmsNorm(own, "post_attention_layernorm", hidden, eps),
                feed_forward(config, own, index),
            )
        )
    return Decoder(config, parameters, layers)


def feed_forward(config: ModelConfig, parameters: Parameters, index: int) -> GatedMlp:
    return GatedMlp(
        parameters.under("mlp"),
        config.hidden_size,
        config.hf.intermediate_size,
        bias=bool(getattr(config.hf, "mlp_bias", False)),
        merged="gate_up_proj" if config.architecture == "Phi3ForCausalLM" else None,
    )
