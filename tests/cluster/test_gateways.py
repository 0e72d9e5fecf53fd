"""Several gateways on one port: `baton up --gateways 2`."""

from __future__ import annotations

import os
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from forking import Forked, forks
from polling import wait
from process import ENVIRONMENT
from test_up import family

from baton.client import BatonError, Client
from baton.rpc.channel import client_options
from baton.v1 import inference_pb2, inference_pb2_grpc


@pytest.fixture
def up(qwen3, tmp_path) -> Iterator[tuple[Forked, Path]]:
    """The process, and what it prints."""
    printed = tmp_path / "up.log"
    command = ["up", "--gateways", "2", "--prefill", "0", "--port", "0", "--http-port", "0"]
    flags = ["--model", str(qwen3[0]), "--threads", "1", "--kv-tokens", "4096", "--drain-seconds", "1"]
    environment = {**os.environ, **ENVIRONMENT, "COLUMNS": "200"}
    with printed.open("wb") as output:
        process = forks(**ENVIRONMENT).start_command(
            [*command, *flags], stdout=output, stderr=output, environment=environment
        )
    try:
        wait(lambda: "Ctrl-C stops" in printed.read_text() or process.poll() is not None, "up")
        assert process.poll() is None, printed.read_text()
        yield process, printed
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def served_by(address: str) -> set[str]:
    """The gateways (by the names that they give to requests) that 24 connections lead to."""
    found = set()
    for _ in range(24):
        with grpc.insecure_channel(address, options=client_options()) as channel:
            start = inference_pb2.GenerateStart(id="r")
            start.tokens.token_ids.extend([5, 6])
            start.sampling.max_tokens = 1
            events = inference_pb2_grpc.InferenceStub(channel).Generate(
                iter([inference_pb2.GenerateRequest(start=start)]), timeout=60
            )
            names = [event.accepted.request_id for event in events if event.HasField("accepted")]
            found |= {name.partition("-")[0] for name in names}
    return found


def answers(address: str) -> bool:
    try:
        with Client(address) as client:
            return bool(client.generate(token_ids=[5, 6], max_tokens=2).token_ids)
    except BatonError as error:
        assert error.code is grpc.StatusCode.UNAVAILABLE, error
        return False


def test_connections_go_to_any_of_them(up):
    process, printed = up
    said = printed.read_text()
    address = re.search(r"baton status --server (\S+)", said)[1]
    http = re.search(r"curl (http://[^/]+)", said)[1]
    own = dict(re.findall(r"^(gateway-\d) +\d+ +(\S+)", said, re.MULTILINE))
    pids = {name: int(pid) for name, pid in re.findall(r"^(\S+) +(\d+) +127", said, re.MULTILINE)}
    assert len(own) == 2 and address not in own.values()

    assert len(served_by(address)) == 2
    for _ in range(4):
        with urllib.request.urlopen(f"{http}/v1/models", timeout=60) as answer:
            assert answer.status == 200

    wide = {**os.environ, "COLUMNS": "200"}
    status = forks(**ENVIRONMENT).run(["status", "--server", address], environment=wide)
    assert status.returncode == 0, status.stdout
    assert len(re.findall(r"^gateway ", status.stdout, re.MULTILINE)) == 2, status.stdout

    # One that dies takes its own streams along; the other serves, and it comes back to the same port.
    os.kill(pids["gateway-0"], signal.SIGKILL)
    wait(lambda: answers(address), "an answer of the one that is left")
    wait(lambda: "gateway-0 is healthy again" in printed.read_text(), "gateway-0 restarted")
    wait(lambda: len(served_by(address)) == 2, "connections to both again")

    seen = family(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 0, printed.read_text()
    left = [psutil.Process(pid) for pid in seen if psutil.pid_exists(pid)]
    assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.bind((host, int(port)))  # nobody holds it any more


def test_a_port_that_somebody_else_has_is_not_shared(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = ["up", "--gateways", "2", "--port", str(taken.getsockname()[1])]
        done = forks(**ENVIRONMENT).run(command, environment=os.environ)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "choose another with --port" in done.stderr
