"""GLM-4.5: arXiv:2508.06471. Experts beside a shared one, routed as in DeepSeek-V3 (arXiv:2412.19437)."""

from __future__ import annotations

from baton.layers.parameters import Parameters
from baton.models import deepseek, llama
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    return llama.llama_like(config, parameters, deepseek.feed_forward)
