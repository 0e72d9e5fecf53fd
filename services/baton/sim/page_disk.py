"""A simulated disk: files tear and rot, it fills up, and holds what is old or another's."""

from __future__ import annotations

import random

_MOST_FILES = 60


class SimDisk:
    """Files by name. Outlives its processes."""

    def __init__(self, rng: random.Random) -> None:
        self.files: dict[str, bytes] = {}
        self._rng = rng
        self._bad = rng.choice((0.05, 0.5))
        """Part of the files that do not hold what their writer believes."""

    def put(self, name: str, written: bytes) -> str:
        """What was wrong, as far as a writer knows; empty: nothing."""
        rng = self._rng
        if rng.random() < self._bad:
            kind = rng.choice(("full", "torn", "rotten", "old", "lost"))
            if kind == "full":
                return "full"
            if kind == "torn":
                written = written[: rng.randrange(len(written))]
            elif kind == "rotten":
                at = rng.randrange(rng.choice((0, len(written) - 8)), len(written))
                written = written[:at] + bytes([written[at] ^ (1 << rng.randrange(8))]) + written[at + 1 :]
            elif kind == "old":
                alike = [each for each in self.files.values() if len(each) == len(written)]
                written = rng.choice([*alike, written])
            elif kind == "lost":
                return ""
        self.files[name] = written
        while len(self.files) > _MOST_FILES:
            del self.files[rng.choice(list(self.files))]
        return ""
