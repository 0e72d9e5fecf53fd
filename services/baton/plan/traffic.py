"""What arrives: requests with their times and lengths. Pure, randomness passed in."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.plan.lengths import Lengths
from baton.stepcost import StepCost, chunk_pairs

MARGIN = 8
"""A part of 1/8 as many requests comes before the ones that count, and after them: they find a deployment
that is at work, and none that runs empty."""


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
    """Requests from this one to before `last` count; the others keep the deployment at work."""
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
        """When the time ends in which requests that count arrive."""
        return self.arrivals[min(self.last, len(self.arrivals) - 1)].at

    def work(self, cost: StepCost, max_rows: int, token_budget: int) -> Work:
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
        return Work(scale * prompts, scale * rows, fixed * tokens / token_budget, fixed * steps / max_rows)


@dataclass(frozen=True, slots=True)
class Work:
    """Node seconds a second that a traffic takes at least: in the fullest steps there can be, every prompt
    computed once, its shared prefix never."""

    prompts: float
    rows: float
    prompt_steps: float
    """What steps cost however much is in them, if all were full of prompts."""
    row_steps: float
    """Likewise, of decode rows."""

    @property
    def least_nodes(self) -> int:
        """No fewer carry the traffic, whatever they do: a step may be full of prompts and rows at once."""
        return max(1, math.ceil(self.prompts + self.rows + max(self.prompt_steps, self.row_steps)))

    @property
    def prefill_part(self) -> float:
        """Of the whole that prompts take."""
        prompts, rows = self.prompts + self.prompt_steps, self.rows + self.row_steps
        return prompts / (prompts + rows) if prompts + rows else 0.5


def poisson(
    rate: float, prompt: Lengths, output: Lengths, count: int, seed: int, context: int, shared_prefix: int = 0
) -> Traffic:
    """`count` requests that count, at `rate` per second. Prompts and outputs beyond what the context holds
    are cut: outputs to half of it at most, prompts to the rest."""
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
    """A JSON list of {"at": seconds, "prompt": tokens, "output": tokens}. Every request counts. Raises
    ValueError with one line for people."""
    try:
        found = json.loads(path.read_text())
        arrivals = sorted(_entries(found), key=lambda arrival: arrival.at)
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        form = '[{"at": 0.5, "prompt": 300, "output": 64}, ...]'
        raise ValueError(f"{path} is no trace, a JSON list such as {form}: {error!r}") from error
    if len(arrivals) < 2 or arrivals[0].at < 0 or min(min(a.prompt, a.output) for a in arrivals) < 1:
        raise ValueError(f"trace {path}: two or more requests, times from 0 on, lengths of 1 or more")
    too_long = [a for a in arrivals if a.prompt + a.output > context]
    if too_long:
        total = too_long[0].prompt + too_long[0].output
        raise ValueError(f"trace {path}: {total} tokens of prompt and output; the context holds {context}")
    return Traffic(tuple(arrivals), 0, len(arrivals), shared_prefix)


def _entries(found: Sequence[dict[str, float]]) -> Iterator[Arrival]:
    for entry in found:
        yield Arrival(float(entry["at"]), int(entry["prompt"]), int(entry["output"]))
