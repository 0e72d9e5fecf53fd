"""The faults of one simulated run, drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

FAULTS = ("crash", "stall", "cut", "drop", "slow", "pull", "step", "drain", "squeeze", "stranger")
"""Drawn a few kinds at a time; "hang", "babble", "lie" and those of ranks apart from them."""


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    kind: str
    target: str
    other: str = ""
    seconds: float = 0.0
    value: int = 0

    def __str__(self) -> str:
        return f"{self.at:.3f} s: {self.kind} {self.target} {self.other} {self.seconds:.3f} s {self.value}"


def draw_faults(
    rng: random.Random, tight: bool, prefill: list[str], decode: list[str], gateways: list[str]
) -> list[Fault]:
    workers = [*prefill, *decode]
    pairs = [(d, p) for d in decode for p in prefill] * 2 + [(g, d) for g in gateways for d in decode]
    faults = []
    # Few kinds at a time find more than all at once: swarm testing (Groce et al., 2012).
    kinds = rng.sample(FAULTS, rng.choice((1, 2, 3, len(FAULTS)))) + ["cut", "cut", "stall"] * tight
    for _ in range(rng.choice((1, 2, 3, 5, 8, 12))):
        kind = rng.choice(kinds)
        at = rng.uniform(0.9, rng.choice((1.5, 3.0, 6.0)))
        seconds = rng.choice((0.05, 0.5, 2.0, 5.0)) * rng.uniform(0.2, 1.0)
        target, other, value = rng.choice(workers), "", 0
        if kind in ("cut", "drop", "slow"):
            target, other = rng.choice(pairs)
            seconds *= 1 + tight
            value = rng.choice((10, 100)) if kind == "slow" else 0
        elif kind in ("crash", "stall"):
            # A gateway too, now and then. A crash of value 1 is silent.
            target = rng.choice([*workers, *workers, *gateways])
            value = rng.randrange(2) if kind == "crash" else rng.randrange(3)
        elif kind == "pull":
            target, value, seconds = rng.choice(decode), rng.randrange(6), 0.0
        elif kind == "step":
            value, seconds = rng.randrange(2), 0.0
        elif kind == "squeeze":
            value = rng.randrange(1, 30)
        elif kind == "stranger":
            target, other, value = rng.choice(prefill), rng.choice(gateways), rng.randrange(1, 9)
        faults.append(Fault(at, kind, target, other, seconds if kind != "drop" else 0.0, value))
    for _ in range(rng.choice((0, 3, 9)) if tight else 0):
        # A copy stands still while its lease runs out unseen, then goes on before the stream is given up.
        at, seconds, target, other = (
            rng.uniform(1.2, 6.0),
            rng.uniform(1.3, 3.0),
            *rng.choice(pairs[: len(decode) * len(prefill)]),
        )
        faults.append(Fault(at, "stall", target, "", seconds, 2))
        faults.append(Fault(at + rng.uniform(-0.2, 0.2), "cut", target, other, seconds + 2.0))
    return faults


def draw_hangs(rng: random.Random, prefill: list[str], decode: list[str]) -> list[Fault]:
    """Steps that take longer than anybody waits for them."""
    if rng.random() < 0.8:
        return []
    return [
        Fault(
            at=rng.uniform(0.9, 6.0),
            kind="hang",
            target=rng.choice([*prefill, *prefill, *decode]),
            seconds=rng.choice((2.0, 8.0, 20.0)) * rng.uniform(0.5, 1.0),
        )
        for _ in range(rng.choice((1, 2, 4)))
    ]


def draw_babbles(rng: random.Random, prefill: list[str]) -> list[Fault]:
    """Prefill nodes that send messages which cannot be."""
    count = rng.choice((0, 0, 0, 1, 2))
    return [
        Fault(rng.uniform(0.9, 4.0), "babble", rng.choice(prefill), seconds=rng.uniform(0.2, 5.0))
        for _ in range(count)
    ]
