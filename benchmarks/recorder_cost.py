"""What the recorder costs: processor time for each output token with it, over without.

    python benchmarks/recorder_cost.py --json benchmarks/results/recorder_cost.json

All four parts of a deployment run in one process here, so that the same memory and the same threads serve
both: two processes of the same program differ by more than the recorder costs. Steps are sleeps, so the
process does all but the model's work. Short blocks of the same load come in pairs, one with all recorders,
one with none, in random order. Each block's processor time, of all threads, is divided by its output tokens.
The result is the median of the pairs' ratios, with a 95 % interval (bootstrap). The client is in the process
too: so the ratio is of more work than that of a deployment. The difference in microseconds is not diluted.

The cost is also computed, for gateway and decode node: events for each output token times the processor time
of an event, over --gateway-us and --decode-us, which they take for an output token as processes of their own
(benchmarks/gateway_cost.py). This has no noise, but leaves out what an event does to the processor's caches.

If the interval does not begin below 1.02 the exit code is 1. A full ring's memory is measured too.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from shared import make_parser, save_results
from timed import Ask, ask, write_shape

from baton.cli.deployment import free_ports
from baton.client import AsyncClient
from baton.config import DecodeConfig, GatewayConfig, PrefillConfig, TokenizerConfig
from baton.decode.server import DecodeNode
from baton.gateway.server import GatewayNode
from baton.prefill.server import PrefillNode
from baton.rpc.node import run_node
from baton.stepcost import StepCost
from baton.tokenizer.server import TokenizerNode
from baton.tracing.recorder import CAPACITY, Kind, Recorder

MOST = 1.02
COST = StepCost(fixed=2e-3, row=1e-5, key=0.0, token=2e-6, pair=0.0)
PROMPT = 96


ROLES = ("tokenizer", "prefill", "decode", "gateway")


@asynccontextmanager
async def deployment(folder: Path) -> AsyncIterator[tuple[str, list[Recorder]]]:
    """The gateway's address, and the recorders in the order of ROLES. All in this event loop."""
    write_shape("tiny", folder / "model")
    (folder / "profile.json").write_text(json.dumps({"step": asdict(COST)}))
    ports = free_ports("127.0.0.1", len(ROLES))
    at = {role: f"127.0.0.1:{port}" for role, port in zip(ROLES, ports, strict=True)}
    every: dict[str, Any] = {"http_port": None, "log_level": "warning"}
    model: dict[str, Any] = {**every, "model": str(folder / "model")}
    worker: dict[str, Any] = {
        **model,
        "load_format": "dummy",
        "threads": 1,
        "device": "cpu",
        "step_profile": str(folder / "profile.json"),
        "max_rows": 64,
        "kv_tokens": 65536,
    }
    tokenizer = TokenizerConfig(port=ports[0], **model)
    prefill = PrefillConfig(port=ports[1], **worker)
    decode = DecodeConfig(port=ports[2], **worker)
    gateway = GatewayConfig(
        port=ports[3],
        tokenizer=(at["tokenizer"],),
        decode=(at["decode"],),
        prefill=(at["prefill"],),
        **every,
    )
    nodes: list[Any] = [
        TokenizerNode(tokenizer),
        PrefillNode(prefill),
        DecodeNode(decode),
        GatewayNode(gateway),
    ]
    configs: list[Any] = [tokenizer, prefill, decode, gateway]
    stop = asyncio.Event()
    tasks = []
    for node, config in zip(nodes, configs, strict=True):
        ready = asyncio.Event()
        tasks.append(asyncio.create_task(run_node(node, config, ready=ready, stop=stop)))
        async with asyncio.timeout(60):
            await ready.wait()
    try:
        yield at["gateway"], [node.recorder for node in nodes]
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def load(client: AsyncClient, args: Any, seed: str) -> float:
    """Processor microseconds for each output token."""
    now, before = time.monotonic(), time.process_time()
    asks = [Ask(PROMPT, args.tokens, f"{seed} {number}") for number in range(args.requests)]
    answers = await asyncio.gather(*(ask(client, each, now, hand_off=True) for each in asks))
    return 1e6 * (time.process_time() - before) / sum(answer.tokens for answer in answers)


async def measure(args: Any, draw: random.Random) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Pairs of blocks with and without recorders; events for each output token by role."""
    pairs = []
    with TemporaryDirectory() as folder:
        async with deployment(Path(folder)) as (address, recorders), AsyncClient(address) as client:
            await load(client, args, "first")
            events = dict.fromkeys(ROLES, 0)
            for role, recorder in zip(ROLES, recorders, strict=True):
                events[role] = len(recorder.all())
            for number in range(args.pairs):
                found = {}
                for recording in draw.sample((True, False), 2):
                    for recorder in recorders:
                        recorder._silent = not recording
                    gc.collect()
                    found[recording] = await load(client, args, f"{number}")
                pairs.append((found[True], found[False]))
    return pairs, {role: count / (args.requests * args.tokens) for role, count in events.items()}


def interval(values: list[float], draw: random.Random) -> list[float]:
    """The median, and the ends of its 95 % interval."""
    drawn = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return [round(value, 4) for value in (statistics.median(values), drawn[50], drawn[-51])]


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
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--requests", type=int, default=16, help="of a block, at once")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each")
    parser.add_argument("--gateway-us", type=float, default=32.0)
    parser.add_argument("--decode-us", type=float, default=35.0)
    args = parser.parse_args()
    draw = random.Random(0)
    pairs, events = asyncio.run(measure(args, draw))
    ratio = interval([on / off for on, off in pairs], draw)
    event = add_seconds()
    alone = {"gateway": args.gateway_us, "decode": args.decode_us}
    report = {
        "command": " ".join(["python", *sys.argv]),
        "cpu_us_per_output_token": round(statistics.median(off for _, off in pairs), 2),
        "on_over_off": ratio,
        "difference_us": interval([on - off for on, off in pairs], draw),
        "pairs": [round(on / off, 4) for on, off in pairs],
        "events_per_output_token": {role: round(count, 4) for role, count in events.items()},
        "computed_over_off": {
            role: round(1 + 1e6 * event * events[role] / used, 5) for role, used in alone.items()
        },
        "ring_mib": round(ring_bytes() / 2**20, 2),
        "event_us": round(1e6 * event, 3),
        "most": MOST,
    }
    save_results(args, report)
    Console(width=110).print({name: value for name, value in report.items() if name != "pairs"})
    return 0 if ratio[1] < MOST else 1


if __name__ == "__main__":
    raise SystemExit(main())
