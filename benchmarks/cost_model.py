"""The split-or-local decision (`--split auto`) beside always-split and always-local, on the same processes.

    python benchmarks/cost_model.py --json benchmarks/results/cost_model.json

One prefill and one decode node, real processes; the forward pass is a sleep of what an 8B model's step takes
on an H200, --slower times as long so that two cores do not matter (benchmarks/timed.py). Requests arrive as a
Poisson process, at the same times and with the same lengths for each policy, but with different prompts. The
policies alternate in slices; a slice begins when the previous one has been answered.

Mean and 99th percentile of end-to-end latency with `auto` must be at most 1.10 times those of the better of
the two others, on each workload. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np
from rich.console import Console
from shared import make_parser, save_results
from timed import H200_8B, Answer, Ask, ask, slowed, timed

from baton.cli.console import table
from baton.client import AsyncClient

TOLERANCE = 1.10
LEAD_SECONDS = 1.0
POLICIES = {"auto": None, "always-split": True, "always-local": False}


@dataclass(frozen=True, slots=True)
class Kind:
    """Tokens of a prompt and of an output, drawn evenly from both ends."""

    prompt: tuple[int, int]
    output: tuple[int, int]


SHORT = Kind((16, 128), (4, 12))
LONG = Kind((2000, 3500), (8, 24))


@dataclass(frozen=True, slots=True)
class Workload:
    rate: float
    """Requests a second, of an H200; the run's is slowed with the steps."""
    kinds: tuple[Kind, ...]


WORKLOADS = {
    "short": Workload(36.0, (SHORT,)),
    "long": Workload(8.0, (LONG,)),
    "mixed": Workload(20.0, (SHORT, SHORT, SHORT, LONG)),
}


def make_requests(work: Workload, rate: float, seconds: float, seed: str, salt: str) -> list[Ask]:
    """seed: of times and lengths. salt: of prompts."""
    draw, at, found = Random(seed), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        kind = draw.choice(work.kinds)
        lengths = draw.randint(*kind.prompt), draw.randint(*kind.output)
        found.append(Ask(*lengths, f"{seed} {salt} {len(found)}", at))
    return found


async def run_slice(client: AsyncClient, wanted: list[Ask], hand_off: bool | None) -> list[Answer]:
    started = time.monotonic() + LEAD_SECONDS
    return list(await asyncio.gather(*(ask(client, one, started, hand_off=hand_off) for one in wanted)))


async def measure(args: argparse.Namespace, console: Console) -> dict[str, dict[str, list[Answer]]]:
    """Workload -> policy -> answers."""
    found: dict[str, dict[str, list[Answer]]] = defaultdict(lambda: defaultdict(list))
    with timed(slowed(H200_8B, args.slower), 1, 1, console) as started:
        async with started as deployment, AsyncClient(deployment.address) as client:
            for name in args.workloads:
                work = WORKLOADS[name]
                rate = work.rate / args.slower
                for turn in range(-1, args.rounds):
                    # The first round is not counted: the nodes calibrate their costs.
                    seconds = args.seconds if turn >= 0 else min(args.seconds, 4.0)
                    policies = list(POLICIES)
                    policies = policies[turn % 3 :] + policies[: turn % 3]
                    for policy in policies:
                        wanted = make_requests(work, rate, seconds, f"{args.seed} {name} {turn}", policy)
                        answers = await run_slice(client, wanted, POLICIES[policy])
                        if turn >= 0:
                            found[name][policy] += answers
                            mean = np.mean([each.end for each in answers])
                            console.print(f"{name} {turn} {policy}: {len(answers)}, mean {mean:.3f} s")
    return found


def summary(answers: list[Answer]) -> dict[str, Any]:
    ends, firsts = [each.end for each in answers], [each.first for each in answers]
    return {
        "requests": len(answers),
        "handed_off": round(sum(each.handed_off for each in answers) / len(answers), 3),
        "end_to_end_ms": {
            "mean": round(1e3 * float(np.mean(ends)), 1),
            "p99": round(1e3 * float(np.percentile(ends, 99)), 1),
        },
        "ttft_ms": {
            "mean": round(1e3 * float(np.mean(firsts)), 1),
            "p99": round(1e3 * float(np.percentile(firsts, 99)), 1),
        },
    }


def judge(found: dict[str, dict[str, list[Answer]]]) -> dict[str, Any]:
    workloads = {}
    for name, answers in found.items():
        policies = {policy: summary(each) for policy, each in answers.items()}
        latency = {policy: figures["end_to_end_ms"] for policy, figures in policies.items()}
        ratios, better = {}, {}
        for what in ("mean", "p99"):
            better[what] = min(("always-split", "always-local"), key=lambda policy: latency[policy][what])
            ratios[what] = round(latency["auto"][what] / latency[better[what]][what], 3)
        workloads[name] = {"policies": policies, "better_of_the_two": better, "auto_over_better": ratios}
    return workloads


def show(workloads: dict[str, Any], console: Console) -> None:
    rows = table("workload", "policy", "requests", "handed off", "mean ms", "p99 ms", "TTFT ms", "p99 ms")
    for name, work in workloads.items():
        for policy, found in work["policies"].items():
            latency, first = found["end_to_end_ms"], found["ttft_ms"]
            times = (latency["mean"], latency["p99"], first["mean"], first["p99"])
            row = (name, policy, found["requests"], f"{found['handed_off']:.0%}", *times)
            rows.add_row(*(str(each) for each in row))
        rows.add_row(
            name, "auto / better", "", "", *(str(each) for each in work["auto_over_better"].values())
        )
    console.print(rows)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--slower", type=float, default=3.0, help="times as long as on the H200")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a slice")
    parser.add_argument("--rounds", type=int, default=3, help="slices of each policy and workload")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console(width=150)
    workloads = judge(asyncio.run(measure(args, console)))
    show(workloads, console)
    missed = [
        f"{name}: {what} {ratio}"
        for name, work in workloads.items()
        for what, ratio in work["auto_over_better"].items()
        if ratio > TOLERANCE
    ]
    report = {
        "command": " ".join(["python", *sys.argv]),
        "step_seconds": asdict(slowed(H200_8B, args.slower)),
        "workloads_per_second": {name: WORKLOADS[name].rate / args.slower for name in args.workloads},
        "tolerance": TOLERANCE,
        "workloads": workloads,
        "missed": missed,
    }
    save_results(args, report)
    console.print("; ".join(missed) or "auto is as good as the better of the two, everywhere")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
