"""What encode nodes change for prompts with images on GPUs: time to the first token, random weights.

    python benchmarks/images_served.py --out DIR

Three deployments with the shape of Qwen3-VL-8B, one prefill and one decode node: without an encode node
(`in place`), with one that chooses by measured times (`chosen`), and with one that is always asked (`always`,
which no flag gives). On one GPU all share it; `--devices cuda:0 cuda:1 cuda:1` leaves the first of two to the
prefill node. Every prompt has --images fresh pictures and a short question. Prints medians, idle and under
`--rates` requests a second, and where an idle request waited; writes DIR/images_served.json.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from baton.bench.machine import machine, versions
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.main import main as run_baton
from baton.client import AsyncClient
from baton.worker.images.choice import EncodeChoice

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from make_shape import write_shape

LAYOUTS = ("in place", "chosen", "always")
ALWAYS = (sys.executable, __file__, "serve")
"""Runs a process whose prefill nodes leave all images to encode nodes."""


def picture(rng: random.Random, side: int) -> bytes:
    """A PNG of one colour but for a few pixels: quick to decode, and no other is equal to it."""
    made, data = Image.new("RGB", (side, side), tuple(rng.randbytes(3))), io.BytesIO()
    for _ in range(8):
        made.putpixel((rng.randrange(side), rng.randrange(side)), tuple(rng.randbytes(3)))
    made.save(data, "PNG", compress_level=1)
    return data.getvalue()


async def first_token(client: AsyncClient, content: list[Any]) -> float:
    """Milliseconds from the call to the first token."""
    began, messages = time.perf_counter(), [{"role": "user", "content": content}]
    async for delta in client.stream(messages=messages, max_tokens=8, temperature=0.0, ignore_eos=True):
        if delta.token_ids:
            return 1e3 * (time.perf_counter() - began)
    raise RuntimeError("an answer without a token")


async def idle(client: AsyncClient, rng: random.Random, args: argparse.Namespace) -> list[float]:
    times = []
    for _ in range(args.requests + 2):
        content = [*(picture(rng, args.side) for _ in range(args.images)), "What are these?"]
        times.append(await first_token(client, content))
    return times[2:]


async def loaded(
    client: AsyncClient, rng: random.Random, rate: float, args: argparse.Namespace
) -> list[float]:
    """Requests arrive at random (Poisson); pictures are made before."""
    asked = [
        [*(picture(rng, args.side) for _ in range(args.images)), "What are these?"]
        for _ in range(round(rate * args.seconds))
    ]
    async with asyncio.TaskGroup() as group:
        tasks = []
        for content in asked:
            tasks.append(group.create_task(first_token(client, content)))
            await asyncio.sleep(rng.expovariate(rate))
    return [task.result() for task in tasks]


async def text_only(client: AsyncClient, rng: random.Random, args: argparse.Namespace) -> list[float]:
    times = []
    for _ in range(args.requests + 2):
        words = " ".join(f"{rng.randrange(10**6)}" for _ in range(200))
        times.append(await first_token(client, [words]))
    return times[2:]


async def measure(layout: str, model: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    worker = {"model": model, "load_format": "dummy", "dtype": args.dtype}
    prefill, decode, encode = ({**worker, "device": device} for device in args.devices)
    pool = {"max_rows": args.max_rows, "kv_tokens": args.kv_tokens}
    settings = {
        "tokenizer": {"model": model},
        "prefill": {**prefill, **pool},
        "decode": {**decode, **pool},
        "encode": encode,
        "gateway": {"split": "always"},
    }
    plan = DeploymentPlan(
        encode=int(layout != "in place"),
        settings=settings,
        restart=False,
        log_folder=args.out / f"logs-{layout.replace(' ', '-')}",
        **({"program": ALWAYS} if layout == "always" else {}),
    )
    rng = random.Random(0)
    found: dict[str, Any] = {"layout": layout}
    async with Deployment(plan, console) as deployment, AsyncClient(deployment.address) as client:
        found["idle_ms"] = await idle(client, rng, args)
        trace = (sys.executable, "-m", "baton.cli.main", "trace", "--server", deployment.address)
        await (await asyncio.create_subprocess_exec(*trace)).wait()
        found["text_ms"] = await text_only(client, rng, args)
        for rate in args.rates:
            found[f"rate_{rate:g}_ms"] = await loaded(client, rng, rate, args)
    for name, times in found.items():
        if name != "layout":
            p99 = sorted(times)[int(0.99 * len(times))]
            console.print(f"{layout} {name}: p50 {statistics.median(times):.1f}, p99 {p99:.1f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--model", default="", help="a model directory; default: Qwen3-VL-8B's shape")
    parser.add_argument(
        "--devices", nargs=3, default=["cuda"] * 3, help="of prefill, decode and encode nodes"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--images", type=int, default=1, help="of each prompt")
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's height and width")
    parser.add_argument("--requests", type=int, default=20, help="of each idle measurement")
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each rate")
    parser.add_argument("--kv-tokens", type=int, default=40_000)
    parser.add_argument("--max-rows", type=int, default=64)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    console, found = Console(width=150), []
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_shape("qwen3-vl-8b", Path(folder))
            args.model = folder
        for layout in args.layouts:
            found.append(asyncio.run(measure(layout, args.model, args, console)))
    report = {"machine": machine(), "versions": versions(), "images": args.images, "side": args.side}
    (args.out / "images_served.json").write_text(json.dumps(report | {"runs": found}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        EncodeChoice.in_place = lambda *_: False  # type: ignore[method-assign]
        os.environ.setdefault("PYTHONSAFEPATH", "1")
        run_baton()
    else:
        main()
