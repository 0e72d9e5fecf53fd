"""A simulated disk: files tear and rot, it fills up, and holds what is old or another's."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

_MOST_FILES = (60, 400)
Truth = tuple[bytes, str, bytes, int, bytes]
"""Fingerprint, namespace, key, group and bytes of a page."""


@dataclass(frozen=True, slots=True)
class SimFile:
    held: bytes
    truth: Truth
    """What its writer put there."""


class SimDisk:
    """Files by name. Outlives its processes."""

    def __init__(self, rng: random.Random) -> None:
        self.files: dict[str, SimFile] = {}
        self.read_pages = 0
        """Which nodes have taken for what they asked for."""
        self._rng = rng
        self._most = rng.choice(_MOST_FILES)
        self._bad = rng.choice((0.05, 0.5))
        """Part of the files that do not hold what their writer believes."""

    def put(self, name: str, written: SimFile) -> str:
        """What was wrong, as far as a writer knows; empty: nothing."""
        rng, held = self._rng, written.held
        if rng.random() < self._bad:
            kind = rng.choice(("full", "torn", "rotten", "old", "lost"))
            if kind == "full":
                return "full"
            if kind == "torn":
                end = rng.randrange(len(held))
                lost = rng.choice((0, len(held) - end))  # a host that has failed may leave zeros
                written = replace(written, held=held[:end] + bytes(lost))
            elif kind == "rotten":
                at = rng.randrange(rng.choice((0, len(held) - 8)), len(held))
                held = held[:at] + bytes([held[at] ^ (1 << rng.randrange(8))]) + held[at + 1 :]
                written = replace(written, held=held)
            elif kind == "old":
                alike = [each for each in self.files.values() if len(each.held) == len(held)]
                written = rng.choice([*alike, written])
            elif kind == "lost":
                return ""
        self.files[name] = written
        while len(self.files) > self._most:
            del self.files[rng.choice(list(self.files))]
        return ""
