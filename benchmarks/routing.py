"""Cache-aware routing compared with other policies, on 2 prefill and 2 decode nodes.

    python benchmarks/routing.py --json benchmarks/results/routing.json

Real processes on this machine; only the forward pass is a sleep of a given duration (PROFILE, with
--step-profile), since a few cores cannot show the gain of several nodes. Three gateways use the same
workers, one for each --routing. Each workload runs through one gateway after the other with the same
requests and times, each in a prefix-cache namespace of its own. Clients use no sessions: each request is a
call of its own.

  conversation   18 users at a time, 4 to 8 turns each about a text of 800 tokens, all in every prompt
  documents      short questions on 14 documents of 1,500 tokens, more than one node's pool holds
  random         prompts that share nothing

The bounds of `cache` relative to `round-robin`: on the first two at least 1.5 times the hit rate (cached
prompt tokens, as reported in the answers, over all prompt tokens) and at most 0.7 times the median TTFT; on
the last at most 1.05 times the median TTFT and the mean latency. The exit code is 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "cluster"))

from deployment import Deployment
from process import Process
from rich.console import Console
from rich.table import Table
from shared import make_parser, save_results

from baton.bench.load_client import Target
from baton.bench.load_processes import run_clients
from baton.bench.summary import summarize
from baton.bench.workload import TokenRange, Workload
from baton.gateway.routing import POLICIES

PROFILE = {"fixed": 0.01, "row": 0.0005, "key": 0.0, "token": 0.0004, "pair": 0.0}
"""Seconds of a step: round figures (2,500 prompt tokens a second, steps of 10 ms), long beside what the
processes around it take on a small machine."""
POOL_TOKENS = 12288
"""Of each node: 8 documents."""
WORKLOADS = {
    "conversation": Workload(
        kind="conversation",
        opening=800,
        prompt_tokens=TokenRange(40, 80),
        output_tokens=TokenRange(20, 40),
        turns=TokenRange(4, 8),
        think=3.5,
        requests=240,
        concurrency=18,
    ),
    "documents": Workload(
        kind="documents",
        prompt_tokens=TokenRange(1500, 1500),
        output_tokens=TokenRange(10, 30),
        documents=14,
        rate=3.5,
    ),
    "random": Workload(prompt_tokens=TokenRange(300, 900), output_tokens=TokenRange(10, 30), rate=3.0),
}
WARM_UP = Workload(
    prompt_tokens=TokenRange(300, 900), output_tokens=TokenRange(10, 30), requests=24, concurrency=8, seed=99
)
"""Not measured."""
BOUNDS: dict[str, dict[str, tuple[str, float]]] = {
    "conversation": {"hit_rate": ("at least", 1.5), "ttft_p50_ms": ("at most", 0.7)},
    "documents": {"hit_rate": ("at least", 1.5), "ttft_p50_ms": ("at most", 0.7)},
    "random": {"ttft_p50_ms": ("at most", 1.05), "e2e_mean_ms": ("at most", 1.05)},
}


def deploy(folder: Path) -> tuple[Deployment, dict[str, Process]]:
    """And its gateways by policy."""
    profile = folder / "profile.json"
    profile.write_text(json.dumps({"step": PROFILE}))
    flags = ["--step-profile", str(profile), "--kv-tokens", str(POOL_TOKENS)]
    deployment = Deployment(folder, "demo")
    prefill = [deployment.add_worker("prefill", *flags) for _ in range(2)]
    decode = [deployment.add_worker("decode", *flags) for _ in range(2)]
    gateways = {policy: deployment.add_gateway(decode, prefill, "--routing", policy) for policy in POLICIES}
    return deployment, gateways


def measure(gateway: Process, work: Workload) -> dict[str, Any]:
    """Figures of one run. Raises RuntimeError for a request that failed."""
    target = Target(server=gateway.address, vocabulary=4096, context=2048, warm_up=0)
    run = asyncio.run(run_clients(target, work, lambda ended, failed, running: None))
    figures = summarize(run.records)
    if figures["failures"]:
        raise RuntimeError(f"requests failed: {figures['failures']}")
    return {
        "requests": figures["requests"],
        "prompt_tokens": figures["prompt_tokens"],
        "cached_tokens": figures["cached_tokens"],
        "hit_rate": figures["cached_tokens"] / figures["prompt_tokens"],
        "ttft_p50_ms": figures["ttft_ms"]["p50"],
        "ttft_p99_ms": figures["ttft_ms"]["p99"],
        "e2e_mean_ms": figures["e2e_ms"]["mean"],
        "lateness_p99_ms": figures["lateness_ms"]["p99"],
        "client_busy": run.busy,
    }


def measure_all(args: argparse.Namespace, console: Console, folder: Path) -> dict[str, Any]:
    """Workload -> policy -> figures of each round."""
    deployment, gateways = deploy(folder)
    found: dict[str, Any] = {name: {policy: [] for policy in POLICIES} for name in args.workloads}
    with deployment:
        for gateway in gateways.values():
            measure(gateway, WARM_UP)
        for number in range(args.rounds):
            for name in args.workloads:
                # In rotating order, so that changes on the machine affect all policies alike.
                for policy in POLICIES[number % 3 :] + POLICIES[: number % 3]:
                    work = replace(
                        WORKLOADS[name],
                        seconds=args.seconds,
                        seed=args.seed + number,
                        namespace=f"{name}-{policy}-{number}",
                    )
                    run = measure(gateways[policy], work)
                    found[name][policy].append(run)
                    deployment.assert_idle(10.0)
                    console.print(
                        f"{name}, {policy}: hit rate {run['hit_rate']:.2f}, TTFT {run['ttft_p50_ms']:.0f} ms "
                        f"(p99 {run['ttft_p99_ms']:.0f}), end to end {run['e2e_mean_ms']:.0f} ms",
                        highlight=False,
                    )
    return found


def judge(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bound, with what was measured: the median of the rounds' ratios."""
    results = []
    for name, by_policy in found.items():
        for figure, (kind, bound) in BOUNDS[name].items():
            pairs = zip(by_policy["cache"], by_policy["round-robin"], strict=True)
            ratio = statistics.median(one[figure] / other[figure] for one, other in pairs)
            met = ratio >= bound if kind == "at least" else ratio <= bound
            results.append({"workload": name, "figure": figure, "ratio": ratio, kind: bound, "met": met})
    return results


def show(results: list[dict[str, Any]], console: Console) -> None:
    table = Table("workload", "figure", "cache / round-robin", "bound", "", box=None)
    for one in results:
        kind = "at least" if "at least" in one else "at most"
        verdict = "met" if one["met"] else "MISSED"
        table.add_row(one["workload"], one["figure"], f"{one['ratio']:.2f}", f"{kind} {one[kind]}", verdict)
    console.print(table)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--seconds", type=float, default=45.0, help="in which requests arrive (not of conversations)"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--keep", type=Path, help="keep logs in this folder")
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure_all(args, console, folder)
    results = judge(found)
    show(results, console)
    record = {
        "profile": PROFILE,
        "pool_tokens": POOL_TOKENS,
        "seconds": args.seconds,
        "workloads": {name: WORKLOADS[name].to_dict() for name in args.workloads},
        "bounds": results,
        "runs": found,
    }
    save_results(args, record)
    return 0 if all(one["met"] for one in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
