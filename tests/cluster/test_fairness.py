"""Short requests while prompts as long as the context are computed."""

from __future__ import annotations

import asyncio
import itertools
import statistics

import pytest
from asking import greedy
from deployment import Deployment

from baton.client import AsyncClient

pytestmark = pytest.mark.alone

SHORT, LONGEST = 60, 1990
SAMPLES = 12
WORST = 10.0
"""Times the idle TTFT: a step that is half full of a long prompt, and the rest of the step before it."""
numbers = itertools.count()


def prompt(length: int) -> list[int]:
    """One that nobody has cached."""
    number = next(numbers)
    return [5 + number % 4000, 5 + number // 4000, *range(5, length + 3)]


async def ttft(client: AsyncClient) -> float:
    """Median over some short requests, one after the other."""
    times = []
    for _ in range(SAMPLES):
        answer = await client.generate(**greedy(prompt(SHORT), 2, timeout=30))
        assert answer.stats is not None
        times.append(answer.stats.ttft)
    return statistics.median(times)


async def test_a_prompt_as_long_as_the_context_does_not_hold_up_short_ones(tmp_path, deployments):
    with Deployment.split(tmp_path, "demo", prefill_flags=("--token-budget", "128")) as deployment:
        deployments.append(deployment)
        async with AsyncClient(deployment.gateway.address) as client:
            idle, long = await ttft(client), []

            async def keep_busy() -> None:
                while True:
                    answer = await client.generate(**greedy(prompt(LONGEST), 1, timeout=60))
                    assert answer.stats is not None
                    long.append(answer.stats.ttft)

            await ttft(client)
            busy = [asyncio.create_task(keep_busy()) for _ in range(2)]
            await asyncio.sleep(0.5)
            loaded = await ttft(client)
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)
        print(
            f"TTFT of short requests: idle {1000 * idle:.1f} ms, beside two longest prompts "
            f"{1000 * loaded:.1f} ms, {loaded / idle:.1f} times; of the longest {1000 * max(long):.0f} ms"
        )
        assert long and loaded < WORST * idle
        assert loaded < max(long) / 2
        deployment.assert_idle()
