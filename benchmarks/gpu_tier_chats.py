"""Long chats on one GPU, prefill and decode apart, with and without a host tier: random weights.

    python benchmarks/gpu_tier_chats.py --out DIR

Without a tier: the next turns of chats whose pages only the decode node still has (the first of them opens
the connection and maps the pool), with where the last one waited, and --chats chats in rotation, which the
prefill node's pool cannot hold. With a tier at the prefill node: the same rotation, and the gaps between
tokens of --streams streams, alone and while the chats go on rotating, so that pages are demoted and promoted
beside them. Prints medians and writes DIR/gpu_tier_chats.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
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

DECODE_CHATS = 4
"""Of the next-turn measurement: the decode node's pool holds them, the prefill node's half of them."""


def plan_of(model: str, memory: str, args: argparse.Namespace, folder: Path) -> DeploymentPlan:
    """`memory`: of the prefill node's host tier; empty: none."""
    worker: dict[str, Any] = {"model": model, "load_format": "dummy", "device": args.device}
    worker |= {"dtype": args.dtype, "max_rows": args.streams + 2}
    small = 2 * args.tokens + args.tokens // 8
    decode = worker | {"kv_tokens": small if memory else (DECODE_CHATS + 1) * args.tokens}
    prefill = worker | {"kv_tokens": small, "host_memory": memory}
    settings = {
        "tokenizer": {"model": model},
        "prefill": prefill,
        "decode": decode,
        "gateway": {"split": "always"},
    }
    return DeploymentPlan(settings=settings, restart=False, log_folder=folder)


async def ask(client: AsyncClient, prompt: list[int], output: int) -> tuple[float, list[int]]:
    """Milliseconds to the first token, and the answer."""
    began, took, answer = time.perf_counter(), 0.0, []
    async for delta in client.stream(token_ids=prompt, max_tokens=output, temperature=0.0, ignore_eos=True):
        if delta.token_ids and not answer:
            took = 1e3 * (time.perf_counter() - began)
        answer += delta.token_ids
    return took, answer


async def gaps(client: AsyncClient, prompt: list[int], output: int) -> list[float]:
    """Milliseconds between an answer's tokens; those that arrive together share the time before them."""
    last, found = 0.0, []
    async for delta in client.stream(token_ids=prompt, max_tokens=output, temperature=0.0, ignore_eos=True):
        now = time.perf_counter()
        if last and delta.token_ids:
            found += [1e3 * (now - last) / len(delta.token_ids)] * len(delta.token_ids)
        last = now
    return found


class Chats:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rng = args, random.Random(0)
        self.prompts = [self.tokens(args.tokens) for _ in range(args.chats)]

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1000, 100_000) % self.args.vocabulary for _ in range(count)]

    async def next_turns(self, client: AsyncClient) -> list[float]:
        """Milliseconds to the first token of the second turns of chats that the prefill node forgot."""
        first = [(prompt, (await ask(client, prompt, 16))[1]) for prompt in self.prompts[:DECODE_CHATS]]
        # Each takes the room of the one that was used least recently: the next to be asked for.
        return [(await ask(client, prompt + answer + self.tokens(32), 4))[0] for prompt, answer in first]

    async def rotate(self, client: AsyncClient, rounds: int) -> list[list[float]]:
        return [[(await ask(client, prompt, 1))[0] for prompt in self.prompts] for _ in range(rounds)]

    async def streams(self, client: AsyncClient) -> list[float]:
        prompts = [self.tokens(128) for _ in range(self.args.streams)]
        found = await asyncio.gather(*(gaps(client, prompt, self.args.output) for prompt in prompts))
        return list(itertools.chain.from_iterable(found))

    async def streams_beside(self, client: AsyncClient) -> tuple[list[float], list[float]]:
        """Gaps, and milliseconds to the first token of the chats that rotated meanwhile."""
        rotated: list[float] = []

        async def rotate() -> None:
            for prompt in itertools.cycle(self.prompts):
                rotated.append((await ask(client, prompt, 1))[0])

        rotating = asyncio.create_task(rotate())
        try:
            return await self.streams(client), rotated
        finally:
            rotating.cancel()


def middle(times: list[float]) -> str:
    return f"p50 {statistics.median(times):.2f} ms, p99 {sorted(times)[int(0.99 * len(times))]:.2f} ms"


async def measure(memory: str, model: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    chats, found = Chats(args), {"host_memory": memory}
    plan = plan_of(model, memory, args, args.out / f"logs-{memory or 'none'}")
    async with Deployment(plan, console) as deployment, AsyncClient(deployment.address) as client:
        await ask(client, chats.tokens(256), 4)
        if not memory:
            found["next_turn_ms"] = await chats.next_turns(client)
            console.print(f"next turn: {found['next_turn_ms']}")
            trace = (sys.executable, "-m", "baton.cli.main", "trace", "--server", deployment.address)
            await (await asyncio.create_subprocess_exec(*trace)).wait()
            found["rotation_ms"] = await chats.rotate(client, 2)
        else:
            begun = time.perf_counter()
            first = await chats.rotate(client, 1)
            await asyncio.sleep(max(0.0, args.settle - (time.perf_counter() - begun)))
            found["rotation_ms"] = first + await chats.rotate(client, args.rounds - 1)
            for repeat in range(args.repeats):
                alone = await chats.streams(client)
                beside, rotated = await chats.streams_beside(client)
                found[f"alone_{repeat}_ms"], found[f"beside_{repeat}_ms"] = alone, beside
                found[f"rotated_{repeat}_ms"] = rotated
                console.print(f"gaps alone: {middle(alone)}")
                console.print(f"gaps beside {len(rotated)} chats ({middle(rotated)}): {middle(beside)}")
    for number, each in enumerate(found["rotation_ms"]):
        console.print(f"host memory {memory or 'none'}, round {number}: {middle(each)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--model", default="", help="a model directory; default: Qwen3-8B's shape")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--vocabulary", type=int, default=151_000)
    parser.add_argument("--tokens", type=int, default=30_000, help="of each chat")
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4, help="of the rotation with a tier")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--output", type=int, default=1000, help="tokens of a stream")
    parser.add_argument("--repeats", type=int, default=2, help="of the streams, alone and beside chats")
    parser.add_argument("--memories", nargs="+", default=["", "76G"], help="of the host tier; empty: none")
    parser.add_argument("--settle", type=float, default=80.0, help="seconds in which the memory is pinned")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    console, found = Console(width=150), []
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_shape("8b", Path(folder))
            args.model = folder
        for memory in args.memories:
            found.append(asyncio.run(measure(memory, args.model, args, console)))
    report = {"machine": machine(), "versions": versions(), "tokens": args.tokens, "runs": found}
    (args.out / "gpu_tier_chats.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
