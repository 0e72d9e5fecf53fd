"""Images in a prompt: where they lie, and the positions around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Union

import numpy as np
import numpy.typing as npt

from baton.kvcache.page_keys import placeholder

if TYPE_CHECKING:
    import torch

ImageContent = Union["npt.NDArray[np.uint8]", "torch.Tensor"]
"""Pixels, [height, width, 3], resized as the model wants them; or what a vision tower has made of them, as in
`VisionTower.encode`."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where a request's images are to be had: addresses, host:port."""

    pictures: str
    """Address at which the images' pixels are."""
    encoders: tuple[str, ...] = ()
    """Addresses of encode nodes, in the order to try."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image whose placeholders are the prompt's tokens from `start` on, row by row."""

    start: int
    rows: int
    columns: int
    """Columns of tokens."""
    digest: bytes
    """32 bytes that name the pixels and how they were made of the image."""
    content: ImageContent | None = field(default=None, compare=False, repr=False)
    """Needed while tokens of the image are computed; None: it is not here."""

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.start + self.tokens


def with_placeholders(tokens: Sequence[int], images: Sequence[ImageSpan]) -> tuple[int, ...]:
    """The prompt, or its beginning, in which each image's tokens name the image."""
    found = list(tokens)
    for image in images:
        end = min(image.end, len(found))
        found[image.start : end] = [placeholder(image.digest, index) for index in range(end - image.start)]
    return tuple(found)


def with_contents(
    images: Sequence[ImageSpan], contents: Mapping[bytes, ImageContent]
) -> tuple[ImageSpan, ...]:
    """`contents`: by digest."""
    return tuple(replace(image, content=contents.get(image.digest, image.content)) for image in images)


def without_contents(images: Sequence[ImageSpan]) -> tuple[ImageSpan, ...]:
    return tuple(replace(image, content=None) for image in images)


def looks_at(images: Sequence[ImageSpan], start: int, count: int) -> bool:
    """Whether any of the tokens start .. start + count - 1 is one of an image."""
    return any(image.start < start + count and image.end > start for image in images)


def rotary_shift(images: Sequence[ImageSpan], start: int) -> int:
    """`rotary_positions` of a token of text - `start`, its position."""
    before = (image for image in images if image.start < start)
    return sum(max(image.rows, image.columns) - image.tokens for image in before)


def rotary_positions(images: Sequence[ImageSpan], start: int, count: int) -> npt.NDArray[np.int32]:
    """Time, height and width of tokens start .. start + count - 1, [3, count] (M-RoPE, Wang et al.,
    arXiv:2409.12191): text counts on from the largest position of the image before it."""
    positions = np.tile(np.arange(start, start + count, dtype=np.int32), (3, 1))
    shift = 0
    """Position - index, of the text before the image."""
    for image in images:
        if image.start >= start + count:
            break
        first, last = max(image.start, start), min(image.end, start + count)
        if first < last:
            index = np.arange(first - image.start, last - image.start, dtype=np.int32)
            at = positions[:, first - start : last - start]
            at[:] = image.start + shift
            at[1] += index // image.columns
            at[2] += index % image.columns
        step = max(image.rows, image.columns) - (image.end - image.start)
        shift += step
        positions[:, max(0, image.end - start) :] += step
    return positions
