"""`baton up` among other users of the machine: they call none of its internal ports, and its files are closed
to them. Its user's own commands go on working. And what its logs say of prompts."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from fuzzing.h2 import PREFACE, SETTINGS, frame, rapid_resets
from polling import rows_of_up
from process import ENVIRONMENT, SHM

from baton.client import BatonError, Client
from baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

BATON = (sys.executable, "-m", "baton.cli.main")
CANARY = "zyzzyva-quokka"


RESET_SECONDS = 1.0
RESETS = 5_000
"""At least so many, and for so long."""
RESET_BYTES = 64 * 2**20
"""What a process may take because of calls that strangers open and reset."""


@dataclass
class Up:
    process: subprocess.Popen[bytes]
    rows: dict[str, list[str]]
    """Process name -> pid, gRPC address, HTTP address."""
    logs: Path
    runtime: Path
    environment: dict[str, str]

    def address(self, name: str) -> str:
        return self.rows[name][1]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("strangers")
    runtime = folder / "runtime"
    runtime.mkdir(0o700)
    printed = folder / "printed"
    flags = ["--port", "0", "--http-port", "0", "--kv-tokens", "4096", "--threads", "1"]
    flags += ["--log-format", "json", "--split", "always", "--log-level", "debug"]
    flags += ["--log-dir", str(folder / "logs")]
    environment = {**os.environ, **ENVIRONMENT, "COLUMNS": "200", "XDG_RUNTIME_DIR": str(runtime)}
    with printed.open("wb") as output:
        process = subprocess.Popen([*BATON, "up", *flags], stdout=output, stderr=output, env=environment)
    try:
        rows = rows_of_up(printed, lambda: process.poll() is not None)
        yield Up(process, rows, folder / "logs", runtime, environment)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0, printed.read_text()
        assert list((runtime / "baton").iterdir()) == []  # the secret goes with its deployment
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def reset_rapidly(address: str, seconds: float) -> int:
    """Opens and resets calls, reads nothing; returns how many. A connection that is closed is opened anew."""
    host, _, port = address.rpartition(":")
    until, sent = time.monotonic() + seconds, 0
    while sent <= RESETS or time.monotonic() < until:
        with socket.create_connection((host, int(port)), timeout=5) as connection, suppress(OSError):
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            stream = 1
            while sent <= RESETS or time.monotonic() < until:
                connection.sendall(rapid_resets(stream, 1000))
                stream += 2000
                sent += 1000
    return sent


def test_calls_that_strangers_reset_cost_no_memory_on_any_port(up):
    grown = {}
    for name, (pid, address, _) in up.rows.items():
        process = psutil.Process(int(pid))
        before = process.memory_info().rss
        sent = reset_rapidly(address, RESET_SECONDS)
        grown[name] = process.memory_info().rss - before
        print(f"{name}: {sent} calls, {grown[name] / 2**20:.0f} MiB")
    assert max(grown.values()) < RESET_BYTES, grown


def refused(call) -> None:
    with pytest.raises(grpc.RpcError) as error:
        call()
    # A client that is still sending when its stream ends may not hear why.
    assert error.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL)


def test_strangers_call_nothing(up: Up) -> None:
    hello = prefill_pb2.PrefillRequest(hello=prefill_pb2.PrefillHello(incarnation=1))
    release = prefill_pb2.PrefillRequest(release=prefill_pb2.LeaseRelease())
    greeting = decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=1))
    fetch = prefill_pb2.FetchRequest(id=1, page_ids=[0])
    text = tokenizer_pb2.EncodeRequest(inputs=[tokenizer_pb2.EncodeInput(text="x")])
    for name in up.rows:
        with grpc.insecure_channel(up.address(name)) as channel:
            node = node_pb2_grpc.NodeStub(channel)
            refused(lambda node=node: node.GetInfo(node_pb2.GetInfoRequest(), timeout=60))  # memory handles
            refused(lambda node=node: node.Drain(node_pb2.DrainRequest(), timeout=60))
            refused(lambda node=node: node.SetRole(node_pb2.SetRoleRequest(role="decode"), timeout=60))
    with grpc.insecure_channel(up.address("prefill-0")) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        refused(lambda: next(stub.Run(iter([hello, release]), timeout=60)))
        pages = prefill_pb2_grpc.PageSourceStub(channel)
        refused(lambda: next(pages.Fetch(iter([fetch]), timeout=60)))
    with grpc.insecure_channel(up.address("decode-0")) as channel:
        decode = decode_pb2_grpc.DecodeStub(channel)
        refused(lambda: next(decode.Generate(iter([greeting]), timeout=60)))
    with grpc.insecure_channel(up.address("tokenizer")) as channel:
        tokenizer = tokenizer_pb2_grpc.TokenizerStub(channel)
        refused(lambda: tokenizer.Encode(text, timeout=60))


def test_the_users_own_commands_work(up: Up) -> None:
    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [*BATON, *words, "--server", up.address("gateway")]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=280, env={**up.environment, **environment}
        )

    status = run("status")
    assert status.returncode == 0 and status.stdout.count("serving") == 4, status.stdout + status.stderr
    answer = run("generate", "textwrap.dedent(text) " * 20, "--max-tokens", "4", "--stats")
    assert answer.returncode == 0 and " shm" in answer.stderr, (
        answer.stderr
    )  # the hand-off went over shared memory
    elsewhere = run(
        "status", XDG_RUNTIME_DIR=str(up.runtime / "other")
    )  # as of another user: without the secret
    assert elsewhere.returncode == 1 and "cluster secret" in elsewhere.stderr


def test_others_can_read_none_of_its_files(up: Up) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    secrets = list((up.runtime / "baton").iterdir())
    assert len(secrets) == 1 and mode(secrets[0]) == 0o600
    assert mode(up.runtime / "baton") == 0o700
    secret = secrets[0].read_text()
    segments = set()
    for name, row in up.rows.items():
        started = Path(f"/proc/{row[0]}")
        assert secret not in (started / "cmdline").read_text(), name
        assert secret not in (started / "environ").read_text(), name
        segments |= set(re.findall(rf"{SHM}/baton-\S+", (started / "maps").read_text()))
    assert len(segments) == 2 and {mode(Path(path)) for path in segments} == {0o600}
    for log in up.logs.iterdir():
        assert secret not in log.read_text(), log


def test_no_log_has_a_prompt(up: Up) -> None:
    with Client(up.address("gateway")) as client:
        words = f"{CANARY} " * 30
        client.generate(words, max_tokens=2)
        client.generate(messages=words, max_tokens=2)
        with client.stream(words, max_tokens=500, ignore_eos=True) as stream:
            next(iter(stream))  # and leaves
        wrong = [
            {"prompt": words, "max_tokens": 10**6},
            {"prompt": CANARY * 100_000},
            {"prompt": words, "timeout": 0.001},
            {"messages": [{"role": CANARY, "content": CANARY}]},
            {"prompt": "x", "stop": [CANARY] * 99},
            {"prompt": "x", "model": CANARY},
        ]
        for question in wrong:
            with pytest.raises(BatonError):
                client.generate(**question)
    bodies = [f'{{"prompt": "{CANARY}"', f'{{"{CANARY}": 1}}', f'{{"prompt": {{"{CANARY}": ["{CANARY}"]}}}}']
    for body in bodies:
        request = urllib.request.Request(
            f"http://{up.rows['gateway'][2]}/v1/completions?{CANARY}",
            body.encode(),
            {"Content-Type": "application/json", "X-Canary": CANARY},
        )
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=60)
    logs = {log.name: log.read_text() for log in up.logs.iterdir()}
    assert len(logs) == 4 and all(logs.values())
    assert [name for name, text in logs.items() if CANARY in text or CANARY[:7] in text] == []
