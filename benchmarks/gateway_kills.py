"""Kills one of two gateways, again and again, under streams of baton.client, and compares every answer.

    python benchmarks/gateway_kills.py --kills 200 --json benchmarks/results/gateway_kills.json
    python benchmarks/gateway_kills.py --proxy haproxy --kills 50 --streams 8

A tokenizer, a prefill and a decode node with the demo model, and two gateways run on this machine. Answers
are recorded before the first kill: sampled and greedy ones, several choices, log-probabilities, a grammar,
stop strings. It is a problem if a stream fails, or if an answer's tokens, text or end differ. The exit code
is 1 if there was a problem.

With --proxy the stock `openai` client asks through HAProxy, as docs/proxies.md configures it. It is a problem
if an answer fails before its first byte, if a stream ends short without an error, or if a text differs.
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
from stress.gateways import Kills, kill_gateways, two_gateways
from stress.gateways_proxied import ProxiedKills, kill_behind_proxy

from proxies import program


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16, help="running at any time")
    parser.add_argument("--max-tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--proxy", choices=["haproxy"], help="default: baton.client, without one")
    args = parser.parse_args()
    console = Console()
    haproxy = program(args.proxy) if args.proxy else None
    if args.proxy and haproxy is None:
        parser.error(f"{args.proxy} is not installed (Debian: {args.proxy})")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, two_gateways(Path(folder), "demo") as deployment:
        asked = {"kills": args.kills, "max_tokens": args.max_tokens}
        seen: Kills | ProxiedKills
        if haproxy is not None:
            proxied = kill_behind_proxy(deployment, haproxy, Path(folder), clients=args.streams, **asked)
            seen = asyncio.run(proxied)
            said = f"{seen.whole} answers and {seen.streams} streams, {seen.broken} broken with an error, "
            said += f"{seen.retried} retried, longest wait {seen.longest_wait:.2f} s"
        else:
            seen = asyncio.run(kill_gateways(deployment, streams=args.streams, **asked))
            said = f"{seen.streams} streams, {seen.resumed} resumed, longest pause {seen.longest_pause:.2f} s"
        deployment.assert_idle()
    seconds = time.monotonic() - begun
    console.print(f"{seen.kills} kills in {seconds:.0f} s: {said}")
    for problem in seen.problems:
        console.print(problem, style="red")
    asked = {"streams_at_a_time": args.streams, "max_tokens": args.max_tokens}
    save_results(args, {**asdict(seen), "seconds": seconds, "proxy": args.proxy, **asked})
    return 1 if seen.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
