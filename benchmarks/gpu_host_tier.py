"""TTFT of prompts whose pages lie in the host tier, beside computing them: one node on one GPU.

    python benchmarks/gpu_host_tier.py --out DIR

Random weights in the shape of Qwen3-8B, bf16; token ids through gRPC to one node that computes prompts and
decodes. `--chats` prompts of `--tokens` ids are asked for in rotation, `--rounds` times, with a pool that has
room for two of them: without a tier each is computed again, with one it is copied back. Prints the median
TTFT of the first round and of later ones, whether the outputs are equal, and writes DIR/gpu_host_tier.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.bench.machine import machine, versions
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.client import AsyncClient

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from make_shape import write_shape


def plan_of(model: str, memory: str, args: argparse.Namespace, folder: Path) -> DeploymentPlan:
    """`memory`: of the host tier; empty: none."""
    decode: dict[str, Any] = {"model": model, "load_format": "dummy", "device": args.device, "max_rows": 16}
    decode |= {
        "batch_invariant": args.batch_invariant,
        "dtype": args.dtype,
        "kv_tokens": 2 * args.tokens + args.tokens // 8,
        "host_memory": memory,
    }
    settings = {"tokenizer": {"model": model}, "decode": decode, "gateway": {}}
    return DeploymentPlan(
        prefill=0, decode=1, gateways=1, settings=settings, restart=False, log_folder=folder
    )


async def first_token(client: AsyncClient, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds to the first token, and the output."""
    began, seconds, output = time.perf_counter(), 0.0, []
    async for delta in client.stream(token_ids=prompt, max_tokens=4, temperature=0.0, ignore_eos=True):
        if delta.token_ids and not output:
            seconds = time.perf_counter() - began
        output += delta.token_ids
    return seconds, output


async def measure(memory: str, model: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    rng = random.Random(0)
    prompts = [
        [rng.randrange(1000, 100_000) % args.vocabulary for _ in range(args.tokens)]
        for _ in range(args.chats)
    ]
    rounds: list[list[float]] = []
    outputs: list[list[int]] = []
    plan = plan_of(model, memory, args, args.out / f"logs-{memory or 'none'}")
    async with Deployment(plan, console) as deployment, AsyncClient(deployment.address) as client:
        await first_token(client, prompts[0][:256])
        await asyncio.sleep(args.settle if memory else 0)
        for _ in range(args.rounds):
            pairs = [await first_token(client, prompt) for prompt in prompts]
            rounds.append([seconds for seconds, _ in pairs])
            outputs = [output for _, output in pairs]
    later = [seconds for each in rounds[1:] for seconds in each]
    return {
        "host_memory": memory,
        "first_ms": [1e3 * seconds for seconds in rounds[0]],
        "later_ms": [1e3 * seconds for seconds in later],
        "first_p50_ms": 1e3 * statistics.median(rounds[0]),
        "later_p50_ms": 1e3 * statistics.median(later),
        "outputs": outputs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--model", default="", help="a model directory; default: of --shape")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="without it equal outputs are not to be expected"
    )
    parser.add_argument("--vocabulary", type=int, default=151_000)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="40G", help="room for all chats: 4.2 GB each")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds in which the memory is pinned")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_shape(args.shape, Path(folder))
            args.model = folder
        found = [asyncio.run(measure(memory, args.model, args, console)) for memory in ("", args.memory)]
    for each in found:
        name = f"host memory {each['host_memory']}" if each["host_memory"] else "without a tier"
        console.print(
            f"{name}: TTFT first {each['first_p50_ms']:.1f} ms, later {each['later_p50_ms']:.1f} ms (p50)"
        )
    console.print(f"outputs equal: {found[0]['outputs'] == found[1]['outputs']}")
    report = {"machine": machine(), "versions": versions(), "tokens": args.tokens, "runs": found}
    (args.out / "gpu_host_tier.json").write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
