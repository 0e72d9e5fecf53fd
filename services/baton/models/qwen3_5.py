"""Qwen3.5 and its followers, dense and with experts: as Qwen3-Next, with the projections of Gated DeltaNet in
tensors of their own. The wrapper that is published has a vision tower: Qwen3-VL's without DeepStack, with its
three axes of positions in the part of a head that is rotated."""

from __future__ import annotations

from baton.layers.parameters import Parameters
from baton.models import qwen3_next
from baton.models.config import ModelConfig, make_rope
from baton.models.decoder import Decoder
from baton.models.qwen3_next import build_mtp as build_mtp
from baton.models.qwen3_vl import add_vision, with_axes
from baton.models.qwen3_vl_vision import Qwen3VLVisionTower


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    rope = make_rope(config, partial=True)
    sees = hasattr(config.whole, "vision_config")
    if sees:
        rope = with_axes(config, rope, (11, 11, 10))
    decoder = qwen3_next.build(config, parameters, rope, by_key_head=False)
    if sees:
        add_vision(decoder, build_vision(config, parameters))
    return decoder


def build_vision(config: ModelConfig, parameters: Parameters) -> Qwen3VLVisionTower:
    """The tower alone, for encode nodes."""
    return Qwen3VLVisionTower(config.whole.vision_config, parameters.under("model.visual"))
