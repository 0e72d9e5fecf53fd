"""Kills, stalls and drains processes at random moments while streams run, and checks every token.

    python benchmarks/chaos.py --faults 500 --json benchmarks/results/chaos.json

Two prefill, two decode and two tokenizer processes and a gateway run on this machine, with --streams
requests at any time. Each request's answer is known: transformers computes it in float32, and sampled ones
are recorded, with workers of one rank, before the first fault. A fault is SIGKILL, SIGTERM (drain), or
SIGSTOP for longer than a lease and then SIGCONT. It is a problem if a stream fails, differs by a token, ends
twice or hangs, or if a process still holds anything at the end. The exit code is 1 if there was a problem.

With --tp N each worker has N ranks, and a fault is SIGKILL of its rank 0 or of a follower: while it loads, is
idle, computes a prompt, hands pages off, or makes tokens. It is a problem, too, if another of its ranks or a
file in shared memory is left.

With --kv-tokens, --host-memory and --disk pools are small and pages go through the tiers; with --routing
round-robin prompts land on any node, which pulls what others hold of them. The summary counts both.

With --device cuda the workers take this machine's GPUs in turn, and it is a problem, too, if memory of a GPU
is left. --kills: all faults are SIGKILL.

With --roles a fault is a change of a worker's role (`baton role`), some of them with SIGKILL in the middle.
The summary has the longest time for which a node served neither role.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "cluster"))

from checkpoints import make_model, save
from reference import Reference
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from shared import make_parser, save_results
from stress import Cluster, Injector, RankInjector, Report, RoleInjector, make_tasks, record, run
from stress.clients import Outcome
from stress.faults import Fault

from baton.bench.machine import visible_gpus
from baton.gateway.routing import POLICIES

FREED_SECONDS = 10.0
FREED_MIB = 64
"""What a GPU's memory in use may differ by, before and after."""


def used_mib() -> list[int]:
    """Memory in use on each GPU of this machine."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(command, check=True, capture_output=True).stdout.split()]


def left_mib(before: list[int]) -> list[int]:
    """What is still used on each GPU that was not before, once nothing changes any more."""
    deadline = time.monotonic() + FREED_SECONDS
    while True:
        left = [now - then for now, then in zip(used_mib(), before, strict=True)]
        if max(left) <= FREED_MIB or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def measure(args: argparse.Namespace, console: Console, folder: Path) -> Report:
    # Kernels of GPUs attend with heads of 64 and more.
    model = make_model("qwen3", head_dim=64) if args.device == "cuda" else make_model("qwen3")
    path = save(model, folder / "model")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    tasks = make_tasks(Reference(model), args.tasks)
    known = []
    if args.tp > 1:
        one_rank = folder / "one rank"
        one_rank.mkdir(exist_ok=True)
        with Cluster(one_rank, path, nodes=1, tokenizers=1) as cluster:
            known = asyncio.run(record(cluster.gateway.address, tasks))
    gpus = visible_gpus() if args.device == "cuda" else []
    with (
        Cluster(
            folder,
            path,
            tokenizers=args.tokenizers,
            tp=args.tp,
            gpus=gpus,
            kv_tokens=args.kv_tokens,
            host_memory=args.host_memory,
            disk=args.disk,
            routing=args.routing,
        ) as cluster,
        Progress(*columns, console=console) as bar,
    ):
        known = known or asyncio.run(record(cluster.gateway.address, tasks))
        shown = bar.add_task("faults", total=args.faults)
        counts = {"streams": 0}

        def ended(outcome: Outcome) -> None:
            counts["streams"] += 1

        def happened(fault: Fault) -> None:
            text = f"{counts['streams']} streams, {fault.action} {fault.process}"
            bar.update(shown, advance=1, description=text)

        async def attack() -> Report:
            options = {"seed": args.seed, "streams": args.streams, "seconds": args.seconds}
            whole = partial(Injector, weights={"kill": 1}) if args.kills else Injector
            if args.roles:
                whole = partial(RoleInjector, kills=args.role_kills)
            return await run(
                cluster,
                known,
                faults=args.faults,
                **options,
                injector=whole if args.tp == 1 else RankInjector,
                happened=happened,
                ended=ended,
            )

        report = asyncio.run(attack())
        for process in cluster.processes:
            if "Traceback" in process.log.read_text():
                console.print(f"a traceback in {process.log}", style="red")
    return report


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seconds", type=float, help="no fault begins later; default: no limit")
    parser.add_argument("--streams", type=int, default=64, help="running at any time")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the faults and requests; 0: a random one"
    )
    parser.add_argument("--tasks", type=int, default=40, help="different requests")
    parser.add_argument("--tokenizers", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="ranks of each worker")
    parser.add_argument("--kv-tokens", type=int, default=32768, help="of each worker's pool")
    parser.add_argument("--host-memory", default="", help="of each worker, such as 64M; default: none")
    parser.add_argument("--disk", default="", help="size of the workers' disk tier; default: there is none")
    parser.add_argument("--routing", choices=POLICIES, default="cache", help="of the gateway")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kills", action="store_true", help="no stalls and drains")
    parser.add_argument("--roles", action="store_true", help="change roles of workers")
    parser.add_argument("--role-kills", type=float, default=0.25, help="share of these with a kill")
    parser.add_argument("--keep", type=Path, help="keep logs in this folder")
    args = parser.parse_args()
    args.seed = args.seed or secrets.randbits(32)
    console = Console()
    console.print(f"seed {args.seed}")
    before = used_mib() if args.device == "cuda" else []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = measure(args, console, folder)
    summary = report.summary()
    if before and max(left := left_mib(before)) > FREED_MIB:
        summary["problems"].append(f"GPU memory is left, in MiB: {left}")
    console.print_json(json.dumps(summary))
    save_results(args, {**summary, "gpu_mib_before": before, "each": report.details()})
    return 1 if summary["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
