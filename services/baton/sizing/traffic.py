"""Requests with their arrival times and lengths, drawn from distributions or read from a trace."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

from baton.step_cost import StepCost, chunk_pairs

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths: uniform from `low` to `high`, or given by percentiles (`points`), between
    which and beyond which the length is log-normal. Two points give a log-normal distribution."""

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
        quantiles = [_NORMAL.inv_cdf(part) for part, _ in self.points]
        # The segment that contains z; the outer ones are unbounded.
        right = next((i for i in range(1, len(quantiles) - 1) if z < quantiles[i]), len(quantiles) - 1)
        left = right - 1
        slope = (z - quantiles[left]) / (quantiles[right] - quantiles[left])
        start, end = (math.log(self.points[i][1]) for i in (left, right))
        return max(1, round(math.exp(min(start + slope * (end - start), 50.0))))


MARGIN = 8
"""1/MARGIN as many requests arrive before the counted ones, and after them, so that these meet a deployment
under load."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    """Seconds after the start."""
    prompt: int
    """Tokens."""
    output: int


@dataclass(frozen=True, slots=True)
class Traffic:
    arrivals: tuple[Arrival, ...]
    first: int
    """Requests first .. last - 1 are counted; the others keep the deployment under load."""
    last: int
    shared_prefix: int = 0
    """Tokens that all prompts begin with."""

    @property
    def rate(self) -> float:
        """Requests per second."""
        span = self.arrivals[-1].at - self.arrivals[0].at
        return (len(self.arrivals) - 1) / span if span > 0 else float("inf")

    @property
    def end(self) -> float:
        """Seconds after which no counted request arrives."""
        return self.arrivals[min(self.last, len(self.arrivals) - 1)].at

    def work(self, cost: StepCost, max_rows: int, token_budget: int) -> TrafficWork:
        prompts = rows = tokens = steps = 0.0
        for arrival in self.arrivals:
            start = min(self.shared_prefix, arrival.prompt - 1)
            count, more = arrival.prompt - start, arrival.output - 1
            keys = more * arrival.prompt + more * (more + 1) // 2
            prompts += cost.token * count + cost.pair * chunk_pairs(start, count)
            rows += cost.row * more + cost.key * keys
            tokens += count
            steps += more
        scale = self.rate / len(self.arrivals)
        fixed = scale * cost.fixed
        return TrafficWork(
            scale * prompts, scale * rows, fixed * tokens / token_budget, fixed * steps / max_rows
        )


@dataclass(frozen=True, slots=True)
class TrafficWork:
    """Least node seconds per second that a traffic takes: steps as full as possible, each prompt computed
    once, its shared prefix never."""

    prompts: float
    rows: float
    prompt_steps: float
    """Fixed cost of steps full of prompt tokens."""
    row_steps: float
    """Fixed cost of steps full of decode rows."""

    @property
    def least_nodes(self) -> int:
        """Fewer nodes cannot carry the traffic. A step may be full of prompt tokens and of rows at once."""
        return max(1, math.ceil(self.prompts + self.rows + max(self.prompt_steps, self.row_steps)))

    @property
    def prefill_part(self) -> float:
        """Part of the work that prompts take."""
        prompts, rows = self.prompts + self.prompt_steps, self.rows + self.row_steps
        return prompts / (prompts + rows) if prompts + rows else 0.5


def poisson(
    rate: float, prompt: Lengths, output: Lengths, count: int, seed: int, context: int, shared_prefix: int = 0
) -> Traffic:
    """`count` counted requests at `rate` per second. A request that exceeds the context is cut: its output to
    half of the context, its prompt to the rest."""
    rng = random.Random(f"{seed}/traffic")
    margin = max(1, count // MARGIN)
    arrivals, now = [], 0.0
    for _ in range(count + 2 * margin):
        now += rng.expovariate(rate)
        arrivals.append(_fit(now, prompt.draw(rng), output.draw(rng), context))
    return Traffic(tuple(arrivals), margin, margin + count, shared_prefix)


def _fit(at: float, prompt: int, output: int, context: int) -> Arrival:
    if prompt + output > context:
        output = min(output, max(1, context // 2))
        prompt = min(prompt, max(1, context - output))
    return Arrival(at, prompt, output)


def read_trace(path: Path, context: int, shared_prefix: int = 0) -> Traffic:
    """Reads a JSON list of {"at": seconds, "prompt": tokens, "output": tokens}. All requests are counted.
    Raises ValueError with a readable line."""
    try:
        found = json.loads(path.read_text())
        arrivals = sorted(_arrivals(found), key=lambda arrival: arrival.at)
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        form = '[{"at": 0.5, "prompt": 300, "output": 64}, ...]'
        raise ValueError(f"{path} is no trace, a JSON list such as {form}: {error!r}") from error
    rising = len(arrivals) >= 2 and 0 <= arrivals[0].at < arrivals[-1].at  # all at once have no rate
    if not rising or min(min(a.prompt, a.output) for a in arrivals) < 1:
        raise ValueError(f"trace {path}: requests at two or more times from 0 on, lengths of 1 or more")
    too_long = [a for a in arrivals if a.prompt + a.output > context]
    if too_long:
        total = too_long[0].prompt + too_long[0].output
        raise ValueError(f"trace {path}: {total} tokens of prompt and output; the context holds {context}")
    return Traffic(tuple(arrivals), 0, len(arrivals), shared_prefix)


def _arrivals(found: Sequence[dict[str, float]]) -> Iterator[Arrival]:
    for entry in found:
        yield Arrival(float(entry["at"]), int(entry["prompt"]), int(entry["output"]))
