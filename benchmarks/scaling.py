"""Throughput of one prefill and one decode node compared with two and two.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json

Real processes whose forward passes are sleeps, --slower times as long as an 8B model's steps on an H200. So
everything around the steps is measured, with the gateway and the hand-offs between all pairs. A closed loop
keeps --streams requests per decode node running, more than its batch has rows. The decode nodes count output
tokens, from --ramp seconds after the start on, for --seconds. Layouts alternate, --rounds times. The ratio
of the medians must be at least 1.9; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from rich.console import Console
from shared import make_parser, save_results
from timed import H200_8B, Answer, Ask, ask, slowed, timed

from baton.cli.node_reports import ask_deployment
from baton.client import AsyncClient

LEAST = 1.9
PROMPT, OUTPUT = (200, 600), (40, 80)
"""Tokens, drawn evenly."""


@dataclass(slots=True)
class Loop:
    """A closed loop of streams, and their answers."""

    client: AsyncClient
    asks: Iterator[Ask]
    until: float
    answers: list[Answer] = field(default_factory=list)

    async def stream(self) -> None:
        while time.monotonic() < self.until:
            self.answers.append(await ask(self.client, next(self.asks), time.monotonic(), timeout=600.0))


def endless(seed: str) -> Iterator[Ask]:
    draw, number = Random(seed), 0
    while True:
        number += 1
        yield Ask(draw.randint(*PROMPT), draw.randint(*OUTPUT), f"{seed} {number}")


async def output_tokens(gateway: str) -> int:
    """Of all decode nodes so far."""
    reports = await ask_deployment(gateway)
    return sum(each.load.output_tokens for each in reports if each.role == "decode" and each.load is not None)


async def run(pairs: int, turn: int, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    cost = slowed(H200_8B, args.slower)
    with timed(cost, pairs, pairs, console, rows=args.rows) as starting:
        async with starting as deployment, AsyncClient(deployment.address) as client:
            until = time.monotonic() + args.ramp + args.seconds + 1.0
            loop = Loop(client, endless(f"{args.seed} {pairs} {turn}"), until)
            async with asyncio.TaskGroup() as group:
                for _ in range(args.streams * pairs):
                    group.create_task(loop.stream())
                await asyncio.sleep(args.ramp)
                first, began = await output_tokens(deployment.address), time.monotonic()
                await asyncio.sleep(args.seconds)
                last, ended = await output_tokens(deployment.address), time.monotonic()
    handed_off = sum(each.handed_off for each in loop.answers) / len(loop.answers)
    found = {
        "layout": f"{pairs}+{pairs}",
        "output_tokens_per_second": round((last - first) / (ended - began), 1),
        "requests": len(loop.answers),
        "handed_off": round(handed_off, 3),
    }
    console.print(", ".join(f"{name} {value}" for name, value in found.items()))
    return found


async def measure(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    return [await run(pairs, turn, args, console) for turn in range(args.rounds) for pairs in (1, 2)]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--slower", type=float, default=10.0, help="times as long as on the H200")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a measurement")
    parser.add_argument("--ramp", type=float, default=8.0, help="seconds ahead of it")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each layout")
    parser.add_argument("--rows", type=int, default=32, help="sequences in a decode node's batch")
    parser.add_argument("--streams", type=int, default=48, help="running requests for each decode node")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console(width=150)
    runs = asyncio.run(measure(args, console))
    rates = {
        layout: statistics.median(run["output_tokens_per_second"] for run in runs if run["layout"] == layout)
        for layout in ("1+1", "2+2")
    }
    ratio = round(rates["2+2"] / rates["1+1"], 3)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "step_seconds": asdict(slowed(H200_8B, args.slower)),
        "streams_per_decode_node": args.streams,
        "rows": args.rows,
        "prompt_tokens": PROMPT,
        "output_tokens": OUTPUT,
        "runs": runs,
        "output_tokens_per_second": rates,
        "ratio": ratio,
        "least": LEAST,
    }
    save_results(args, report)
    console.print(f"2+2 over 1+1: {ratio} (at least {LEAST})")
    return 0 if ratio >= LEAST else 1


if __name__ == "__main__":
    raise SystemExit(main())
