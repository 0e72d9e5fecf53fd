"""Roles follow the load (--auto-roles), and clients see nothing of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import urllib.request

import pytest
from asking import greedy
from deployment import Deployment
from forking import forks
from process import ENVIRONMENT

from baton.client import AsyncClient

pytestmark = pytest.mark.timeout(400)
FOLLOW_SECONDS = 120.0
PROMPTS = [greedy([*range(20 + n, 620 + n)] * 2, 4) for n in range(3)]
"""Long ones, whose answers are short."""
ANSWERS = [greedy([*range(20 + n, 40 + n)], 300) for n in range(3)]
FLAGS = ("--auto-roles", "--role-seconds", "2", "--role-pause-seconds", "3")


def read_metrics(gateway):
    with urllib.request.urlopen(f"http://{gateway.info().http_address}/metrics") as answer:
        return answer.read().decode()


async def load_until(client, requests, concurrency, reached):
    """Sends the requests again and again, each in a namespace of its own so that nothing is cached, until
    `reached`; every answer must be what it is on a calm deployment. Returns how many there were."""
    calm = [(await client.generate(**request)).text for request in requests]
    numbers, stop, done = itertools.count(), asyncio.Event(), 0

    async def follow():
        nonlocal done
        while not stop.is_set():
            number = next(numbers)
            which = number % len(requests)
            answer = await client.generate(**requests[which], namespace=f"{id(stop)}-{number}")
            assert answer.text == calm[which]
            done += 1

    async with asyncio.timeout(FOLLOW_SECONDS), asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(follow())
        while not await asyncio.to_thread(reached):  # noqa: ASYNC110 (nothing signals)
            await asyncio.sleep(0.2)
        stop.set()
    return done


async def test_roles_follow_the_load(tmp_path, deployments):
    worker = ("--max-rows", "16", "--kv-tokens", "32768")
    with Deployment.split(tmp_path, "demo", decode=2, worker=worker, gateway_flags=FLAGS) as deployment:
        deployments.append(deployment)
        workers, gateway = [*deployment.of("prefill"), *deployment.of("decode")], deployment.gateway

        def prefill_nodes():
            return sum(each.info().role == "prefill" for each in workers)

        async with AsyncClient(gateway.address) as client:
            done = await load_until(client, PROMPTS, 32, lambda: prefill_nodes() == 2)
            print(f"{done} prompts until there were two prefill nodes")
            change = gateway.info().role_change
            assert change.to == "prefill" and re.match(r"prompts wait [1-9][\d.]* s and", change.why)
            done = await load_until(client, ANSWERS, 64, lambda: prefill_nodes() == 1)
            print(f"{done} answers until there were two decode nodes")
        change = gateway.info().role_change
        assert change.to == "decode" and re.search(r"for a row [1-9][\d.]* s, for 2 s", change.why)
        status = forks(**ENVIRONMENT).run(
            ("status", "--server", gateway.address), environment=dict(os.environ)
        )
        said = f"{change.address} was made a decode node \\d+ s ago \\(--auto-roles\\): prompts wait "
        assert re.search(said, status.stdout), status.stdout
        metrics = await asyncio.to_thread(read_metrics, gateway)
        counts = dict(
            re.findall(r'role_changes_total\{.*outcome="changed".*to="(\w+)".*\} ([\d.]+)', metrics)
        )
        assert all(float(counts[role]) >= 1 for role in ("prefill", "decode")), counts
        log = gateway.log.read_text()
        assert log.count("role changed") >= 2 and "role not changed" not in log
