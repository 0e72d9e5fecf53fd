"""The requests of a measurement and their arrival times; they depend on the seed alone, not on the answers.

Prompts are random, conversations, or questions on documents. No sessions are used: shared beginnings of
prompts are found by the deployment's caches and routing only.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A number of tokens, drawn uniformly from low to high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> TokenRange:
        """ "128" or "100-1024". Raises ValueError saying what is wrong."""
        first, dash, last = text.partition("-")
        try:
            found = cls(int(first), int(last if dash else first))
        except ValueError:
            raise ValueError(f"{text!r} is neither a number of tokens nor a range such as 100-1024") from None
        if not 1 <= found.low <= found.high:
            raise ValueError(f"{text!r} must be 1 or more, the smaller number first")
        return found

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, source: np.random.Generator) -> int:
        return int(source.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    at: float
    """Seconds after the start at which its thread begins; 0 in a closed loop."""
    prompt: list[int]
    output_tokens: int
    seed: int
    """Seed of the requests' sampling."""
    thread: int = 0
    """Jobs of one thread are sent one after the other."""
    continues: bool = False
    """The job's prompt is appended to the previous job's prompt and answer in the thread."""
    pause: float = 0.0
    """Seconds from the end of the previous job to this one. For a thread's first job in a closed loop: from
    the end of the previous thread."""


KINDS = ("random", "conversation", "documents")


def conversation_jobs(
    work: Workload, times: list[float], vocabulary: int, context: int, seed: tuple[int, ...]
) -> list[Job]:
    """A conversation begins at each of the times. All begin with the same `shared_prefix` tokens (a system
    prompt) and `opening` tokens of their own. Each turn follows after `think` seconds on average and adds
    `prompt_tokens` to all earlier prompts and answers. A conversation ends after its `turns`, or before the
    first turn that exceeds the context."""
    prefix = _prefix(work, vocabulary)
    jobs: list[Job] = []
    for thread, at in enumerate(times):
        draw = np.random.default_rng((*seed, thread))
        length = 0
        for turn in range(work.turns.draw(draw)):
            size = work.prompt_tokens.draw(draw) + (0 if turn else work.opening)
            new = _tokens(draw, vocabulary, size)
            prompt = new if turn else [*prefix, *new]
            output = work.output_tokens.draw(draw)
            pause = float(draw.exponential(work.think))
            length += len(prompt) + output
            if length > context:
                break
            jobs.append(Job(at, prompt, output, len(jobs), thread, turn > 0, pause))
    return jobs


def documents_jobs(
    work: Workload, times: list[float], vocabulary: int, context: int, seed: tuple[int, ...]
) -> list[Job]:
    """A question at each of the times: one of `documents` documents of `prompt_tokens`, chosen uniformly, and
    `question_tokens` after it; before it what all share."""
    prefix = _prefix(work, vocabulary)
    made = [np.random.default_rng((*seed, 0, number)) for number in range(work.documents)]
    documents = [[*prefix, *_tokens(draw, vocabulary, work.prompt_tokens.draw(draw))] for draw in made]
    jobs = []
    for index, at in enumerate(times):
        draw = np.random.default_rng((*seed, 1, index))
        document = documents[int(draw.integers(work.documents))]
        question = _tokens(draw, vocabulary, work.question_tokens.draw(draw))
        prompt = [*document, *question][: max(1, context - work.output_tokens.high)]
        jobs.append(Job(at, prompt, work.output_tokens.draw(draw), index, index))
    return jobs


def _tokens(draw: np.random.Generator, vocabulary: int, count: int) -> list[int]:
    found: list[int] = draw.integers(vocabulary, size=count).tolist()
    return found


def _prefix(work: Workload, vocabulary: int) -> list[int]:
    """A shared prefix, equal in all runs of a seed."""
    return _tokens(np.random.default_rng((work.seed, work.shared_prefix)), vocabulary, work.shared_prefix)


_PROMPTS, _ARRIVALS, _WARM_UP = range(3)
"""Independent streams of random numbers."""
WARM_UP_TOKENS = 16
TURNS = TokenRange(3, 9)
QUESTION_TOKENS = TokenRange(16, 64)
NANO_TOKENS = 10000
"""nano-vllm draws token ids from 0 to this for every vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Open loop: requests arrive at `rate` for `seconds`. Closed loop (`rate` is None): `requests` requests,
    `concurrency` at a time (0: all at once)."""

    prompt_tokens: TokenRange
    output_tokens: TokenRange
    rate: float | None = None
    """Requests per second."""
    seconds: float = 0.0
    requests: int = 0
    concurrency: int = 0
    kind: str = "random"
    """One of KINDS. `rate` and `requests` count the turns of conversations, by their mean number."""
    shared_prefix: int = 0
    """Tokens that all prompts begin with."""
    opening: int = 0
    """Tokens of a conversation's first turn in addition to `prompt_tokens`."""
    turns: TokenRange = TURNS
    """Turns of a conversation."""
    think: float = 2.0
    """Mean seconds between an answer and the next turn."""
    documents: int = 16
    question_tokens: TokenRange = QUESTION_TOKENS
    namespace: str = ""
    """Namespace of the prefix caches."""
    temperature: float = 0.0
    seed: int = 0
    run: int = 0
    """Number of the run; runs with one seed have different prompts, so that none finds another's cached."""
    nano: bool = False
    """Draw lengths and prompts as nano-vllm's bench.py does; cut them to the model's context."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def arrivals(self) -> list[float]:
        """Arrival time of each request or conversation, in seconds after the start."""
        turns = self.turns.mean if self.kind == "conversation" else 1.0
        if self.rate is None:
            return [0.0] * max(1, round(self.requests / turns))
        return poisson_arrivals(self.rate / turns, self.seconds, (self.seed, self.run, _ARRIVALS))

    def jobs(self, vocabulary: int, context: int) -> list[Job]:
        """All requests in the order of arrival; those of a thread in the order of its turns."""
        times, seed = self.arrivals(), (self.seed, self.run, _PROMPTS)
        if self.kind == "conversation":
            return conversation_jobs(self, times, vocabulary, context, seed)
        if self.kind == "documents":
            return documents_jobs(self, times, vocabulary, context, seed)
        if self.nano:
            return _nano_jobs(self, times, vocabulary, context)
        return _random_jobs(self, times, vocabulary, seed)

    @property
    def longest(self) -> int:
        """Most tokens of a request and its output; for a conversation those of its first turn."""
        question = self.question_tokens.high if self.kind == "documents" else 0
        opening = self.opening if self.kind == "conversation" else 0
        prefix = 0 if self.kind == "random" else self.shared_prefix + opening
        return prefix + self.prompt_tokens.high + question + self.output_tokens.high

    def warm_up(self, count: int, vocabulary: int, context: int) -> list[Job]:
        """`count` requests of the same prompt lengths with short outputs; no measured request has their
        prompts."""
        jobs = _random_jobs(self, [0.0] * count, vocabulary, (self.seed, self.run, _WARM_UP))
        room = max(1, context - WARM_UP_TOKENS)
        return [
            replace(job, prompt=job.prompt[:room], output_tokens=min(job.output_tokens, WARM_UP_TOKENS))
            for job in jobs
        ]


def poisson_arrivals(rate: float, seconds: float, seed: tuple[int, ...]) -> list[float]:
    """Times of a Poisson process, from 0 to `seconds`."""
    draw = np.random.default_rng(seed)
    times: list[float] = []
    now = draw.exponential(1.0 / rate)
    while now < seconds:
        times.append(float(now))
        now += draw.exponential(1.0 / rate)
    return times


def _random_jobs(work: Workload, times: list[float], vocabulary: int, seed: tuple[int, ...]) -> list[Job]:
    prefix = _prefix(work, vocabulary)
    jobs = []
    for index, at in enumerate(times):
        draw = np.random.default_rng((*seed, index))
        length, output = work.prompt_tokens.draw(draw), work.output_tokens.draw(draw)
        rest = _tokens(draw, vocabulary, max(0, length - work.shared_prefix))
        jobs.append(Job(at, [*prefix, *rest][:length], output, index, index))
    return jobs


def _nano_jobs(work: Workload, times: list[float], vocabulary: int, context: int) -> list[Job]:
    """The workload of nano-vllm's bench.py: with seed 0, 256 requests and 100-1024 tokens in and out it has
    142,827 input and 133,966 output tokens. Token ids are taken modulo the vocabulary's size. A request that
    exceeds the context is cut: its output to half of the context, its prompt to the rest."""
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
        jobs.append(Job(at, prompt[: context - output], output, index, index))
    return jobs
