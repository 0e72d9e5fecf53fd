"""How a model wants its pictures: preprocessor_config.json, as Qwen2VLImageProcessor reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from baton.checkpoint_limits import read_json
from baton.model_path import CheckpointError

MOST_PIXELS = 64_000_000
"""Pixels of a picture by its header. Decoded they take four bytes each."""
MOST_ELONGATED = 200
"""The longer side of a picture, divided by the shorter, at most."""
BICUBIC = 3
FILE = "preprocessor_config.json"


class PictureError(ValueError):
    """A picture cannot be used. One line, which goes on after the picture's name: "is ..."."""


@dataclass(frozen=True, slots=True)
class PictureSettings:
    patch: int
    merge: int
    """Patches of a token's height, and of its width."""
    least_pixels: int
    most_pixels: int
    """Most pixels of a resized picture."""

    @property
    def factor(self) -> int:
        """Pixels of a token's height and width."""
        return self.patch * self.merge

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a resized picture: whole tokens, about the same shape. Raises PictureError."""
        if not 0 < height * width <= MOST_PIXELS:
            raise PictureError(f"has {width} x {height} pixels; at most {MOST_PIXELS:,} are taken")
        if max(height, width) > MOST_ELONGATED * min(height, width):
            raise PictureError(
                f"has {width} x {height} pixels; one side may be {MOST_ELONGATED} times as long as the other"
            )
        factor = self.factor
        # Halves are rounded to even numbers, as transformers does.
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        if high * wide > self.most_pixels:
            beta = math.sqrt(height * width / self.most_pixels)
            high, wide = (max(factor, math.floor(n / beta / factor) * factor) for n in (height, width))
        elif high * wide < self.least_pixels:
            beta = math.sqrt(self.least_pixels / (height * width))
            high, wide = (math.ceil(n * beta / factor) * factor for n in (height, width))
        return high, wide


def read_settings(path: Path) -> PictureSettings:
    """Settings of the checkpoint in the directory `path`. Raises CheckpointError for what is not
    supported."""
    file = path / FILE
    if not file.is_file():
        raise CheckpointError(f"{path} has no {FILE}, which says how pictures are resized; get it again")
    raw = read_json(file)
    expected = {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": BICUBIC,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
    }
    for name, value in expected.items():
        if raw.get(name, value) != value:
            raise CheckpointError(f"{file}: {name} is {raw[name]!r}; only {value!r} is supported")
    size = raw.get("size") or {}
    try:
        found = PictureSettings(
            int(raw["patch_size"]),
            int(raw["merge_size"]),
            int(raw.get("min_pixels") or size["shortest_edge"]),
            int(raw.get("max_pixels") or size["longest_edge"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} does not say {error}") from error
    if found.factor < 1 or not 0 < found.least_pixels <= found.most_pixels <= MOST_PIXELS:
        raise CheckpointError(f"{file}: sizes cannot be used: {found}")
    return found
