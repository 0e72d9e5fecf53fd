"""Whether images that are attacks delay others: the longest pause between two tokens beside them.

    python benchmarks/image_attacks.py [--streams 4] [--seconds 10]

A deployment of `demo-vision` on this machine, all processes real, with an encode node. The streams run alone,
then beside --clients that send one attack after the other, for so many seconds each. Prints the longest and
the p99 gap of both, and how attacks ended, all of which must be refused. Where processors are few, the
decoding of pictures takes its share from workers.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import multiprocessing
import random
import struct
import time
import zlib
from collections import Counter
from multiprocessing.connection import Connection

import httpx
from PIL import Image
from rich.console import Console

from baton.bench.machine import machine
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.client import AsyncClient


def png(width: int, height: int) -> bytes:
    """A few kilobytes that say to have so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(3 * 2**22), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def picture(kind: str, size: tuple[int, int]) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(data, kind)
    return data.getvalue()


def attacks() -> dict[str, list[bytes]]:
    """Files of a request each."""
    photo = picture("JPEG", (2000, 2000))
    return {
        "bomb": [png(60_000, 60_000)],
        "bombs of the most pixels": [png(8000, 8000)] * 16,
        "truncated": [photo[: len(photo) // 2], picture("WEBP", (900, 900))[:200]],
        "strip": [picture("PNG", (1_000_000, 1))],
        "1,000 images": [picture("PNG", (8, 8))] * 1000,
        "noise": [random.Random(1).randbytes(8 * 2**20)],
        "an archive behind": [b"PK\x03\x04" + photo],
    }


def body(model: str, files: list[bytes]) -> bytes:
    urls = ["data:image/png;base64," + base64.b64encode(file).decode() for file in files]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps(
        {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": parts}]}
    ).encode()


async def stream(client: AsyncClient, until: float, gaps: list[float]) -> None:
    """One answer after the other; gaps within them."""
    messages = [{"role": "user", "content": "Say something."}]
    while time.monotonic() < until:
        last = None
        async for delta in client.stream(messages=messages, max_tokens=64, temperature=0.0, ignore_eos=True):
            now = time.monotonic()
            if last is not None and delta.token_ids:
                gaps.append(now - last)
            last = now


async def attack(base: str, bodies: dict[str, bytes], until: float, ends: Counter[str]) -> None:
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=60) as http:
        for name in itertools.cycle(bodies):
            if time.monotonic() > until:
                return
            answer = await http.post("/v1/chat/completions", content=bodies[name])
            ends[f"{name}: {answer.status_code}"] += 1


def attackers(base: str, model: str, clients: int, seconds: float, told: Connection) -> None:
    """A process of its own, so that those who read streams do nothing else."""
    bodies = {name: body(model, files) for name, files in attacks().items()}
    ends: Counter[str] = Counter()

    async def all_of_them() -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(attack(base, bodies, until, ends) for _ in range(clients)))

    told.send("ready")
    told.recv()
    asyncio.run(all_of_them())
    told.send(dict(ends))


def said(name: str, gaps: list[float]) -> str:
    ordered = sorted(gaps)
    p99 = ordered[int(0.99 * len(ordered))]
    return f"{name}: longest gap {1e3 * ordered[-1]:.0f} ms, p99 {1e3 * p99:.1f} ms, {len(gaps)} gaps"


async def measure(args: argparse.Namespace, console: Console) -> None:
    model = {"model": "demo-vision"}
    settings = {role: dict(model) for role in ("tokenizer", "prefill", "decode", "encode")}
    plan = DeploymentPlan(encode=1, settings=settings, restart=False)
    async with Deployment(plan, console) as deployment, AsyncClient(deployment.address) as client:
        base = f"http://{deployment.http_address}"
        async with httpx.AsyncClient(base_url=base) as http:
            name = (await http.get("/v1/models")).json()["data"][0]["id"]
        here, there = multiprocessing.get_context("spawn").Pipe()
        given = base, name, args.clients, args.seconds, there
        child = multiprocessing.get_context("spawn").Process(target=attackers, args=given)
        child.start()
        await asyncio.to_thread(here.recv)
        found: list[list[float]] = []
        for attacked in (False, True):
            if attacked:
                here.send("go")
            gaps: list[float] = []
            until = time.monotonic() + args.seconds
            await asyncio.gather(*(stream(client, until, gaps) for _ in range(args.streams)))
            found.append(gaps)
        ends = await asyncio.to_thread(here.recv)
        child.join()
    alone, beside = found
    console.print(said("alone", alone), said("beside attacks", beside), ends, sep="\n")
    console.print(f"added to the longest gap: {1e3 * (max(beside) - max(alone)):.0f} ms; {machine()}")
    taken = {end: count for end, count in ends.items() if not end.endswith((": 400", ": 413", ": 429"))}
    assert not taken, f"attacks that were not refused: {taken}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0)
    asyncio.run(measure(parser.parse_args(), Console(width=150)))


if __name__ == "__main__":
    main()
