"""A long run under load and faults: memory, throughput, every token.

    python benchmarks/soak.py --minutes 30 --json benchmarks/results/soak.json

As benchmarks/chaos.py, but for a time: first --calibrate seconds of a closed loop of 64 streams, with faults;
then requests as a Poisson process at --load times the rate that was reached, with a fault every ten seconds.
Of each kind one process is killed and drained, the other one at most stalled: its resident memory, and the
gateway's, may end at most 5 % above that after a sixth of the time (five minutes of thirty). Throughput of
the last third must be within 15 % of that of the first; no token may be wrong. At such a load a process that
is gone or stalled leaves more work than the others can do: requests may be refused for that
(WOULD_MISS_DEADLINE), one of a thousand at most. Exit code 1 otherwise.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "cluster"))

import psutil
from checkpoints import make_model, save
from process import Process
from reference import Reference
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from shared import make_parser, save_results
from stress import Cluster, Injector, Load, Task, make_tasks, record
from stress.cluster import REQUEST_SECONDS

STREAMS = 64
KV_TOKENS = 16384
"""Of a worker: caches fill it in the first minutes, so that what it maps of others' pools no longer grows."""
MOST = 256
"""Requests under way at most; beyond that arrivals are left out, and counted."""
GAP = (9.0, 11.0)
"""Seconds between faults."""
SAMPLE_SECONDS = 5.0
REFUSED = "WOULD_MISS_DEADLINE"
MOST_REFUSED = 1e-3
"""Of all streams."""


def may(action: str, process: Process) -> bool:
    """The second process of each kind is never ended."""
    return action == "stall" or process.name.endswith("-0")


def resident(process: Process) -> dict[str, float]:
    """MiB. `anonymous` leaves out files and shared memory: pages of the pool, which count once touched."""
    memory = psutil.Process(process.pid).memory_info()
    return {"rss": memory.rss / 2**20, "anonymous": (memory.rss - memory.shared) / 2**20}


async def soak(
    cluster: Cluster, tasks: list[Task], args: argparse.Namespace, console: Console
) -> dict[str, Any]:
    rng = Random(args.seed)
    address, http = cluster.gateway.address, cluster.gateway.http
    tasks = await record(address, tasks)
    load = Load(address, http, tasks, rng, deadline=REQUEST_SECONDS)
    injector = Injector(cluster, Random(rng.random()), may=may)
    calibrated, stop = asyncio.Event(), asyncio.Event()
    kept = [
        process for process in cluster.processes if process.role == "gateway" or process.name.endswith("-1")
    ]
    samples: list[dict[str, Any]] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(injector.run(stop, 10**6, GAP))
        closed = group.create_task(load.closed_loop(STREAMS, calibrated))
        await asyncio.sleep(args.calibrate)
        rate = args.load * load.tally.ended / args.calibrate
        calibrated.set()
        await closed
        opened = group.create_task(load.open_loop(rate, MOST, stop))
        started = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            shown = progress.add_task("soak", total=60 * args.minutes)
            while (elapsed := time.monotonic() - started) < 60 * args.minutes:
                await asyncio.sleep(SAMPLE_SECONDS)
                tally = load.tally
                sample = {"at": elapsed, "tokens": tally.tokens, "running": load.running}
                samples.append({**sample, "memory": {each.name: resident(each) for each in kept}})
                text = (
                    f"{tally.exact} exact, {sum(tally.errors.values())} failed, {tally.broken_count} broken"
                )
                progress.update(
                    shown, completed=elapsed, description=f"{text}, {len(injector.faults)} faults"
                )
        stop.set()
    await load.close()
    await asyncio.to_thread(cluster.assert_idle, 20.0)
    return {
        "minutes": args.minutes,
        "requests_per_second": round(rate, 2),
        "left_out": opened.result(),
        "faults": len(injector.faults),
        "streams": load.tally.ended,
        "exact": load.tally.exact,
        "failed": dict(load.tally.errors),
        "broken": load.tally.broken,
        "resumed": load.tally.resumed,
        **judge(samples),
        "wrong_processes": [fault.wrong for fault in injector.faults if fault.wrong],
    }


def judge(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Memory at a sixth and at the end, and each minute; tokens per second of the first third and of the
    last."""
    sixth, third = len(samples) // 6, len(samples) // 3
    memory = {}
    for name, last in samples[-1]["memory"].items():
        first = samples[sixth]["memory"][name]
        memory[name] = {
            f"{kind}_mib": [round(first[kind], 1), round(last[kind], 1)] for kind in ("rss", "anonymous")
        }
        memory[name]["growth_percent"] = round(100 * (last["rss"] / first["rss"] - 1), 2)

    def rate(first: dict[str, Any], last: dict[str, Any]) -> float:
        return float((last["tokens"] - first["tokens"]) / (last["at"] - first["at"]))

    throughput = [rate(samples[0], samples[third]), rate(samples[-third - 1], samples[-1])]
    minutes = [
        {
            "at": round(sample["at"]),
            "running": sample["running"],
            "rss_mib": {name: round(of["rss"], 1) for name, of in sample["memory"].items()},
        }
        for sample in samples[:: round(60 / SAMPLE_SECONDS)]
    ]
    return {
        "memory": memory,
        "tokens_per_second": [round(each, 1) for each in throughput],
        "each_minute": minutes,
    }


def problems(found: dict[str, Any]) -> list[str]:
    found_problems = [
        f"{name} grew by {m['growth_percent']} %"
        for name, m in found["memory"].items()
        if m["growth_percent"] > 5
    ]
    first, last = found["tokens_per_second"]
    if not 0.85 <= last / first <= 1.15:
        found_problems.append(f"throughput went from {first} to {last} tokens/s")
    refused = found["failed"].get(REFUSED, 0)
    if refused > MOST_REFUSED * found["streams"]:
        found_problems.append(f"{refused} of {found['streams']} streams were refused")
    if set(found["failed"]) - {REFUSED} or found["broken"] or found["wrong_processes"]:
        found_problems.append("streams failed, were wrong, or processes ended badly")
    return found_problems


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=0.8, help="part of the rate that calibration reaches")
    parser.add_argument("--calibrate", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0, help="0: a random one")
    parser.add_argument("--keep", type=Path, help="keep logs in this folder")
    args = parser.parse_args()
    args.seed = args.seed or secrets.randbits(32)
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = make_model("qwen3")
        with Cluster(folder, save(model, folder / "model"), kv_tokens=KV_TOKENS) as cluster:
            found = asyncio.run(soak(cluster, make_tasks(Reference(model), 40), args, console))
    found = {"seed": args.seed, **found, "problems": problems(found)}
    console.print_json(json.dumps(found))
    save_results(args, found)
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
