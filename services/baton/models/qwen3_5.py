"""Qwen3.5 and its followers, text, dense and with experts: as Qwen3-Next, with the projections of Gated
DeltaNet in tensors of their own."""

from __future__ import annotations

from baton.layers.parameters import Parameters
from baton.models import qwen3_next
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.qwen3_next import build_mtp as build_mtp


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    return qwen3_next.build(config, parameters, by_key_head=False)
