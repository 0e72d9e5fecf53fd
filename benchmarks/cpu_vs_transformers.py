"""Baton on a CPU against `transformers.generate`, and against itself: ratios taken in one run.

    python benchmarks/cpu_vs_transformers.py --model 8x512 --model demo --json benchmarks/results/cpu.json

Float32, two threads on each side, greedy, end of sequence ignored, medians of --runs. Baton is measured at a
client, through gateway, tokenizer, decode and prefill processes; transformers runs inside this process. Sides
alternate, so that a noisy machine disturbs both. "8x512" is a random Qwen3 of 8 layers and 512 hidden.
"""

from __future__ import annotations

import os

# Threads of both sides spin alike while they wait: what `baton up` sets for its workers (cli/supervisor.py).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import argparse
import asyncio
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from shared import make_parser, save_results

from baton.cli.console import table
from baton.cli.credentials import Credentials
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.client import AsyncClient
from baton.demo import model_path
from baton.v1 import node_pb2, node_pb2_grpc

THREADS = 2
PROMPT, OUTPUT = 64, 128
MIX_SEED = 7
MIX_REQUESTS = 16
BATCH = 64


@dataclass(frozen=True)
class Claim:
    """A ratio, and the bound that the README states for it."""

    name: str
    ratio: float
    bound: float
    at_least: bool
    detail: str

    @property
    def holds(self) -> bool:
        return self.ratio >= self.bound if self.at_least else self.ratio <= self.bound


def make_random_model(folder: Path) -> None:
    """Saves a random Qwen3 of 8 layers x 512 hidden with the demo model's tokenizer."""
    torch.manual_seed(0)
    demo = transformers.AutoConfig.from_pretrained(model_path())
    config = transformers.Qwen3Config(
        vocab_size=demo.vocab_size,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=demo.eos_token_id,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in model_path().glob("tokenizer*"):
        shutil.copy(file, folder)


class Mix:
    """Requests of mixed lengths, the same on both sides."""

    def __init__(self, vocab: int) -> None:
        rng = random.Random(MIX_SEED)
        self.prompts = [
            [rng.randrange(10, vocab) for _ in range(rng.randrange(16, 384))] for _ in range(MIX_REQUESTS)
        ]
        self.outputs = [rng.randrange(16, 128) for _ in range(MIX_REQUESTS)]

    @property
    def tokens(self) -> int:
        return sum(self.outputs)


class Reference:
    """transformers, in this process."""

    def __init__(self, path: Path) -> None:
        torch.set_num_threads(THREADS)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.model.generation_config.pad_token_id = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds for one static batch, padded on the left."""
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        started = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
            )
        return time.perf_counter() - started


class Served:
    """A deployment of Baton, as a client sees it."""

    def __init__(self, client: AsyncClient, deployment: Deployment) -> None:
        self.client = client
        self.deployment = deployment

    async def generate(
        self, prompt: list[int], new_tokens: int, namespace: str = ""
    ) -> tuple[float, float, float]:
        """(time to first token, time per output token, total) in seconds, measured here."""
        started = time.perf_counter()
        first = last = 0.0
        count = 0
        stream = self.client.stream(
            token_ids=prompt, max_tokens=new_tokens, temperature=0.0, ignore_eos=True, namespace=namespace
        )
        async with stream:
            async for delta in stream:
                if delta.token_ids:
                    last = time.perf_counter()
                    first = first or last
                    count += len(delta.token_ids)
        if count != new_tokens:
            raise RuntimeError(f"{count} tokens came instead of {new_tokens}")
        ended = time.perf_counter() - started
        return first - started, (last - first) / max(1, count - 1), ended

    async def concurrently(self, mix: Mix, namespace: str) -> float:
        started = time.perf_counter()
        pairs = zip(mix.prompts, mix.outputs, strict=True)
        await asyncio.gather(*(self.generate(prompt, count, namespace) for prompt, count in pairs))
        return time.perf_counter() - started

    async def one_by_one(self, mix: Mix, namespace: str) -> float:
        started = time.perf_counter()
        for prompt, count in zip(mix.prompts, mix.outputs, strict=True):
            await self.generate(prompt, count, namespace)
        return time.perf_counter() - started

    async def decode_load(self) -> node_pb2.Load:
        address = next(child.address for child in self.deployment.children if child.role == "decode")
        async with Credentials.to(self.deployment.address).node(address) as channel:
            return await node_pb2_grpc.NodeStub(channel).GetLoad(node_pb2.GetLoadRequest(), timeout=10)


async def measure(
    name: str, path: Path, split: Served, aggregated: Served, runs: int, report: Callable[[str], None]
) -> list[Claim]:
    """All claims about one model."""
    reference = Reference(path)
    vocab = reference.model.config.vocab_size
    rng = random.Random(1)

    def fresh(length: int) -> list[int]:
        return [rng.randrange(10, vocab) for _ in range(length)]

    async def alternate(*sides: Callable[[], Awaitable[float]]) -> list[float]:
        """Medians; the first round warms up and does not count."""
        seconds: list[list[float]] = [[] for _ in sides]
        for run in range(runs + 1):
            for side, results in zip(sides, seconds, strict=True):
                value = await side()
                if run:
                    results.append(value)
        return [statistics.median(results) for results in seconds]

    claims: list[Claim] = []

    def add(what: str, ratio: float, bound: float, detail: str, at_least: bool = True) -> None:
        claims.append(Claim(what, ratio, bound, at_least, detail))

    report("one stream")
    prompt = fresh(PROMPT)

    async def stream_baton() -> float:
        return (await split.generate(prompt, OUTPUT))[2]

    async def stream_transformers() -> float:
        return await asyncio.to_thread(reference.generate, [prompt], OUTPUT)

    ours, theirs = await alternate(stream_baton, stream_transformers)
    detail = f"{OUTPUT / ours:.0f} against {OUTPUT / theirs:.0f} tokens/s"
    add("one stream: tokens/s over transformers.generate", theirs / ours, 1.3, detail)

    report("sixteen requests")
    mix = Mix(vocab)
    serial = iter(range(10**6))

    async def mix_together() -> float:
        return await split.concurrently(mix, f"together-{next(serial)}")

    async def mix_serially() -> float:
        return await split.one_by_one(mix, f"serially-{next(serial)}")

    async def mix_transformers() -> float:
        return await asyncio.to_thread(reference.generate, mix.prompts, max(mix.outputs))

    together, serially, padded = await alternate(mix_together, mix_serially, mix_transformers)
    detail = f"{mix.tokens / together:.0f} against {mix.tokens / serially:.0f} tokens/s"
    add("16 concurrent requests over one after another", serially / together, 3.0, detail)
    detail = f"{mix.tokens / together:.0f} against {mix.tokens / padded:.0f} useful tokens/s"
    add("16 concurrent requests over one padded static batch", padded / together, 1.2, detail)

    report("cached prefix")

    async def cold() -> float:
        return (await split.generate(fresh(1024), 2))[0]

    cached = fresh(960)
    await split.generate(cached + fresh(64), 2)

    async def warm() -> float:
        return (await split.generate(cached + fresh(64), 2))[0]

    slow, fast = await alternate(cold, warm)
    bound = 0.15 if name == "8x512" else 1.0
    detail = f"{1000 * fast:.1f} against {1000 * slow:.1f} ms"
    add("TTFT of 1,024 tokens, 960 cached over cold", fast / slow, bound, detail, at_least=False)

    report("split against aggregated")

    async def tpot_split() -> float:
        return (await split.generate(fresh(PROMPT + 16), OUTPUT))[1]

    async def tpot_aggregated() -> float:
        return (await aggregated.generate(fresh(PROMPT + 16), OUTPUT))[1]

    apart, alone = await alternate(tpot_split, tpot_aggregated)
    detail = f"{1000 * apart:.2f} against {1000 * alone:.2f} ms"
    add("TPOT, split over aggregated", apart / alone, 1.1, detail, at_least=False)

    report("messages")
    before = await split.decode_load()
    prompts = [fresh(32) for _ in range(BATCH)]
    await asyncio.gather(*(split.generate(p, 32, f"messages-{i}") for i, p in enumerate(prompts)))
    after = await split.decode_load()
    messages, steps = after.messages - before.messages, after.steps - before.steps
    detail = f"{messages} messages in {steps} steps, {BATCH} requests"
    add("messages to the gateway per decode step", messages / steps, 1.0, detail, at_least=False)
    return claims


def model_folder(name: str, scratch: Path) -> Path:
    """The checkpoint that a --model stands for."""
    if name == "demo":
        return model_path()
    if name != "8x512":
        return Path(name)
    make_random_model(scratch / name)
    return scratch / name


async def measure_served(name: str, path: Path, runs: int, console: Console) -> list[Claim]:
    """Starts a split and an aggregated deployment of the model and measures both."""
    worker = {"model": str(path), "threads": THREADS}
    settings = {"tokenizer": {"model": str(path)}, "prefill": worker, "decode": worker}
    plan = DeploymentPlan(settings=settings)
    alone = DeploymentPlan(prefill=0, settings=settings)
    async with (
        Deployment(plan, console) as first,
        Deployment(alone, console) as second,
        AsyncClient(first.address) as one,
        AsyncClient(second.address) as two,
    ):
        with Progress(console=console) as progress:
            task = progress.add_task(name, total=6)

            def report(what: str) -> None:
                progress.update(task, description=f"{name}: {what}", advance=1)

            return await measure(name, path, Served(one, first), Served(two, second), runs, report)


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    console = Console()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.model:
            claims = await measure_served(name, model_folder(name, Path(folder)), args.runs, console)
            results.append({"model": name, "claims": [{**vars(c), "holds": c.holds} for c in claims]})
            print_table(console, name, claims)
    return results


def print_table(console: Console, name: str, claims: list[Claim]) -> None:
    rows = table(name, "ratio", "bound", "", "measured")
    for claim in claims:
        bound = f"{'>=' if claim.at_least else '<='} {claim.bound:g}"
        rows.add_row(claim.name, f"{claim.ratio:.2f}", bound, "ok" if claim.holds else "MISSED", claim.detail)
    console.print(rows)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--model", action="append", help="8x512, demo or a path; may be repeated (default: both)"
    )
    parser.add_argument("--runs", type=int, default=5, help="runs per figure, after one to warm up")
    args = parser.parse_args()
    args.model = args.model or ["8x512", "demo"]
    transformers.utils.logging.disable_progress_bar()
    results = asyncio.run(run(args))
    save_results(args, {"results": results})
    return 0 if all(claim["holds"] for result in results for claim in result["claims"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
