"""Processes that stop, wedge and come back: who says so, within what time, and who goes on serving."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import grpc
import httpx
import pytest
from asking import greedy
from deployment import Deployment
from grpc_health.v1 import health_pb2, health_pb2_grpc
from polling import until
from process import Process

from baton.client import AsyncClient

PROMPT = [*range(5, 105)]
LIMIT_SECONDS = 60.0
"""A connection notices within 15 s that its peer has been stopped: 10 s between pings, 5 s for the answer."""
KILLED_SECONDS = 12.0
"""That a peer has been killed is noticed by more than pings."""
PROBE_SECONDS = 1.0


@pytest.fixture(scope="module")
def watched(tmp_path_factory, deployments) -> Iterator[Deployment]:
    flags = ("--probe-every", str(PROBE_SECONDS))
    deployment = Deployment.split(tmp_path_factory.mktemp("health"), "demo", decode=2, gateway_flags=flags)
    with deployment:
        deployments.append(deployment)
        yield deployment


def serving(process: Process) -> bool:
    with grpc.insecure_channel(process.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "baton.cli.main", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)


def reasons(process: Process) -> dict[str, bool]:
    return {problem.reason: problem.stops_serving for problem in process.load().problems}


def test_a_probe_goes_through_the_hand_off(watched):
    done = command("probe", "--server", watched.gateway.address)
    assert done.returncode == 0, done.stderr
    assert watched.prefill.address in done.stdout and "pages by" in done.stdout
    status = command("status", "--server", watched.gateway.address)
    assert status.returncode == 0, status.stdout + status.stderr


def test_a_probe_of_nothing_fails():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        done = command("probe", "--server", f"127.0.0.1:{probe.getsockname()[1]}", "--timeout", "1")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1


async def test_the_gateway_probes_every_pair(watched):
    async with httpx.AsyncClient(base_url=f"http://{watched.gateway.http}", timeout=60) as http:

        async def ok() -> float:
            text = (await http.get("/metrics")).text
            lines = [each for each in text.splitlines() if each.startswith("baton_probes_total")]
            line = next(each for each in lines if 'outcome="ok"' in each)
            return float(line.split()[-1])

        async with asyncio.timeout(60):
            while await ok() < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    assert all(decode.load().pulled_pages > 0 for decode in watched.of("decode"))


async def test_a_stopped_decode_node_is_named_and_comes_back(watched):
    stopped, other = watched.of("decode")
    stopped.signal(signal.SIGSTOP)
    try:
        await until(lambda: "DECODE_LOST" in reasons(watched.gateway), "the gateway notices", LIMIT_SECONDS)
        assert not reasons(watched.gateway)["DECODE_LOST"]
        assert serving(watched.gateway), "another one is left"
        status = command("status", "--json", "--server", watched.gateway.address)
        found = {report["address"]: report for report in json.loads(status.stdout)}
        assert status.returncode == 1
        assert found[stopped.address]["health"] == "UNREACHABLE" and not found[other.address]["wrong"]
        async with AsyncClient(watched.gateway.address) as client:
            answer = await client.generate(**greedy(PROMPT, 4, timeout=60))
            assert answer.stats and answer.stats.decode_address == other.address
    finally:
        stopped.signal(signal.SIGCONT)
    await until(lambda: not reasons(watched.gateway), "all is well again", LIMIT_SECONDS)


async def test_without_any_decode_node_the_gateway_is_not_ready(watched):
    for process in watched.of("decode"):
        process.kill()
    try:
        await until(
            lambda: reasons(watched.gateway).get("NO_DECODE_NODE"), "the gateway notices", KILLED_SECONDS
        )
        await until(lambda: not serving(watched.gateway), "health follows", KILLED_SECONDS)
        answer = await asyncio.to_thread(httpx.get, f"http://{watched.gateway.http}/health")
        assert answer.status_code == 503 and "decode nodes that cannot be used" in answer.text
        assert command("probe", "--server", watched.gateway.address).returncode == 1
    finally:
        watched.start_all(watched.of("decode"))
    await until(lambda: serving(watched.gateway), "ready again")
    await until(lambda: not reasons(watched.gateway), "all is well again")
