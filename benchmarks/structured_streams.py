"""What constrained streams cost the free ones beside them, through all processes.

    python benchmarks/structured_streams.py --json benchmarks/results/structured_streams.json

A gateway, a tokenizer and a decode node; this process is the client. Rounds of 64 free streams and of 32
free ones beside 32 constrained by a JSON Schema take turns. Times between two tokens of the free streams,
as the client sees them, and each process's processor time a token, while all streams run. Single rounds are
disturbed on a shared machine; processor times are less so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from shared import make_parser, save_results
from structured_output import PROMPT, ROWS, SCHEMA

from baton.cli.console import table
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.client import AsyncClient, Grammar

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from make_shape import SHAPES, write_shape

KINDS = {"64 free": 0, "32 free beside 32 constrained": 32}


class Streams:
    def __init__(
        self, client: AsyncClient, processes: dict[str, psutil.Process], tokens: int, vocab: int
    ) -> None:
        self.client, self.processes, self.tokens, self.vocab = client, processes, tokens, vocab
        self.seed = 0
        self.all_started = asyncio.Event()

    async def stream(self, bound: bool, seed: int, started: list[float], times: list[float]) -> None:
        """Notes when its first token came, and of a free stream the seconds between its messages by token."""
        options: dict[str, Any] = {"grammar": Grammar(json_schema=json.dumps(SCHEMA))} if bound else {}
        prompt = np.random.default_rng(seed).integers(10, self.vocab, PROMPT).tolist()
        before = 0.0
        async with self.client.stream(
            token_ids=prompt,
            max_tokens=self.tokens,
            ignore_eos=not bound,
            temperature=1.0,
            seed=seed,
            **options,
        ) as stream:
            async for delta in stream:
                now, count = time.perf_counter(), len(delta.token_ids)
                if not before:
                    started.append(now)
                    if len(started) == ROWS:
                        self.all_started.set()
                elif len(started) == ROWS and count and not bound:
                    times += [(now - before) / count] * count
                before = now

    def used(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self.processes.items()}

    async def round(self, constrained: int) -> tuple[list[float], dict[str, float]]:
        """Seconds between tokens; seconds of each process for a token of any stream."""
        started: list[float] = []
        times: list[float] = []
        tasks = []
        self.all_started.clear()
        for row in range(ROWS):
            self.seed += 1
            tasks.append(asyncio.ensure_future(self.stream(row < constrained, self.seed, started, times)))
        everything = asyncio.gather(*tasks)
        await asyncio.wait(
            (everything, asyncio.ensure_future(self.all_started.wait())),
            timeout=120,
            return_when=asyncio.FIRST_COMPLETED,
        )
        before = self.used()
        await everything
        after = self.used()
        # The streams begin one after the other and end so: about all tokens come in between.
        return times, {name: (after[name] - before[name]) / (ROWS * self.tokens) for name in after}


async def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        if args.shape is not None:
            write_shape(args.shape, Path(folder))
        model, load_format = (args.model, "auto") if args.shape is None else (folder, "dummy")
        worker = {
            "model": model,
            "load_format": load_format,
            "device": args.device,
            "max_rows": ROWS,
            "kv_tokens": 2 * ROWS * (PROMPT + args.tokens + 128),
            "threads": 1 if args.device == "cpu" else 0,
        }
        plan = DeploymentPlan(
            prefill=0,
            http_port=None,
            restart=False,
            settings={"tokenizer": {"model": model}, "decode": worker},
        )
        async with Deployment(plan, console) as deployment, AsyncClient(deployment.address) as client:
            found = {child.role: psutil.Process(child.pid) for child in deployment.children}
            found["client"] = psutil.Process(os.getpid())
            (info,) = await client.models()
            streams = Streams(client, found, args.tokens, info.vocab_size)
            for kind in KINDS.values():
                await streams.round(kind)  # warms up
            times: dict[str, list[float]] = {name: [] for name in KINDS}
            used: dict[str, list[dict[str, float]]] = {name: [] for name in KINDS}
            for _ in range(args.rounds):
                for name, kind in KINDS.items():
                    own, processes = await streams.round(kind)
                    times[name] += own
                    used[name].append(processes)
    free, mixed = (1e3 * float(np.median(times[name])) for name in KINDS)
    spent = {
        name: {process: 1e6 * float(np.median([one[process] for one in each])) for process in each[0]}
        for name, each in used.items()
    }
    sums = [sum(each.values()) for each in spent.values()]
    return {
        "free_itl_p50_ms": dict(zip(KINDS, (free, mixed), strict=True)),
        "itl_ratio": mixed / free,
        "cpu_us_a_token": spent,
        "cpu_ratio": sums[1] / sums[0],
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights, in place of --model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=int, default=6, help="of each kind")
    parser.add_argument("--tokens", type=int, default=120, help="of each output")
    args = parser.parse_args()
    console = Console(width=160)
    found = asyncio.run(measure(args, console))
    rows = table("figure", "value")
    for name, value in found.items():
        rows.add_row(name, json.dumps(value, indent=1) if isinstance(value, dict) else f"{value:.3f}")
    console.print(rows)
    setting = {name: getattr(args, name) for name in ("device", "rounds", "tokens")}
    save_results(args, {"setting": setting | {"model": args.shape or args.model}, "figures": found})


if __name__ == "__main__":
    main()
