"""What workloads are made of: numbers of tokens, and requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
    """Seconds after the start; 0 in a closed loop. Of one that continues: when its thread begins."""
    prompt: list[int]
    output_tokens: int
    seed: int
    """Of its sampling."""
    thread: int = 0
    """Jobs of one thread are sent one after the other."""
    continues: bool = False
    """Its prompt is appended to that of the job before it in the thread, and to the answer."""
    pause: float = 0.0
    """Seconds between the end of the job before it and this one."""
