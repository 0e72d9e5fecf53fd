"""Three times as many requests as can be served: those that are taken end in time, the others know soon."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from deployment import Deployment
from polling import until

from baton.client import AsyncClient
from baton.rpc.errors import BatonError

ROWS = 4
PROMPT = list(range(5, 75))
OUTPUT = 80
OVERLOAD = 3.0
SECONDS = 5.0
"""For which requests come in."""
PATIENCE = 3.0
"""A request's deadline, in times of its duration when all rows are taken."""


@pytest.fixture(scope="module")
def busy(tmp_path_factory, deployments) -> Iterator[Deployment]:
    flags = ("--max-rows", str(ROWS))
    deployment = Deployment.split(tmp_path_factory.mktemp("busy"), "demo", decode_flags=flags)
    # HTTP knows no deadline of a request's own: this gateway gives all the same.
    deployment.add_gateway([deployment.decode], [deployment.prefill], "--request-seconds", "0.3")
    with deployment:
        deployments.append(deployment)
        yield deployment


@dataclass
class Outcome:
    reason: str
    seconds: float
    retry_ms: int | None = None


async def ask(client: AsyncClient, number: int, timeout: float) -> Outcome:
    """One request whose prompt nobody has cached."""
    started = time.monotonic()
    prompt = [5 + number % 1000, *PROMPT]
    request = {"token_ids": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "timeout": timeout}
    try:
        await client.generate(**request)
    except BatonError as error:
        return Outcome(error.reason, time.monotonic() - started, error.retry_after_ms)
    return Outcome("finished", time.monotonic() - started)


async def capacity(client: AsyncClient) -> tuple[float, float]:
    """Requests a second with all rows taken and none waiting, and the seconds that one takes then."""
    started = time.monotonic()

    async def one_row(row: int) -> list[Outcome]:
        return [await ask(client, 10 * row + turn, 60.0) for turn in range(3)]

    rows = await asyncio.gather(*(one_row(row) for row in range(ROWS)))
    outcomes = [outcome for row in rows for outcome in row]
    assert all(outcome.reason == "finished" for outcome in outcomes)
    rate = len(outcomes) / (time.monotonic() - started)
    return rate, statistics.median(outcome.seconds for outcome in outcomes)


@pytest.mark.alone
@pytest.mark.times
async def test_requests_that_are_taken_end_in_time(busy):
    async with AsyncClient(busy.gateway.address) as client:
        rate, duration = await capacity(client)
        timeout, tasks, started = PATIENCE * duration, [], time.monotonic()
        for number in range(int(OVERLOAD * rate * SECONDS)):
            await asyncio.sleep(started + number / (OVERLOAD * rate) - time.monotonic())
            tasks.append(asyncio.create_task(ask(client, 100 + number, timeout)))
        outcomes = await asyncio.gather(*tasks)
        seconds = time.monotonic() - started
    ends = Counter(outcome.reason for outcome in outcomes)
    goodput = ends["finished"] / seconds
    refused = [outcome for outcome in outcomes if outcome.reason == "WOULD_MISS_DEADLINE"]
    told = statistics.median(outcome.seconds for outcome in refused)
    print(f"{rate:.1f} requests/s of {duration:.2f} s; deadline {timeout:.2f} s; {dict(ends)}")
    print(f"goodput {goodput:.1f} requests/s; refused after {told:.3f} s")
    assert set(ends) <= {"finished", "WOULD_MISS_DEADLINE", "DEADLINE_EXCEEDED"}
    assert ends["DEADLINE_EXCEEDED"] <= 0.1 * ends["finished"]
    assert goodput >= 0.6 * rate
    assert told < 0.25 * timeout
    assert all(outcome.retry_ms and outcome.retry_ms < 1000 * timeout * 2 for outcome in refused)
    assert busy.decode.load().refused >= len(refused)


async def test_http_says_429_and_when_to_ask_again(busy):
    async with AsyncClient(busy.gateway.address) as client:
        others = [asyncio.create_task(ask(client, 500 + number, 240.0)) for number in range(6 * ROWS)]
        await until(lambda: busy.decode.load().requests > 4 * ROWS, "a queue")
        body = {"model": "demo", "prompt": "one too many", "max_tokens": OUTPUT, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=f"http://{busy.of('gateway')[1].http}") as http:
            answer = await http.post("/v1/completions", json=body, timeout=120)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "would_miss_deadline"


async def test_a_full_queue_names_the_wait(tmp_path, deployments):
    flags = ("--max-rows", "1", "--max-waiting", "1")
    with Deployment.split(tmp_path, "demo", prefill=0, decode_flags=flags) as deployment:
        deployments.append(deployment)
        request = {"token_ids": PROMPT, "max_tokens": OUTPUT, "ignore_eos": True, "timeout": 240.0}
        # One runs already: of those that come to an idle node at once only one may wait for its next step.
        long = {**request, "max_tokens": 10 * OUTPUT}
        async with AsyncClient(deployment.gateway.address) as client, client.stream(**long) as running:
            await anext(running)
            outcomes = await asyncio.gather(*(ask(client, number, 240.0) for number in range(5)))
            completion = await running.completion()
        full = [outcome for outcome in outcomes if outcome.reason == "QUEUE_FULL"]
        assert full and all(outcome.retry_ms and outcome.retry_ms >= 1000 for outcome in full)
        assert Counter(outcome.reason for outcome in outcomes)["finished"] >= 1
        assert completion.finish_reason == "length"
        deployment.assert_idle()
