"""What the live page costs the gateway: its processor time with so many pages open, against none.

    python benchmarks/page_cost.py --pages 5 --seconds 30 --json benchmarks/results/page_cost.json

Starts the demo model, split, sends it a steady load, and measures in turns: none open, then so many. A page
is a client of the stream of frames that reads all of it, as a browser does. Prints processor seconds of the
gateway per second, a line a turn, and the difference of the means.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import psutil
from rich.console import Console
from shared import make_parser, save_results

from baton.cli.deployment import Deployment, DeploymentPlan
from baton.client import AsyncClient


async def load(address: str, rate: float) -> None:
    """The same all the time."""

    async def one(client: AsyncClient, number: int) -> None:
        prompt = [5 + (31 * number + i) % 4000 for i in range(200)]
        await client.generate(token_ids=prompt, max_tokens=48, ignore_eos=True)

    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        number = 0
        while True:
            group.create_task(one(client, number))
            number += 1
            await asyncio.sleep(1 / rate)


async def watch(address: str) -> None:
    async with (
        httpx.AsyncClient(trust_env=False, timeout=None) as http,
        http.stream("GET", f"http://{address}/page/events") as answer,
    ):
        async for _ in answer.aiter_raw():
            pass


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(process: psutil.Process, address: str, pages: int, seconds: float) -> float:
    """Processor seconds per second."""
    watching = [asyncio.create_task(watch(address)) for _ in range(pages)]
    await asyncio.sleep(2.0)
    before, began = processor_seconds(process), asyncio.get_running_loop().time()
    await asyncio.sleep(seconds)
    used = (processor_seconds(process) - before) / (asyncio.get_running_loop().time() - began)
    for each in watching:
        assert not each.done(), "a page has lost its stream"
        each.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    return used


async def main(pages: int, seconds: float, turns: int, rate: float) -> dict[str, Any]:
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        plan = DeploymentPlan(prefill=1, decode=1, log_folder=Path(folder))
        async with Deployment(plan, console) as deployment:
            gateway = next(child for child in deployment.children if child.role == "gateway")
            assert gateway.pid is not None
            process = psutil.Process(gateway.pid)
            sending = asyncio.create_task(load(deployment.address, rate))
            found: dict[int, list[float]] = {0: [], pages: []}
            for _ in range(turns):
                for number in found:
                    share = await measure(process, deployment.http_address, number, seconds)
                    found[number].append(share)
                    console.print(f"{number} pages: {100 * share:.2f} % of a core", highlight=False)
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, ExceptionGroup):
                await sending
    cost = mean(found[pages]) - mean(found[0])
    console.print(f"{pages} pages cost {100 * cost:.2f} % of a core", highlight=False)
    return {"pages": pages, "seconds": seconds, "rate": rate, "cores": found, "cost": cost}


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    given = parser.parse_args()
    result = asyncio.run(main(given.pages, given.seconds, given.turns, given.rate))
    save_results(given, result)
