"""Qwen3-VL (arXiv:2511.21631), dense and with experts: Qwen 3, whose positions have three axes where images
are, with a vision tower. Features of some of the tower's layers are added behind the first layers."""

from __future__ import annotations

from collections.abc import Sequence

from baton.layers.parameters import Parameters
from baton.layers.rope import Rope, interleaved_axes
from baton.models import qwen3, qwen3_moe
from baton.models.config import ModelConfig, ModelError, make_rope
from baton.models.decoder import Decoder
from baton.models.qwen3_vl_vision import Qwen3VLVisionTower


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    module = qwen3_moe if "Moe" in config.architecture else qwen3
    rope = with_axes(config, make_rope(config), (24, 20, 20))
    decoder: Decoder = module.build(config, parameters, rope)
    add_vision(decoder, build_vision(config, parameters))
    return decoder


def add_vision(decoder: Decoder, tower: Qwen3VLVisionTower) -> None:
    """Raises ModelError for a tower that is not the model's."""
    config = decoder.config
    decoder.vision = tower
    if (size := config.whole.vision_config.out_hidden_size) != config.hidden_size:
        raise ModelError(
            f"out_hidden_size of vision_config is {size}; it must be the language model's hidden_size, "
            f"{config.hidden_size}"
        )
    if tower.parts > 1 + config.num_layers:
        raise ModelError(
            "deepstack_visual_indexes of vision_config names more layers than the language model has"
        )


def build_vision(config: ModelConfig, parameters: Parameters) -> Qwen3VLVisionTower:
    """The tower alone, for encode nodes."""
    vision = config.whole.vision_config
    return Qwen3VLVisionTower(vision, parameters.under("model.visual"), vision.deepstack_visual_indexes)


def with_axes(config: ModelConfig, rope: Rope, default: Sequence[int]) -> Rope:
    """`default`: pairs of each axis where the checkpoint does not say it; those beyond a head's are left out.
    Raises ModelError."""
    pairs, sections = rope.dim // 2, config.hf.rope_parameters.get("mrope_section")
    if sections is not None and (len(sections) != 3 or sum(sections) != pairs):
        raise ModelError(
            f"mrope_section {list(sections)} must divide the {pairs} pairs of a head among three axes"
        )
    return Rope(rope.frequencies, rope.scale, interleaved_axes(pairs, sections or default))
