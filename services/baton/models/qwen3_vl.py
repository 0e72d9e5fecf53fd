"""Qwen3-VL (arXiv:2511.21631), dense and with experts: Qwen 3, whose positions have three axes where images
are, with a vision tower. Features of some of the tower's layers are added behind the first layers."""

from __future__ import annotations

from baton.layers.parameters import Parameters
from baton.layers.rope import Rope, interleaved_axes
from baton.models import qwen3, qwen3_moe
from baton.models.config import ModelConfig, ModelError, make_rope
from baton.models.decoder import Decoder
from baton.models.qwen3_vl_vision import Qwen3VLVisionTower


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    module = qwen3_moe if "Moe" in config.architecture else qwen3
    decoder: Decoder = module.build(config, parameters, _rope(config))
    vision = config.whole.vision_config
    decoder.vision = build_vision(config, parameters)
    if vision.out_hidden_size != config.hidden_size:
        raise ModelError(
            f"out_hidden_size of vision_config is {vision.out_hidden_size}; it must be the language model's "
            f"hidden_size, {config.hidden_size}"
        )
    if len(vision.deepstack_visual_indexes) > config.num_layers:
        raise ModelError(
            "deepstack_visual_indexes of vision_config names more layers than the language model has"
        )
    return decoder


def build_vision(config: ModelConfig, parameters: Parameters) -> Qwen3VLVisionTower:
    """The tower alone, for encode nodes."""
    return Qwen3VLVisionTower(config.whole.vision_config, parameters.under("model.visual"))


def _rope(config: ModelConfig) -> Rope:
    rope = make_rope(config)
    sections = config.hf.rope_parameters.get("mrope_section", (24, 20, 20))
    if len(sections) != 3 or sum(sections) != rope.dim // 2:
        raise ModelError(
            f"mrope_section {list(sections)} must divide the {rope.dim // 2} pairs of a head among three axes"
        )
    return Rope(rope.frequencies, rope.scale, interleaved_axes(rope.dim // 2, sections))
