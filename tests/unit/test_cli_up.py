"""`baton up` with the real processes, and the commands that talk to it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.cli import up as cli_up
from baton.cli import worker_check
from baton.cli.up import check_workers

pytestmark = pytest.mark.thorough

BATON = (sys.executable, "-m", "baton.cli.main")
ENDLESS = ("--max-tokens", "1800", "--temperature", "100", "--seed", "8")
"""So hot that all tokens are as likely, whatever the prompt; with this seed the end of sequence is not among
them. Calm machines need more than ten seconds."""


@dataclasses.dataclass
class Up:
    """A running `baton up`."""

    process: subprocess.Popen[str]
    output: Path
    logs: Path
    rows: dict[str, list[str]]
    """Process name -> pid, gRPC address, HTTP address."""

    @property
    def server(self) -> str:
        return self.rows["gateway"][1]

    @property
    def pids(self) -> list[int]:
        return [int(row[0]) for row in self.rows.values()]


def start(folder: Path, *arguments: str) -> Up:
    output, logs = folder / "stdout", folder / "logs"
    with output.open("w") as stdout:
        process = subprocess.Popen(
            [
                *BATON,
                "up",
                "--port",
                "0",
                "--http-port",
                "0",
                "--kv-tokens",
                "4096",
                "--log-dir",
                str(logs),
                *arguments,
            ],
            stdout=stdout,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "COLUMNS": "120"},
        )
    deadline = time.monotonic() + 240
    while "Ctrl-C stops everything" not in output.read_text():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)
    rows = {}
    for line in output.read_text().splitlines():
        words = line.split()
        if len(words) == 4 and words[1].isdigit():
            rows[words[0]] = words[1:]
    return Up(process, output, logs, rows)


def stop(up: Up, number: signal.Signals = signal.SIGTERM) -> int:
    if up.process.poll() is None:
        up.process.send_signal(number)
    try:
        return up.process.wait(timeout=90)
    finally:
        if up.process.poll() is None:
            up.process.kill()


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def baton(*arguments: str, stdin: str = "", timeout: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BATON, *arguments], input=stdin, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = start(tmp_path_factory.mktemp("up"))
    try:
        yield running
    finally:
        pids = running.pids
        assert stop(running) == 0, running.output.read_text()
        assert alive(pids) == []


def test_processes_are_separate_and_named(up: Up) -> None:
    assert list(up.rows) == ["tokenizer", "prefill-0", "decode-0", "gateway"]
    assert len(set(up.pids)) == 4 and alive(up.pids) == up.pids
    assert (up.logs / "decode-0.log").read_text()
    assert "curl http://" in up.output.read_text() and f"--server {up.server}" in up.output.read_text()


def test_status(up: Up) -> None:
    result = baton("status", "--server", up.server, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    reports = json.loads(result.stdout)
    assert sorted(report["role"] for report in reports) == ["decode", "gateway", "prefill", "tokenizer"]
    assert {report["health"] for report in reports} == {"SERVING"}
    assert {int(report["info"]["pid"]) for report in reports} == set(up.pids)
    table = baton("status", "--server", up.server)
    assert table.returncode == 0 and "decode" in table.stdout


def test_generate_is_repeatable_and_reads_stdin(up: Up) -> None:
    arguments = (
        "--server",
        up.server,
        "--max-tokens",
        "16",
        "--temperature",
        "0.8",
        "--seed",
        "7",
        "--stats",
    )
    first = baton("generate", "textwrap.dedent(text)", *arguments)
    again = baton("generate", "-", *arguments, stdin="textwrap.dedent(text)")
    assert first.returncode == 0 and first.stdout.strip() and first.stdout == again.stdout
    assert "TTFT" in first.stderr


def test_bad_value_is_one_line(up: Up) -> None:
    result = baton("generate", "x", "--server", up.server, "--temperature", "-1")
    assert result.returncode == 1 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and "temperature" in result.stderr


def test_interrupted_generate_frees_everything(up: Up) -> None:
    log = up.logs / "gateway.log"
    before = len(log.read_text())
    process = subprocess.Popen(
        [*BATON, "generate", "x", "--server", up.server, *ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Jobs that scripts run in the background ignore SIGINT, and so does what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr.strip()) == (130, "")
    deadline = time.monotonic() + 120
    while any(
        report["load"].get("requests")
        for report in json.loads(baton("status", "--server", up.server, "--json").stdout)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ended = re.findall(r" event=(cancelled|finished|failed) ", log.read_text()[before:])
    assert ended == ["cancelled"], "it ended by itself"


def test_chat_remembers_and_leaves(up: Up) -> None:
    lines = "Explain os.path.join.\nAnd textwrap.dedent?\n/new\nHello!\n/quit\n"
    result = baton(
        "chat", "--server", up.server, "--max-tokens", "8", "--temperature", "0", "--stats", stdin=lines
    )
    assert result.returncode == 0, result.stderr
    prompts = [
        int(line.split(" prompt tokens")[0].split()[-1])
        for line in result.stdout.splitlines()
        if "TTFT" in line
    ]
    assert len(prompts) == 3 and prompts[1] > prompts[0] > prompts[2]


def test_interrupt_stops_an_answer_and_the_chat_goes_on(up: Up) -> None:
    process = subprocess.Popen(
        [*BATON, "chat", "--server", up.server, *ENDLESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    output = process.stdout.fileno()

    def read_until(pattern: bytes, seen: bytes = b"") -> bytes:
        while not re.search(pattern, seen, re.DOTALL):
            piece = os.read(output, 4096)
            assert piece, seen
            seen += piece
        return seen

    said = b""
    for _ in range(2):
        read_until(rb"> \Z", said)
        process.stdin.write(b"Hello!\n")
        process.stdin.flush()
        said = read_until(b".{20}")
        process.send_signal(signal.SIGINT)
        said = read_until(b"not remembered", said)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr


def test_no_gateway_is_one_line() -> None:
    for command in (["status"], ["generate", "x"], ["chat"]):
        result = baton(*command, "--server", "127.0.0.1:1")
        assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
        assert "baton up" in result.stderr, command


def test_a_model_that_cannot_be_served_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "nobodys", "architectures": ["NobodysForCausalLM"]}'
    )
    result = baton("up", "--model", str(tmp_path), "--port", "0", "--http-port", "0")
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "model type `nobodys`" in result.stderr


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            "tp = 3",
            "model 'demo': 4 attention heads cannot be divided among 3 ranks; use --tp with a divisor",
        ),
        ("device = 'cuda:99'", "device 'cuda:99'"),
        ("context_length = 4096", "--context-length must be at most 2048, the model's own, not 4096"),
        ("[prefill]\nprefill_attention = 'torch-mla'", "'torch-mla' does not work on "),
    ],
)
def test_what_a_worker_refuses_is_refused_before_any_process_starts(
    tmp_path: Path, wrong: str, text: str
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(wrong)
    result = baton("up", "--config", str(file), "--port", "0", "--http-port", "0")
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and text in result.stderr


def test_the_demo_model_waits_for_no_check_that_can_only_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a prefill node count that is not started."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process is started"))
    check_workers({"prefill": {"tp": 1, "kv_tokens": 4096}, "decode": {"device": "cpu"}})
    check_workers({"prefill": {"tp": 3}, "decode": {}}, prefill=0)


def test_a_gpu_is_refused_at_once_where_there_is_no_driver(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process is started"))
    monkeypatch.setattr(cli_up, "DRIVER", (Path("/nowhere"),))
    with pytest.raises(SystemExit):
        check_workers({"prefill": {}, "decode": {"device": "cuda:1"}})
    assert (
        capfd.readouterr().err == "baton: device 'cuda:1': there is no NVIDIA driver here; use --device cpu\n"
    )


def test_a_check_that_is_killed_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit):
        check_workers({"prefill": {}, "decode": {"tp": 2}})
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("ended with code 1 and said nothing")


def test_a_check_that_hangs_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hangs))
    monkeypatch.setattr("baton.cli.up.CHECK_SECONDS", 0.2)
    with pytest.raises(SystemExit):
        check_workers({"prefill": {}, "decode": {"tp": 2}})
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("has not ended after 0.2 s")


def test_a_port_in_use_is_said_before_the_model_is_looked_at(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = baton("up", "--model", str(tmp_path / "none"), "--port", "0", "--http-port", port)
    assert result.returncode == 2 and "choose another with --http-port" in result.stderr


def test_a_head_in_fp8_is_left_to_the_worker_who_knows_its_device() -> None:
    head = {"quantize_head": True}
    worker_check.main(json.dumps([("demo", {**head, "quantization": "fp8"}, False)]))
    with pytest.raises(SystemExit, match="model 'demo': --quantize-head needs --quantization"):
        worker_check.main(json.dumps([("demo", head, False)]))
