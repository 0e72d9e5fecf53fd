"""GLM-4.5 and 4.6 (arXiv:2508.06471): DeepSeek-V3's mixtures of experts, Llama's attention with
norms of each query and key as an option, and heads that may be rotated in part."""

from __future__ import annotations

from functools import partial

from baton.layers.attention import NONE, Attention
from baton.layers.parameters import Parameters
from baton.models.config import ModelConfig, make_rope, require_silu
from baton.models.decoder import Decoder
from baton.models.deepseek_v3 import feed_forward
from baton.models.llama import llama_attention, llama_like, nextn_layer
from baton.models.mtp_layer import MtpLayer


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    """A sliding_window means nothing."""
    require_silu(config)
    rope = make_rope(config, partial=True)
    return llama_like(config, parameters, feed_forward, _attention(config), rope)


def build_mtp(config: ModelConfig, parameters: Parameters) -> MtpLayer:
    rope = make_rope(config, partial=True)
    return nextn_layer(config, parameters, feed_forward, _attention(config), rope)


def _attention(config: ModelConfig) -> partial[Attention]:
    return partial(llama_attention, options=NONE, output_bias=False, norms=config.hf.use_qk_norm)
