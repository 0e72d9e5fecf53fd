"""A client that does not take a message ends its stream; any that takes them does not."""

import asyncio

import pytest

from baton.gateway.backpressure import limited
from virtual_time import skip_waits

SECONDS = 0.2


@pytest.fixture(autouse=True)
async def virtual_time(monkeypatch):
    skip_waits(monkeypatch)


async def test_many_writes_and_long_pauses_between_them_are_no_matter():
    written = []

    async def take(message):
        await asyncio.sleep(SECONDS / 4)
        written.append(message)

    async with limited(take, SECONDS) as write:
        for number in range(3):
            await write(number)
            await asyncio.sleep(2 * SECONDS)
    assert written == [0, 1, 2]


async def test_one_write_that_takes_too_long_ends_it():
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(TimeoutError):
        async with limited(lambda message: asyncio.sleep(60), SECONDS) as write:
            await write("x")
    assert SECONDS <= loop.time() - started < 10


async def test_a_timeout_of_somebody_else_is_not_taken_for_its_own():
    async with limited(lambda message: asyncio.sleep(0), SECONDS):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)


async def test_metrics_of_tokens_are_histograms():
    from prometheus_client import generate_latest

    from baton.gateway.metrics import GatewayMetrics

    metrics = GatewayMetrics()
    for seconds in (0.001, 0.0011, 0.3, 100.0):
        metrics.itl.observe(seconds)
    lines = generate_latest(metrics.registry).decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("baton_itl_seconds"))
    assert found['baton_itl_seconds_bucket{le="0.001"}'] == "1.0"
    assert found['baton_itl_seconds_bucket{le="0.0025"}'] == "2.0"
    assert found['baton_itl_seconds_bucket{le="0.5"}'] == "3.0"
    assert found['baton_itl_seconds_bucket{le="+Inf"}'] == found["baton_itl_seconds_count"] == "4.0"
    assert float(found["baton_itl_seconds_sum"]) == pytest.approx(100.3021)
