"""What quantization costs: perplexity of a text, and the share of greedy tokens that stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from baton.config import WorkerConfig
from baton.engine.plan import PlanRow, StepPlan
from baton.rpc.address import new_incarnation
from baton.rpc.errors import failed_precondition
from baton.worker.engine import build_engine

WINDOW = 256
"""Tokens that see each other."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of the tokens of all windows, without the first of each."""

    logprobs: list[float]
    """Natural logarithm of each token's probability."""
    greedy: list[int]
    """The likeliest token at its position."""

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def change(self, reference: Scores) -> tuple[float, float]:
        """Relative change of the perplexity, and its standard error: windows are taken for independent
        samples. NaN with one window."""
        pairs = zip(self.logprobs, reference.logprobs, strict=True)
        each = [theirs - ours for ours, theirs in pairs]
        size = WINDOW - 1
        means = [fmean(each[at : at + size]) for at in range(0, len(each), size)]
        error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        ratio = math.exp(fmean(each))
        return ratio - 1, ratio * error

    def kept(self, reference: Scores) -> float:
        """The share of positions with the same likeliest token."""
        same = sum(a == b for a, b in zip(self.greedy, reference.greedy, strict=True))
        return same / len(self.greedy)


def python_documentation() -> str:
    """The chapters of Python's language reference that come with the interpreter. PSF licence."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(path: Path, text: str, count: int) -> list[list[int]]:
    """So many runs of WINDOW tokens of the text, evenly spaced. Raises BatonError for a text that is too
    short."""
    from baton.tokenizer.hf_tokenizer import load

    (tokens,) = load(path).encode([text], False)
    if len(tokens) < WINDOW * count:
        raise failed_precondition(
            f"the text has {len(tokens)} tokens; {count} windows of {WINDOW} need {WINDOW * count}"
        )
    step = (len(tokens) - WINDOW) // max(1, count - 1)
    return [tokens[start : start + WINDOW] for start in range(0, step * count, step)][:count]


def score(config: WorkerConfig, texts: list[list[int]], progress: Callable[[], None]) -> Scores:
    """Loads the model, and computes one window at a time as a prompt is computed. Blocks. Raises
    BatonError."""
    engine = build_engine(config, new_incarnation())
    try:
        count, groups = -(-WINDOW // engine.layout.page_size), len(engine.pool.layout.groups)
        tables = tuple(tuple(range(group * count, (group + 1) * count)) for group in range(groups))
        found = Scores([], [])
        for number, tokens in enumerate(texts):
            row = PlanRow(0, tokens, 0, tables, (), tuple(tokens[1:]), 1)
            runner = engine.runner
            (result,) = runner.read(runner.launch(StepPlan(number, (row,)))).rows
            if result.error is not None:
                raise failed_precondition(f"the model cannot compute the text: {result.error}")
            for each in result.prompt_logprobs:
                found.logprobs.append(each.logprob)
                found.greedy.append(each.top[0][0])
            progress()
        return found
    finally:
        engine.close()
