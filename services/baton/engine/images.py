"""Embeddings of images."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.batch import HostBatch
from baton.engine.image_spans import ImageSpan, looks_at, rotary_positions
from baton.engine.plan import PlanRow
from baton.layers.async_copy import to_device
from baton.layers.batch import InputEmbeddings
from baton.layers.tensor_parallel import Communicator
from baton.models.decoder import VisionTower

BATCH_TOKENS = 8192
"""Tokens of the images that are encoded together; one image is always taken."""
CACHED_BYTES = 256 * 2**20
"""Bytes of embeddings that are kept: an image that chunks cut, or that comes again, is not encoded again."""


class EmbeddingCache:
    """Embeddings by their images' digests; those least recently used go first. For several threads."""

    def __init__(self, room: int = CACHED_BYTES) -> None:
        self._room = room
        self._known: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def get(self, digest: bytes) -> torch.Tensor | None:
        """An image's embeddings, in the form of VisionTower.encode; None: they are not kept."""
        with self._lock:
            found = self._known.get(digest)
            if found is not None:
                self._known.move_to_end(digest)
            return found

    def clear(self) -> None:
        with self._lock:
            self._known.clear()
            self.bytes = 0

    def add(self, digest: bytes, rows: torch.Tensor) -> None:
        with self._lock:
            before = self._known.pop(digest, None)
            self.bytes += rows.nbytes - (before.nbytes if before is not None else 0)
            self._known[digest] = rows
            while self.bytes > self._room and len(self._known) > 1:
                self.bytes -= self._known.popitem(last=False)[1].nbytes


def batch_of(tokens: Iterable[int]) -> int:
    """How many images are encoded together, of some that have so many tokens each: one at least."""
    count = total = 0
    for each in tokens:
        total += each
        if count and total > BATCH_TOKENS:
            break
        count += 1
    return count


def _ignore(tokens: int, seconds: float) -> None:
    """For those who want no times."""


@dataclass(slots=True)
class EncodeCounters:
    """What a tower has done so far, as in node_pb2.Load."""

    images: int = 0
    tokens: int = 0
    seconds: float = 0.0
    batches: int = 0
    hits: int = 0
    """Images whose embeddings were still known; on encode nodes."""
    timed: Callable[[int, float], None] = _ignore
    """Gets the tokens and seconds of each batch."""


def encode(
    tower: VisionTower, images: Iterable[torch.Tensor], counters: EncodeCounters
) -> list[torch.Tensor]:
    """Encodes one batch by VisionTower.encode, and counts it. Waits for the device, to measure times."""
    _wait(tower.device)
    begun = time.perf_counter()
    found = [rows.contiguous() for rows in tower.encode(list(images))]
    _wait(tower.device)
    seconds, tokens = time.perf_counter() - begun, sum(rows.shape[1] for rows in found)
    counters.seconds += seconds
    counters.images += len(found)
    counters.tokens += tokens
    counters.batches += 1
    counters.timed(tokens, max(seconds, 1e-6))
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class ImageEncoder:
    """Encodes the images of a step that are not known from an earlier one. For one thread."""

    def __init__(
        self, tower: VisionTower, ranks: Communicator | None = None, rank: int = 0, room: int = CACHED_BYTES
    ) -> None:
        """`ranks`: rank 0 has the images, and gives the others what it has made of them."""
        self.tower, self.cache = tower, EmbeddingCache(room)
        self._ranks, self._rank = ranks, rank
        self._ahead: dict[bytes, torch.Tensor] = {}
        """What the next step looks at, if it was encoded before."""
        self.counters = EncodeCounters()
        self._told = 0.0

    def encode_ahead(self, rows: Iterable[PlanRow]) -> None:
        """Encodes what these rows, those of the next step, look at: within a step other ranks do not wait for
        as long as that may take."""
        self._ahead = self._embeddings(
            image for row in rows for image in row.images if looks_at((image,), row.start, row.count)
        )

    def run_largest(self, tokens: int) -> None:
        """Has the tower allocate all that it may need, where no image has more than so many tokens."""
        side = self.tower.merge * self.tower.patch
        for count in {tokens, min(tokens, BATCH_TOKENS)}:
            rows = max(1, math.isqrt(count))
            self.tower.encode([torch.zeros(rows * side, -(-count // rows) * side, 3, dtype=torch.uint8)])

    def seconds(self) -> float:
        """Seconds of encoding since the last call."""
        before, self._told = self._told, self.counters.seconds
        return self._told - before

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
        rotary = to_device(np.concatenate(axes, 1), device)
        if not parts:
            return rotary, None
        where = to_device(np.concatenate(at), device)
        if self._rank == 0:
            found = self._embeddings(image for image, _ in parts)
            rows = torch.cat([found[image.digest][:, part].to(device) for image, part in parts], 1)
        else:
            tower = self.tower
            sizes = tower.parts, len(where), tower.values // tower.parts
            rows = torch.empty(sizes, dtype=tower.dtype, device=device)
        return rotary, InputEmbeddings(where, rows if self._ranks is None else self._ranks.broadcast(rows))

    def _embeddings(self, images: Iterable[ImageSpan]) -> dict[bytes, torch.Tensor]:
        found: dict[bytes, torch.Tensor] = {}
        missing: dict[bytes, torch.Tensor] = {}
        for image in images:
            if image.digest in found or image.digest in missing:
                continue
            content, rows = image.content, self._ahead.get(image.digest)
            if rows is None:
                rows = content if isinstance(content, torch.Tensor) else self.cache.get(image.digest)
            if rows is not None:
                found[image.digest] = rows
            elif isinstance(content, np.ndarray):
                missing[image.digest] = torch.from_numpy(content)
            else:
                raise ValueError("an image is to be computed that is not here")
        pixels = (self.tower.merge * self.tower.patch) ** 2
        while missing:
            count = batch_of(image.shape[0] * image.shape[1] // pixels for image in missing.values())
            digests = list(missing)[:count]
            batch = [missing.pop(digest) for digest in digests]
            for digest, rows in zip(digests, encode(self.tower, batch, self.counters), strict=True):
                found[digest] = rows
                self.cache.add(digest, rows)
        return found
