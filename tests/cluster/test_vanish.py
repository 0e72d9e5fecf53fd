"""Five hundred clients vanish at once: everything is freed, and the next request waits for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median

import psutil
import pytest
from deployment import Deployment, held_by
from process import Process

from baton.client import Client

pytestmark = [pytest.mark.alone, pytest.mark.times]

CLIENTS = 500
CONNECTIONS = 20
FREED_SECONDS = 0.3
"""From the moment that the clients are gone."""
GATEWAY_CPU_SECONDS = 0.3
"""However busy the machine is, it may be this much work for the gateway, our own questions included."""
SLACK_SECONDS = 0.05
"""What a busy machine may add to a TTFT of some milliseconds."""
TIMES = int(os.environ.get("BATON_VANISH_TIMES", "0"))
"""So many are measured, where it is given."""
TRIES = TIMES or 8
"""The machine may be busy with something else in one of them: the best counts, and the first that is fine
ends it."""
CLIENT = f"""
import asyncio, sys
from baton.client import AsyncClient

async def main():
    clients = [AsyncClient(sys.argv[1]) for _ in range({CONNECTIONS})]
    asking = [
        clients[i % len(clients)].generate(
            token_ids=[i % 300 + 3] * (8 if i % 2 else 800), max_tokens=900 if i % 2 else 200,
            ignore_eos=True, temperature=0, namespace=f"{{sys.argv[2]}} {{i}}",
        )
        for i in range({CLIENTS})
    ]
    await asyncio.gather(*asking)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def cluster(qwen3, tmp_path_factory, deployments) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("vanish")
    flags = {"worker": ("--max-rows", "48"), "prefill_flags": ("--token-budget", "48")}
    with Deployment.split(folder, qwen3[0], **flags) as deployment:
        deployments.append(deployment)
        yield deployment


def ttft(client: Client, name: str) -> float:
    return client.generate(token_ids=[5] * 20, max_tokens=2, ignore_eos=True, namespace=name).stats.ttft


def wait(condition, what: str, seconds: float) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)  # asking is work for those who are asked
    return time.monotonic() - started


def test_five_hundred_clients_vanish(cluster: Deployment):
    """A process with 500 streams on 20 connections is killed; prompts of half of them are handed off.
    Measured from its end until no process says that it holds anything."""
    client = cluster.client()
    gateway, prefill, decode = cluster.gateway, cluster.prefill, cluster.decode
    idle = median(ttft(client, f"idle {i}") for i in range(12))
    nodes = (gateway, decode, prefill)
    freed, used, afterwards = [], [], []
    for attempt in range(TRIES):
        begun = began(gateway.load())
        vanishing = subprocess.Popen([sys.executable, "-c", CLIENT, gateway.address, str(attempt)])
        try:
            # Where sending takes long, the first have ended before the last come.
            wait(lambda begun=begun: began(gateway.load()) - begun == CLIENTS, "all at the gateway", 150)
            wait(lambda: under_way(decode.load(), prefill.load()), "in all states", 150)
        finally:
            print(f"before they vanish: {gateway.load()}")
            before = cpu_seconds(gateway)
            vanishing.kill()
            vanishing.wait()
        freed.append(wait(lambda: not any(held_by(node.load()) for node in nodes), "freed", 20))
        used.append(cpu_seconds(gateway) - before)
        afterwards.append(ttft(client, f"after {attempt}"))
        if not TIMES and fine(freed, used, afterwards, idle):
            break
    said = f"freed after {freed}, gateway's CPU time {used}, TTFT {afterwards}, idle {idle}"
    print(said)
    assert fine(freed, used, afterwards, idle), said


def fine(freed: list[float], used: list[float], afterwards: list[float], idle: float) -> bool:
    in_time = min(freed) < FREED_SECONDS and min(used) < GATEWAY_CPU_SECONDS
    return in_time and min(afterwards) < 2 * idle + SLACK_SECONDS


def cpu_seconds(node: Process) -> float:
    times = psutil.Process(node.pid).cpu_times()
    return times.user + times.system


def began(load) -> int:
    """Requests that have reached the gateway so far."""
    return load.requests + load.finished + load.failed + load.cancelled


def under_way(decode, prefill) -> bool:
    """Some in each state: waiting, decoding, computed at the prefill node."""
    return decode.running > 0 and decode.waiting + decode.handing_off > 100 and prefill.requests > 0
