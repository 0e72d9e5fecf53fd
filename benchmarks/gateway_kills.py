"""Kills one of two gateways, again and again, under streams of baton.client, and compares every answer.

    python benchmarks/gateway_kills.py --kills 200 --json benchmarks/results/gateway_kills.json

A tokenizer, a prefill and a decode node with the demo model, and two gateways run on this machine. Answers
are recorded before the first kill: sampled and greedy ones, several choices, log-probabilities, a grammar,
stop strings. It is a problem if a stream fails, or if an answer's tokens, text or end differ. The exit code
is 1 if there was a problem.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "cluster"))

from rich.console import Console
from shared import make_parser, save_results
from stress.gateways import kill_gateways, two_gateways


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16, help="running at any time")
    parser.add_argument("--max-tokens", type=int, default=300, help="of each answer")
    args = parser.parse_args()
    console = Console()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, two_gateways(Path(folder), "demo") as deployment:
        kills = kill_gateways(deployment, kills=args.kills, streams=args.streams, max_tokens=args.max_tokens)
        seen = asyncio.run(kills)
        deployment.assert_idle()
    seconds = time.monotonic() - begun
    console.print(
        f"{seen.kills} kills in {seconds:.0f} s: {seen.streams} streams, {seen.resumed} resumed, "
        f"longest pause {seen.longest_pause:.2f} s"
    )
    for problem in seen.problems:
        console.print(problem, style="red")
    asked = {"streams_at_a_time": args.streams, "max_tokens": args.max_tokens}
    save_results(args, {**asdict(seen), "seconds": seconds, **asked})
    return 1 if seen.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
