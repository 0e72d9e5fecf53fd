"""Random mixes of images and text, under kills of encode nodes and with small caches: each answer is that of
a fresh run.

    python benchmarks/image_mixes.py --mixes 3000 --times 3 --json mixes.json

demo-vision on this machine: a prefill and a decode node whose pools hold a few prompts, and two encode nodes
whose memory holds a few images. A mix has up to four of --images pictures (half of them differ from another
one in a single pixel) between pieces of text, and its own sampling parameters. Each is first answered by one
node that encodes and computes everything itself, in a cache namespace of its own, then --times times by the
others, while an encode node is killed and started again every --seconds seconds. Prints the answers that
differ; the exit code is 1 if any does, or if one fails.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import io
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "cluster"))

from deployment import Deployment
from PIL import Image
from process import Process
from rich.console import Console
from rich.progress import Progress
from shared import make_parser, save_results

from baton.client import AsyncClient
from baton.demo.figures import QUESTIONS, draw

AT_ONCE = 8
PRELUDE = """
from baton.engine import images
from baton.worker.images.choice import EncodeChoice

EncodeChoice.in_place = lambda *_: False
images.ImageEncoder.__init__.__defaults__ = (*images.ImageEncoder.__init__.__defaults__[:-1], 200_000)
"""
"""Of the prefill node: it would rather encode such small images itself, and remember all of them."""
TEXTS = ("Look at this.", "And then:", "Compare.", "One more", "The picture of a friend, drawn in haste.")
Answer = tuple[int, list[tuple[list[int], str]]]
"""Tokens of the prompt; tokens and finish reason of each choice."""


@dataclass(frozen=True)
class Mix:
    content: list[Any]
    options: dict[str, Any]


def pictures(count: int, rng: random.Random) -> list[bytes]:
    """Every second one is the one before with another pixel."""
    found: list[bytes] = []
    while len(found) < count:
        first = draw(rng).picture.convert("RGB")
        second = first.copy()
        at = rng.randrange(first.width), rng.randrange(first.height)
        second.putpixel(at, tuple(255 - value for value in first.getpixel(at)))
        found += map(_png, (first, second))
    return found[:count]


def _png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def draw_mix(shown: Sequence[bytes], rng: random.Random) -> Mix:
    content: list[Any] = []
    for _ in range(rng.randrange(5)):
        content.append(rng.choice(shown))
        if rng.random() < 0.4:
            content.append(rng.choice(TEXTS))
    content.append(rng.choice(rng.choice(list(QUESTIONS.values()))))
    if rng.random() < 0.3:
        rng.shuffle(content)
    options = {"max_tokens": rng.randrange(1, 17), "temperature": rng.choice((0.0, 0.8, 1.5))}
    return Mix(content, options | {"seed": rng.randrange(2**32), "n": rng.choice((1, 1, 1, 2))})


async def ask(client: AsyncClient, mix: Mix, **options: Any) -> Answer:
    messages = [{"role": "user", "content": mix.content}]
    found = await client.generate(messages=messages, timeout=120, **mix.options, **options)
    assert found.usage is not None
    choices = [(list(choice.token_ids), str(choice.finish_reason)) for choice in found.choices]
    return found.usage.prompt_tokens, choices


async def fresh(address: str, mixes: Sequence[Mix]) -> list[Answer]:
    places = asyncio.Semaphore(AT_ONCE)

    async with AsyncClient(address) as client:

        async def one(number: int) -> Answer:
            async with places:
                return await ask(client, mixes[number], namespace=f"fresh {number}")

        return await asyncio.gather(*map(one, range(len(mixes))))


async def kill_nodes(nodes: Sequence[Any], seconds: float, done: asyncio.Event) -> int:
    """Until `done`; returns how many kills there were."""
    kills = 0
    while not done.is_set():
        try:
            async with asyncio.timeout(seconds):
                await done.wait()
        except TimeoutError:
            node = nodes[kills % len(nodes)]
            kills += 1
            await asyncio.to_thread(node.kill)
            await asyncio.sleep(min(1.0, seconds / 4))
            await asyncio.to_thread(node.start)
            await asyncio.to_thread(node.wait_ready)
    return kills


async def compare(
    deployment: Deployment, mixes: Sequence[Mix], wanted: Sequence[Answer], args: Any, rng: random.Random
) -> tuple[int, list[str]]:
    """Kills, and problems."""
    order = [number for number in range(len(mixes)) for _ in range(args.times)]
    # Those of one mix lie near each other, so that caches hold some of them still.
    order.sort(key=lambda number: number + rng.uniform(0, 40))
    problems, places = list[str](), asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(deployment.gateway.outside) as client:
        done = asyncio.Event()
        killing = asyncio.create_task(kill_nodes(deployment.of("encode"), args.seconds, done))
        with Progress(transient=True) as progress:
            bar = progress.add_task("mixes", total=len(order))

            async def one(number: int) -> None:
                async with places:
                    try:
                        found = await ask(client, mixes[number])
                        if found != wanted[number]:
                            problems.append(f"mix {number}: {found} and not {wanted[number]}")
                    except Exception as error:
                        problems.append(f"mix {number}: {error}")
                    progress.advance(bar)

            await asyncio.gather(*map(one, order))
        done.set()
        return await killing, problems


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--mixes", type=int, default=1000)
    parser.add_argument("--times", type=int, default=3, help="that each is asked")
    parser.add_argument("--images", type=int, default=60, help="different ones")
    parser.add_argument("--seconds", type=float, default=8.0, help="between two kills")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    Process.forked = True
    rng, console, begun = random.Random(args.seed), Console(), time.monotonic()
    shown = pictures(args.images, rng)
    mixes = [draw_mix(shown, rng) for _ in range(args.mixes)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "alone").mkdir()
        with Deployment.split(Path(folder) / "alone", "demo-vision", prefill=0) as deployment:
            wanted = asyncio.run(fresh(deployment.gateway.outside, mixes))
        console.print(f"{len(mixes)} fresh answers after {time.monotonic() - begun:.0f} s")
        small = ("--kv-tokens", "2048", "--max-rows", "8")
        split = Deployment.split(
            Path(folder), "demo-vision", worker=small, gateway_flags=["--split", "always"]
        )
        for _ in range(2):
            split.add_encode()
        for process in split.of("prefill"):
            process.prelude = PRELUDE
        with split as deployment:
            kills, problems = asyncio.run(compare(deployment, mixes, wanted, args, rng))
            load = [node.load() for node in deployment.of("encode") + deployment.of("prefill")]
            deployment.assert_idle()
    for problem in problems:
        console.print(problem, style="red")
    encoded = [each.encoded_images for each in load]
    seconds = time.monotonic() - begun
    console.print(
        f"{len(mixes) * args.times} answers, {kills} kills of encode nodes, {len(problems)} problems; images "
        f"encoded since their last start: {encoded}; {seconds:.0f} s"
    )
    asked = {"mixes": args.mixes, "times": args.times, "images": args.images, "seed": args.seed}
    save_results(args, {**asked, "kills": kills, "problems": problems, "seconds": seconds})
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
