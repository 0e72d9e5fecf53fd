"""What the live page costs the gateway: its processor time with so many pages open, against none.

    python benchmarks/page_cost.py --browsers --pages 5 --seconds 20 --json FILE

Starts the demo model, split, sends it a steady load, and measures in turns: none open, then so many. With
--browsers each page is open in a headless Chromium of its own (Debian: chromium, chromium-driver), which
shows an empty page in the other turns; else a page is a client that reads the stream of frames. Prints
processor seconds of the gateway per second, by the scheduler's count in nanoseconds, a line a turn, and the
median of the differences of adjacent turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from shared import make_parser, save_results

from baton.cli.deployment import Deployment, DeploymentPlan
from baton.client import AsyncClient

sys.path.append(str(Path(__file__).parent.parent / "tests/cluster"))

from browser import chromium

EMPTY = "about:blank"


async def load(address: str, rate: float) -> None:
    """The same all the time; rate 0: none."""

    async def one(client: AsyncClient, number: int) -> None:
        prompt = [5 + (31 * number + i) % 4000 for i in range(200)]
        await client.generate(token_ids=prompt, max_tokens=48, ignore_eos=True)

    if not rate:
        return
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


def processor_seconds(pid: int) -> float:
    threads = Path("/proc", str(pid), "task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


async def rate_of(pid: int, seconds: float) -> float:
    """Processor seconds per second, from two seconds on."""
    await asyncio.sleep(2.0)
    before, began = processor_seconds(pid), asyncio.get_running_loop().time()
    await asyncio.sleep(seconds)
    return (processor_seconds(pid) - before) / (asyncio.get_running_loop().time() - began)


async def with_clients(pid: int, address: str, pages: int, seconds: float) -> float:
    watching = [asyncio.create_task(watch(address)) for _ in range(pages)]
    used = await rate_of(pid, seconds)
    for each in watching:
        assert not each.done(), "a page has lost its stream"
        each.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    return used


async def with_browsers(pid: int, url: str, browsers: list[Any], seconds: float) -> float:
    """url: what all of them show."""
    for each in browsers:
        await asyncio.to_thread(each.get, url)
    used = await rate_of(pid, seconds)
    if url != EMPTY:
        for each in browsers:
            rows = "return document.querySelectorAll('#processes [data-address]').length"
            assert await asyncio.to_thread(each.execute_script, rows), "a browser does not show the page"
    return used


async def main(pages: int, seconds: float, turns: int, rate: float, browsers: bool) -> dict[str, Any]:
    console = Console()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        opened = [stack.enter_context(chromium()) for _ in range(pages)] if browsers else []
        plan = DeploymentPlan(prefill=1, decode=1, log_folder=Path(folder))
        async with Deployment(plan, console) as deployment:
            gateway = next(child for child in deployment.children if child.role == "gateway")
            assert gateway.pid is not None
            page = f"http://{deployment.http_address}/"
            sending = asyncio.create_task(load(deployment.address, rate))
            found: dict[int, list[float]] = {0: [], pages: []}
            for _ in range(turns):
                for number in found:
                    if browsers:
                        url = page if number else EMPTY
                        share = await with_browsers(gateway.pid, url, opened, seconds)
                    else:
                        share = await with_clients(gateway.pid, deployment.http_address, number, seconds)
                    found[number].append(share)
                    console.print(f"{number} pages: {100 * share:.2f} % of a core", highlight=False)
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, ExceptionGroup):
                await sending
    cost = median(after - before for before, after in zip(found[0], found[pages], strict=True))
    console.print(
        f"{pages} {'browsers' if browsers else 'pages'} cost {100 * cost:.2f} % of a core", highlight=False
    )
    return {
        "pages": pages,
        "browsers": browsers,
        "seconds": seconds,
        "rate": rate,
        "cores": found,
        "cost": cost,
    }


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second; 0: none")
    parser.add_argument("--browsers", action="store_true", help="real ones")
    given = parser.parse_args()
    result = asyncio.run(main(given.pages, given.seconds, given.turns, given.rate, given.browsers))
    save_results(given, result)
