"""How long prompts and outputs are: distributions that can be written on a command line. Pure."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Drawn evenly from a range; or, where there are `points`, from percentiles: between two of them and
    beyond the outer ones the length is log-normal (two of them are thus a log-normal distribution)."""

    low: int = 1
    high: int = 1
    points: tuple[tuple[float, int], ...] = ()
    """(percentile between 0 and 1, tokens), both ascending, at least two."""

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """ "512", "100-1024" or "p50=300,p99=4000". Raises ValueError saying what is wrong."""
        if (one := re.fullmatch(r"(\d+)(?:-(\d+))?", text)) is not None:
            found = cls(int(one[1]), int(one[2] or one[1]))
            if not 1 <= found.low <= found.high:
                raise ValueError(f"{text!r} must be 1 or more, the smaller number first")
            return found
        points = [re.fullmatch(r"p(\d+(?:\.\d+)?)=(\d+)", part.strip()) for part in text.split(",")]
        known = tuple((float(point[1]) / 100, int(point[2])) for point in points if point is not None)
        if len(known) < len(points):
            forms = "tokens (512), a range (100-1024) or percentiles (p50=300,p99=4000)"
            raise ValueError(f"{text!r} is no length: give {forms}")
        rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(known))
        inside = all(0 < part < 1 and tokens >= 1 for part, tokens in known)
        if len(known) < 2 or not rising or not inside:
            raise ValueError(f"{text!r}: give two or more percentiles between 0 and 100, both sides rising")
        return cls(points=known)

    def draw(self, rng: random.Random) -> int:
        if not self.points:
            return rng.randint(self.low, self.high)
        z = rng.normalvariate()
        places = [_NORMAL.inv_cdf(part) for part, _ in self.points]
        # The piece that z falls into; the outer ones go on without an end.
        right = next((i for i in range(1, len(places) - 1) if z < places[i]), len(places) - 1)
        left = right - 1
        slope = (z - places[left]) / (places[right] - places[left])
        start, end = (math.log(self.points[i][1]) for i in (left, right))
        return max(1, round(math.exp(min(start + slope * (end - start), 50.0))))
