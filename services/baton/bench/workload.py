"""What is asked, and when: the same for the same seed, whatever the answers are."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

_PROMPTS, _ARRIVALS, _WARM_UP = range(3)
"""Independent streams of random numbers."""
WARM_UP_TOKENS = 16
NANO_TOKENS = 10000
"""nano-vllm draws token ids from 0 to this, whatever the vocabulary."""


@dataclass(frozen=True, slots=True)
class Range:
    """A number of tokens: `low`, or drawn evenly from low to high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Range:
        """ "128" or "100-1024". Raises ValueError saying what is wrong."""
        first, dash, last = text.partition("-")
        try:
            found = cls(int(first), int(last if dash else first))
        except ValueError:
            raise ValueError(f"{text!r} is neither a number of tokens nor a range such as 100-1024") from None
        if not 1 <= found.low <= found.high:
            raise ValueError(f"{text!r} must be 1 or more, the smaller number first")
        return found

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    at: float
    """Seconds after the start; 0 in a closed loop."""
    prompt: list[int]
    output_tokens: int
    seed: int
    """Of its sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Open loop: requests arrive at `rate` for `seconds`, whatever becomes of them. Closed loop (`rate`
    None): `requests` of them, `concurrency` at a time (0: all at once)."""

    prompt_tokens: Range
    output_tokens: Range
    rate: float | None = None
    """Requests per second."""
    seconds: float = 0.0
    requests: int = 0
    concurrency: int = 0
    shared_prefix: int = 0
    """Tokens that all prompts begin with."""
    temperature: float = 0.0
    seed: int = 0
    run: int = 0
    """Which of several runs with one seed: none may find another's prompts in a prefix cache."""
    nano: bool = False
    """Lengths and prompts as nano-vllm's bench.py draws them, cut to the model's context."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Workload:
        ranges = {name: Range(**values[name]) for name in ("prompt_tokens", "output_tokens")}
        return cls(**{**values, **ranges})

    def arrivals(self) -> list[float]:
        """When each request arrives, in seconds after the start."""
        if self.rate is None:
            return [0.0] * self.requests
        return poisson_arrivals(self.rate, self.seconds, (self.seed, self.run, _ARRIVALS))

    def jobs(self, vocabulary: int, context: int) -> list[Job]:
        """All requests, in the order of their arrival."""
        times = self.arrivals()
        if self.nano:
            return _nano_jobs(self, times, vocabulary, context)
        return _random_jobs(self, times, vocabulary, (self.seed, self.run, _PROMPTS))

    def warm_up(self, count: int, vocabulary: int, context: int) -> list[Job]:
        """`count` requests of the same sizes, outputs shortened, and of prompts that no measured one has."""
        jobs = _random_jobs(self, [0.0] * count, vocabulary, (self.seed, self.run, _WARM_UP))
        room = max(1, context - WARM_UP_TOKENS)
        return [
            replace(job, prompt=job.prompt[:room], output_tokens=min(job.output_tokens, WARM_UP_TOKENS))
            for job in jobs
        ]


def poisson_arrivals(rate: float, seconds: float, seed: tuple[int, ...]) -> list[float]:
    """Times from 0 to `seconds` of a Poisson process: gaps are exponential with mean 1 / `rate`."""
    draw = np.random.default_rng(seed)
    times: list[float] = []
    now = draw.exponential(1.0 / rate)
    while now < seconds:
        times.append(float(now))
        now += draw.exponential(1.0 / rate)
    return times


def _random_jobs(work: Workload, times: list[float], vocabulary: int, seed: tuple[int, ...]) -> list[Job]:
    # The prefix is the same in every run: that is what it is for.
    prefix = np.random.default_rng((work.seed, work.shared_prefix)).integers(
        vocabulary, size=work.shared_prefix
    )
    jobs = []
    for index, at in enumerate(times):
        draw = np.random.default_rng((*seed, index))
        length = int(draw.integers(work.prompt_tokens.low, work.prompt_tokens.high + 1))
        output = int(draw.integers(work.output_tokens.low, work.output_tokens.high + 1))
        rest = draw.integers(vocabulary, size=max(0, length - work.shared_prefix))
        jobs.append(Job(at, [*prefix.tolist(), *rest.tolist()][:length], output, index))
    return jobs


def _nano_jobs(work: Workload, times: list[float], vocabulary: int, context: int) -> list[Job]:
    """The workload of nano-vllm's bench.py: with seed 0, 256 requests and 100-1024 tokens in and out it has
    142,827 input and 133,966 output tokens. Token ids that a small vocabulary lacks are taken modulo its
    size. Of a request that the context does not hold the output is cut to half of it, the prompt to the rest.
    """
    draw = random.Random(work.seed)
    sizes, outputs = work.prompt_tokens, work.output_tokens
    prompts = [
        [draw.randint(0, NANO_TOKENS) % vocabulary for _ in range(draw.randint(sizes.low, sizes.high))]
        for _ in times
    ]
    counts = [draw.randint(outputs.low, outputs.high) for _ in times]
    jobs = []
    for index, (at, prompt, count) in enumerate(zip(times, prompts, counts, strict=True)):
        output = count if len(prompt) + count <= context else min(count, context // 2)
        jobs.append(Job(at, prompt[: context - output], output, index))
    return jobs
