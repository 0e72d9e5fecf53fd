"""Images in a prompt: where they lie, the positions around them, and their embeddings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.batch import HostBatch
from baton.kvcache.page_keys import placeholder
from baton.layers.async_copy import to_device
from baton.layers.batch import InputEmbeddings
from baton.models.decoder import VisionTower

CACHED_BYTES = 256 * 2**20
"""Of embeddings that are kept: an image that chunks cut, or that comes again, is not encoded again."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image whose placeholders are the prompt's tokens from `start` on, row by row."""

    start: int
    rows: int
    columns: int
    """Of tokens."""
    digest: bytes
    """32 bytes that name the pixels and how they were made of the image."""
    pixels: npt.NDArray[np.uint8] = field(compare=False, repr=False)
    """[height, width, 3], resized as the model wants it."""

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns


def with_placeholders(tokens: Sequence[int], images: Sequence[ImageSpan]) -> tuple[int, ...]:
    """The prompt, in which each image's tokens name the image."""
    found = list(tokens)
    for image in images:
        found[image.start : image.end] = [
            placeholder(image.digest, index) for index in range(image.end - image.start)
        ]
    return tuple(found)


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


class ImageEncoder:
    """Encodes the images of a step that are not known from an earlier one. For one thread."""

    def __init__(self, tower: VisionTower, room: int = CACHED_BYTES) -> None:
        self._tower, self._room = tower, room
        self._known: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        """By digest, the least recently used first."""
        self._bytes = 0

    def lanes(self, host: HostBatch, device: torch.device) -> tuple[torch.Tensor, InputEmbeddings | None]:
        """`Batch.axes` and `Batch.embeddings` of a step some of whose rows have images."""
        axes, at, parts = [], [], []
        for row, first in zip(host.rows, host.starts.tolist(), strict=False):
            axes.append(rotary_positions(row.images, row.start, row.count))
            for image in row.images:
                low, high = max(image.start, row.start), min(image.end, row.start + row.count)
                if low < high:
                    at.append(np.arange(first + low - row.start, first + high - row.start))
                    parts.append((image, slice(low - image.start, high - image.start)))
        places = to_device(np.concatenate(axes, 1), device)
        if not parts:
            return places, None
        found = self._embeddings(image for image, _ in parts)
        rows = torch.cat([found[image.digest][:, part] for image, part in parts], 1)
        return places, InputEmbeddings(to_device(np.concatenate(at), device), rows)

    def _embeddings(self, images: Iterable[ImageSpan]) -> dict[bytes, torch.Tensor]:
        wanted = {image.digest: image for image in images}
        found: dict[bytes, torch.Tensor] = {}
        for digest in wanted:
            if digest in self._known:
                self._known.move_to_end(digest)
                found[digest] = self._known[digest]
        missing = [image for digest, image in wanted.items() if digest not in found]
        if missing:
            encoded = self._tower.encode([torch.from_numpy(image.pixels) for image in missing])
            for image, rows in zip(missing, encoded, strict=True):
                found[image.digest] = self._known[image.digest] = rows.contiguous()
                self._bytes += rows.nbytes
        while self._bytes > self._room and len(self._known) > 1:
            self._bytes -= self._known.popitem(last=False)[1].nbytes
        return found
