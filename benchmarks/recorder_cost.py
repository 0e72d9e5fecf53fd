"""What the recorder costs: processor time of gateway and decode node with it, over without.

    python benchmarks/recorder_cost.py --json benchmarks/results/recorder_cost.json

A deployment of real processes under a steady load of requests that are handed off. Steps are sleeps, so the
processor time of a step is the host's alone. While the load runs, gateway and decode node switch their own
recorders on and off (switched.py) in blocks of a tenth of a second, in pairs of random order: the same
process, with the same memory, threads and neighbours, is compared with itself a moment earlier or later.
Measured is the processor time for the work, of

    gateway              the process; the inverse is tokens/s of a core
    decode, step thread  the thread that plans, launches, reads and commits steps
    decode, process      all its threads

Blocks differ in their work. So the time of an output token, of a step, and of a request's begin and end is
fitted to all blocks (least squares), and each block's time is divided by what its work takes by that. The
result is the ratio of the sums over all blocks with and without recorder, and its 95 % interval: from pairs
drawn with replacement (bootstrap). The exit code is 1 unless the first two intervals end below 1.02. With
--repeat 25 each event is recorded so often, which must be noticed. A full ring's memory is measured too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from shared import make_parser, save_results
from timed import Ask, ask, timed

from baton.client import AsyncClient
from baton.step_cost import StepCost
from baton.tracing.recorder import CAPACITY, EventKind, Recorder

MOST = 1.02
COST = StepCost(fixed=3e-3, row=1e-5, key=0.0, token=2e-6, pair=0.0)
PROMPT = 96
WARM_SECONDS = 5.0
DRAWS = 4000
MEASURES = {"gateway": ("gateway", 0), "decode, step thread": ("decode", 1), "decode, process": ("decode", 0)}
"""Role, and which of the clocks of switched.py."""
BOUND = ("gateway", "decode, step thread")
Pairs = list[tuple[float, Any, Any]]


async def load(address: str, args: Any) -> tuple[float, float]:
    """From and to when pairs of blocks that begin then are under load, on the monotonic clock."""
    numbers = itertools.count()

    async def one_by_one(client: AsyncClient, until: float) -> None:
        while time.monotonic() < until:
            await ask(client, Ask(PROMPT, args.tokens, f"{next(numbers)}"), time.monotonic(), hand_off=True)

    async with AsyncClient(address) as client:
        began = time.monotonic() + WARM_SECONDS
        ended = began + 2 * args.pairs * args.block_seconds
        until = ended + 4 * args.block_seconds
        await asyncio.gather(*(one_by_one(client, until) for _ in range(args.streams)))
    return began, ended


async def measure(args: Any, console: Console) -> dict[str, Pairs]:
    """By role: the pairs of blocks under load, as switched.py writes them."""
    switched = str(Path(__file__).parent / "switched.py")
    with TemporaryDirectory() as folder:
        program = (sys.executable, switched, folder, str(args.block_seconds), str(args.repeat))
        with timed(COST, 1, 1, console, rows=args.streams, program=program) as deployment:
            async with deployment:
                began, ended = await load(deployment.address, args)
        found = {}
        for role in ("gateway", "decode"):
            pairs = json.loads((Path(folder) / f"{role}.json").read_text())
            found[role] = [pair for pair in pairs if began <= pair[0] <= ended]
        return found


def compare(pairs: Pairs, clock: int) -> dict[str, Any]:
    used = np.array([[block[0][clock] for block in pair[1:]] for pair in pairs])  # [pairs, on and off]
    work = np.array([[block[1] for block in pair[1:]] for pair in pairs], dtype=float)  # [.., kinds of work]
    each = np.linalg.lstsq(work.reshape(-1, work.shape[2]), used.reshape(-1), rcond=None)[0]
    expected = work @ each
    draw = np.random.default_rng(0)
    drawn = draw.integers(len(pairs), size=(DRAWS, len(pairs)))
    ratios = used[drawn].sum(axis=1) / expected[drawn].sum(axis=1)  # [draws, on and off]
    low, high = np.quantile(ratios[:, 0] / ratios[:, 1], (0.025, 0.975))
    total = used.sum(axis=0) / expected.sum(axis=0)
    return {
        "on_over_off": round(float(total[0] / total[1]), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "pairs": len(pairs),
        "seconds_on_and_off": used.sum(axis=0).round(3).tolist(),
        "work_on_and_off": work.sum(axis=0).tolist(),
        "us_of_each_work": (1e6 * each).round(2).tolist(),
    }


def ring_bytes() -> int:
    """Memory of a full ring."""
    tracemalloc.start()
    recorder = Recorder()
    for number in range(CAPACITY):
        address = f"10.0.{number % 250}.1:50071"
        recorder.add(
            EventKind.SENT, 2**63 + 1, number // 20, 0, 0, 1000 + number, 10**9 + number, number, address
        )
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=1500)
    parser.add_argument("--block-seconds", type=float, default=0.1)
    parser.add_argument("--streams", type=int, default=16, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each")
    parser.add_argument("--repeat", type=int, default=1, help="how often each event is recorded")
    args = parser.parse_args()
    console = Console(width=110)
    pairs = asyncio.run(measure(args, console))
    measures = {name: compare(pairs[role], clock) for name, (role, clock) in MEASURES.items()}
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "commit")}
    report = {
        "command": " ".join(["python", *sys.argv]),
        **settings,
        "load_average": os.getloadavg(),
        "measures": measures,
        "ring_mib": round(ring_bytes() / 2**20, 2),
        "most": MOST,
    }
    save_results(args, report)
    console.print(report)
    return 0 if all(measures[name]["interval"][1] < MOST for name in BOUND) else 1


if __name__ == "__main__":
    raise SystemExit(main())
