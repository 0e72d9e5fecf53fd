"""Images of the simulated model: pixels of a number, and a tower whose embedding of a token is a checksum of
the whole image's digest and the token's index. So an embedding of another image, of another token, stale or
torn, changes what is sampled."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from baton.engine.batch import HostBatch
from baton.engine.images import EmbeddingCache, ImageEncoder
from baton.engine.plan import PlanRow
from baton.pictures.decoder import Picture
from baton.sim.model import embedding
from baton.v1 import node_pb2

SIDE = 2
"""Pixels of a token's height and width."""
TOWER = "tower"
SETTINGS = node_pb2.ImageSettings(patch=SIDE, merge=1, least_pixels=1, most_pixels=2**20)


@dataclass(frozen=True, slots=True)
class SimImage:
    number: int
    """Names the pixels."""
    rows: int
    columns: int

    @property
    def file(self) -> bytes:
        return array("I", (self.number, self.rows, self.columns)).tobytes()

    @property
    def picture(self) -> Picture:
        shape = self.rows * SIDE, self.columns * SIDE, 3
        data = random.Random(self.number).randbytes(int(np.prod(shape)))
        return Picture(sha256(data).digest(), np.frombuffer(data, np.uint8).reshape(shape))

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the model takes for the image's tokens."""
        digest = self.picture.digest
        return tuple(embedding(digest, index) for index in range(self.rows * self.columns))


def decoded(file: bytes) -> Picture:
    number, rows, columns = array("I", file)
    return SimImage(number, rows, columns).picture


class SimTower:
    """models.decoder.VisionTower: one number for a token."""

    patch, merge = SIDE, 1
    values = parts = 1
    dtype = torch.int64
    device = torch.device("cpu")

    def encode(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for image in images:
            digest, tokens = sha256(image.numpy().tobytes()).digest(), image.shape[0] * image.shape[1]
            rows = [embedding(digest, index) for index in range(tokens // SIDE**2)]
            found.append(torch.tensor(rows, dtype=torch.int64).view(1, -1, 1))
        return found


class SimEncoder:
    """What a step's rows take for the tokens of their images."""

    def __init__(self, room: int) -> None:
        """`room`: bytes of embeddings that are kept."""
        self.images = ImageEncoder(SimTower(), room=room)

    @property
    def cache(self) -> EmbeddingCache:
        return self.images.cache

    def tokens(self, rows: Sequence[PlanRow]) -> list[tuple[int, ...] | None]:
        """Tokens of each row that has tokens of images; None: it has none."""
        found: list[tuple[int, ...] | None] = [None] * len(rows)
        if not any(row.images for row in rows):
            return found
        host = HostBatch.of(rows)
        _, lanes = self.images.lanes(host, SimTower.device)
        if lanes is None:
            return found
        at = dict(zip(lanes.at.tolist(), (lanes.rows.view(-1) % 2**32).tolist(), strict=True))
        for row, index in enumerate(host.order):
            span = range(host.starts[row], host.starts[row + 1])
            if any(each in at for each in span):
                assert rows[index].tokens is not None
                found[index] = tuple(
                    at.get(each, token) for each, token in zip(span, rows[index].tokens or (), strict=True)
                )
        return found
