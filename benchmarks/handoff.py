"""How long a hand-off takes, and where: from the last prompt chunk to the first decode step with the request.

    python benchmarks/handoff.py --json handoff.json

One prefill and one decode node, random weights in the shape of Qwen3-8B, requests one at a time through the
gateway. The nodes are those of `baton serve` with time stamps in them (benchmarks/stamps.py). Prints for each
prompt length medians of milliseconds since the prefill node read the last chunk's results.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from shared import make_parser, save_results
from stamps import EVENTS
from timed import Ask, ask

from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.supervisor import ChildError
from baton.client import AsyncClient
from baton.rpc.errors import BatonError

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from make_shape import SHAPES, write_shape

OUTPUT_TOKENS = 4
WARMUP = 2
"""Requests of each length before those that count."""
PAUSE_SECONDS = 0.1
"""Between two requests: the steps and stamps of one have ended."""

Stamp = tuple[float, str]
"""Seconds, and what happened."""


Times = dict[str, float]
"""Event of `stamps.EVENTS` -> milliseconds since the prefill node read the last chunk's results."""


def times_of(stamps: Iterable[Stamp]) -> Times:
    """Of one request. Raises ValueError where it was not handed off."""
    at: dict[str, float] = {}
    for seconds, what in sorted(stamps):
        if what not in ("launching", "launched") or what not in at:
            at[what] = seconds  # pulls: the last; decode steps: the first
    missing = [what for what in EVENTS if what not in at]
    if missing:
        raise ValueError(f"a request was not handed off: no stamp says {', '.join(missing)}")
    return {what: 1e3 * (at[what] - at["read"]) for what in EVENTS}


def take_stamps(folder: Path) -> list[Stamp]:
    """Those since the last call; no process is writing any."""
    lines: list[str] = []
    for file in folder.iterdir():
        lines += file.read_text().splitlines()
        os.truncate(file, 0)
    return [(float(at), what) for what, at in map(str.split, lines)]


def plan_of(args: argparse.Namespace, model: str, stamps: str) -> DeploymentPlan:
    os.environ["HANDOFF_STAMPS"] = stamps
    worker = {
        "model": model,
        "device": args.device,
        "load_format": "dummy",
        "kv_tokens": args.kv_tokens,
    }
    return DeploymentPlan(
        http_port=None,
        restart=False,
        program=(sys.executable, str(Path(__file__).with_name("stamps.py")), "serve"),
        settings={
            "tokenizer": {"model": model},
            "prefill": {**worker, "token_budget": args.budget},
            "decode": worker,
        },
    )


def pulled_bytes(deployment: Deployment) -> int:
    """By the decode node since its start."""
    node = next(child for child in deployment.children if child.role == "decode")
    with urllib.request.urlopen(f"http://{node.host}:{node.http_port}/metrics", timeout=10) as answer:
        found = re.findall(r"^baton_pulled_bytes_total\S* (\S+)", answer.read().decode(), re.MULTILINE)
    return int(sum(map(float, found)))


async def measure(args: argparse.Namespace, console: Console) -> dict[int, tuple[float, list[Times]]]:
    """For each prompt length, bytes pulled a token of the prompt, and each request's times. Raises ValueError
    where a request was not handed off, BatonError, ChildError."""
    found: dict[int, tuple[float, list[Times]]] = {}
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as stamps:
        write_shape(args.shape, Path(model))
        async with (
            Deployment(plan_of(args, model, stamps), console) as deployment,
            AsyncClient(deployment.address) as client,
        ):
            for length in args.prompts:
                each: list[Times] = []
                before = pulled_bytes(deployment)
                for number in range(WARMUP + args.requests):
                    what = Ask(length, OUTPUT_TOKENS, seed=f"{length} {number}")
                    await ask(client, what, time.monotonic(), hand_off=True)
                    await asyncio.sleep(PAUSE_SECONDS)
                    each.append(times_of(take_stamps(Path(stamps))))
                found[length] = (pulled_bytes(deployment) - before) / len(each) / length, each[WARMUP:]
    return found


def table_of(found: dict[int, tuple[float, list[Times]]]) -> Table:
    table = Table(title="milliseconds since the last chunk's results were read, medians")
    for heading in ("prompt", *EVENTS[1:], "launched, least to most", "bytes a token"):
        table.add_column(heading, justify="right")
    for length, (size, each) in found.items():
        medians = [statistics.median(one[what] for one in each) for what in EVENTS[1:]]
        launched = [one["launched"] for one in each]
        extremes = f"{min(launched):.2f} to {max(launched):.2f}"
        table.add_row(f"{length:,}", *(f"{value:.2f}" for value in medians), extremes, f"{size:,.0f}")
    return table


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b", help="of the model")
    parser.add_argument("--device", default="cuda", help="of both workers: cuda (a GPU each), or cpu")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 1024, 2048], help="tokens")
    parser.add_argument("--requests", type=int, default=12, help="of each length")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a prefill node's step")
    parser.add_argument("--kv-tokens", type=int, default=0, help="of a worker's pool; 0: the default")
    args = parser.parse_args()
    console = Console()
    try:
        found = asyncio.run(measure(args, console))
    except (BatonError, ChildError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    console.print(table_of(found))
    settings = {"shape": args.shape, "device": args.device, "budget": args.budget}
    sizes = {length: size for length, (size, _) in found.items()}
    times = {length: each for length, (_, each) in found.items()}
    save_results(args, {**settings, "bytes_a_token": sizes, "milliseconds": times})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
