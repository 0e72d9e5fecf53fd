"""Where an image is encoded: by the worker that needs it, or by an encode node, by measured times."""

from __future__ import annotations

import time

import torch

from baton.handoff.pull_cost import PullCost, PullMeter
from baton.models.decoder import VisionTower

MARGIN = 0.1
"""The choice changes only where the other way is sooner by this part: measured times vary."""
SIDES = (2, 4, 8, 16)
"""Tokens of the height and width of images that are encoded at the start."""
ENOUGH_SECONDS = 0.1
"""Larger ones are left out once one has taken as long."""


class EncodeChoice:
    """Pure. Without measured times of both, the encode node is chosen."""

    def __init__(self, local: PullMeter) -> None:
        """`local`: of batches that are encoded here."""
        self.local = local
        self.pulls = PullMeter()
        """Pulls of embeddings from all encode nodes."""
        self.queued = 0
        """Tokens of images that are to be encoded here."""
        self._here = False
        """The last choice."""

    def in_place(self, tokens: int, queued: int, cost: PullCost | None) -> bool:
        """Whether an image of so many tokens is encoded here. `queued`: tokens that wait at the encode node,
        `cost`: of its batches."""
        if self.local.cost is None or cost is None:
            return False
        here = self.local.cost.seconds(self.queued + tokens)
        there = cost.seconds(queued + tokens)
        if self.pulls.cost is not None:
            there += self.pulls.cost.seconds(tokens)
        self._here = here < there * (1 + MARGIN if self._here else 1 - MARGIN)
        return self._here


def measure_encoding(tower: VisionTower, device: torch.device) -> PullMeter:
    """Encodes images of several sizes, each twice: the first run warms up. Blocks for a second, about."""
    meter = PullMeter()
    for side in SIDES:
        pixels = side * tower.patch * tower.merge
        image = torch.full((pixels, pixels, 3), 128, dtype=torch.uint8)
        for _ in range(2):
            begun = time.perf_counter()
            tower.encode([image])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - begun
        meter.add(side * side, max(seconds, 1e-6))
        if seconds > ENOUGH_SECONDS:
            break
    return meter
