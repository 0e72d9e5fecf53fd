"""What the recorder costs: processor time of each process with it, over without.

    python benchmarks/recorder_cost.py --json benchmarks/results/recorder_cost.json

Two deployments run side by side, one with --recorder-events 0. Steps are sleeps, so the processes do all but
the model's work. The same requests go to one after the other, --rounds times; each time the processor time of
each process is divided by the output tokens. The ratio is that of the medians. A full ring's
memory is measured too. Above 1.02 at the gateway or at the decode node the exit code is 1.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
import tracemalloc
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from shared import make_parser, save_results
from timed import Ask, ask, timed

from baton.cli.deployment import Deployment
from baton.client import AsyncClient
from baton.stepcost import StepCost
from baton.tracing.recorder import CAPACITY, Kind, Recorder

MOST = 1.02
COST = StepCost(fixed=2e-3, row=1e-5, key=0.0, token=2e-6, pair=0.0)
PROMPT = 96
MEASURED = ("gateway", "decode")


def cpu_seconds(deployment: Deployment) -> dict[str, float]:
    """By role, of all threads: the scheduler's own count, in nanoseconds."""
    found = {}
    for child in deployment.children:
        threads = Path("/proc", str(child.pid), "task").glob("*/schedstat")
        found[child.role] = sum(int(each.read_text().split()[0]) for each in threads) / 1e9
    return found


async def load(deployment: Deployment, args: Any, seed: str) -> dict[str, float]:
    """Processor microseconds for each output token, by role."""
    async with AsyncClient(deployment.address) as client:
        before, now = cpu_seconds(deployment), time.monotonic()
        asks = [Ask(PROMPT, args.tokens, f"{seed} {number}") for number in range(args.requests)]
        answers = await asyncio.gather(*(ask(client, each, now, hand_off=True) for each in asks))
    tokens = sum(answer.tokens for answer in answers)
    after = cpu_seconds(deployment)
    return {role: 1e6 * (after[role] - before[role]) / tokens for role in after}


async def measure(args: Any, console: Console) -> list[dict[str, dict[str, float]]]:
    async with AsyncExitStack() as stack:
        deployments = {}
        for name, events in (("on", CAPACITY), ("off", 0)):
            made = stack.enter_context(
                timed(COST, 1, 1, console, rows=64, settings={"recorder_events": events})
            )
            deployments[name] = await stack.enter_async_context(made)
            await load(deployments[name], args, "first")
        rounds = []
        for turn in range(args.rounds):
            names = ("on", "off") if turn % 2 else ("off", "on")
            found = {name: await load(deployments[name], args, f"{turn}") for name in names}
            console.print({name: {r: round(v, 2) for r, v in each.items()} for name, each in found.items()})
            rounds.append(found)
    return rounds


def ring_bytes() -> int:
    """Memory of a full ring."""
    tracemalloc.start()
    recorder = Recorder()
    for number in range(CAPACITY):
        address = f"10.0.{number % 250}.1:50071"
        recorder.add(Kind.SENT, 2**63 + 1, number // 20, 0, 0, 1000 + number, 10**9 + number, number, address)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


def add_seconds(times: int = 200_000) -> float:
    """Processor seconds of one event."""
    recorder = Recorder()
    began = time.process_time()
    for number in range(times):
        recorder.add(Kind.TOKENS, 7, number, 0, number=16)
    return (time.process_time() - began) / times


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64, help="at once")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each")
    args = parser.parse_args()
    console = Console(width=150)
    rounds = asyncio.run(measure(args, console))
    ratios = {
        role: round(
            statistics.median(each["on"][role] for each in rounds)
            / statistics.median(each["off"][role] for each in rounds),
            4,
        )
        for role in ("gateway", "prefill", "decode")
    }
    report = {
        "command": " ".join(["python", *sys.argv]),
        "cpu_us_per_output_token": rounds,
        "on_over_off": ratios,
        "ring_mib": round(ring_bytes() / 2**20, 2),
        "event_us": round(1e6 * add_seconds(), 3),
        "most": MOST,
    }
    save_results(args, report)
    console.print({name: report[name] for name in ("on_over_off", "ring_mib", "event_us")})
    return 0 if all(ratios[role] <= MOST for role in MEASURED) else 1


if __name__ == "__main__":
    raise SystemExit(main())
