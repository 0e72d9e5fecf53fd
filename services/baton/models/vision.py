"""The vision tower of a checkpoint alone, for encode nodes."""

from __future__ import annotations

from pathlib import Path

import torch

from baton.layers.parameters import Parameters
from baton.model_path import CheckpointError
from baton.models.config import ModelError, read_config
from baton.models.decoder import VisionTower
from baton.models.loader import declared, fill_at_random, fingerprint, read_weights
from baton.models.registry import FAMILIES, family
from baton.pictures.settings import read_settings

USUAL_PIXELS = 2**24
"""Pixels of the largest image that Qwen3-VL's own checkpoints take."""


def load_tower(path: Path, dtype: torch.dtype | None, device: torch.device, load_format: str) -> VisionTower:
    """With the weights that `load_model` gives it, random ones too. Raises CheckpointError for a model that
    does not see."""
    config = read_config(path, None, "auto")
    made = family(config.architecture) if config.architecture in FAMILIES else None
    sees = hasattr(made, "build_vision") and hasattr(config.whole, "vision_config")
    if made is None or not sees:
        raise ModelError(
            f"{config.architecture} has no vision tower here: encode nodes are for models that see"
        )
    parameters = Parameters(dtype or config.dtype, device)
    tower: VisionTower = made.build_vision(config, parameters)
    if load_format == "dummy":
        seeds = {name: index for index, name in enumerate(declared(path).parameters.table)}
        fill_at_random(parameters, lambda done, total: None, seeds)
    else:
        parameters.ignore("")  # the language model
        read_weights(path, parameters, lambda done, total: None)
    return tower


def tower_fingerprint(path: Path, dtype: torch.dtype, device: torch.device, load_format: str) -> str:
    """Fingerprint of all that the embeddings of an image depend on."""
    return fingerprint(path, dtype, load_format, f"vision {device.type}")


def most_image_tokens(path: Path, tower: VisionTower | None) -> int:
    """Tokens of the largest image, once it has been resized as the checkpoint says; 0 without a tower."""
    if tower is None:
        return 0
    try:
        pixels = read_settings(path).most_pixels
    except CheckpointError:  # then gateways take no images for it, at least not with its tokenizer
        pixels = USUAL_PIXELS
    return max(1, pixels // (tower.merge * tower.patch) ** 2)
