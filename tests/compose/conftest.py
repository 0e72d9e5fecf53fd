"""One deployment from docker-compose.yaml for all tests here, asked from outside."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from engine import FIRST_TOKEN_SECONDS, IMAGE, Compose, build_image, compose_command, need_engine

from baton.client import Client
from baton.rpc.errors import BatonError
from ports import free_port

TIMES = pytest.StashKey[dict[str, float]]()


class Deployed:
    """`grpc` and `http` are host:port of the gateway on this machine."""

    def __init__(self, compose: Compose, grpc_port: int, http_port: int) -> None:
        self.compose = compose
        self.grpc = f"127.0.0.1:{grpc_port}"
        self.http = f"127.0.0.1:{http_port}"


@pytest.fixture(scope="session")
def times(request) -> dict[str, float]:
    return request.config.stash.setdefault(TIMES, {})


@pytest.fixture(scope="session")
def deployed(times) -> Iterator[Deployed]:
    need_engine()
    compose_command()
    times["image built"] = build_image()
    ports = free_port(), free_port()
    compose = Compose(
        f"baton-test-{os.getpid()}",
        BATON_IMAGE=IMAGE,
        BATON_GRPC_PORT=str(ports[0]),
        BATON_HTTP_PORT=str(ports[1]),
        BATON_DRAIN_SECONDS="5",
    )
    started = time.monotonic()
    try:
        compose("up", "-d", "--no-build")
        deployed = Deployed(compose, *ports)
        wait_for_token(deployed, started + 6 * FIRST_TOKEN_SECONDS)
        times["up to first token"] = time.monotonic() - started
        yield deployed
    finally:
        compose("down", "-v", "--timeout", "10")


def wait_for_token(deployed: Deployed, deadline: float) -> None:
    while True:
        try:
            with Client(deployed.grpc) as client, client.stream("def main():", max_tokens=4) as stream:
                next(iter(stream))
                return
        except BatonError as error:
            logs = error.message if time.monotonic() < deadline else deployed.compose("logs", "--tail", "20")
            assert time.monotonic() < deadline, logs
            time.sleep(0.2)


def pytest_terminal_summary(terminalreporter, config) -> None:
    for what, seconds in config.stash.get(TIMES, {}).items():
        terminalreporter.write_line(f"compose: {what}: {seconds:.1f} s")
