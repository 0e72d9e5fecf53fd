"""`baton up`, the real command with the real supervisor: restarts what dies, leaves nothing behind.

Commands and their processes are forked here, executed in unit/test_cli_up.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from forking import Forked, forks
from hosts.host import NAMES, run
from polling import wait
from process import ENVIRONMENT, SHM
from reference import Answer

from baton.client import BatonError, Client
from ports import free_port

OUTPUT = 48


@pytest.fixture
def up(qwen3, tmp_path) -> Iterator[tuple[Forked, Path, int]]:
    """The process, what it prints, and the gateway's port."""
    port = free_port()
    printed = tmp_path / "up.log"
    command = ["up", "--model", str(qwen3[0]), "--port", str(port)]
    flags = ["--http-port", "0", "--threads", "1", "--kv-tokens", "8192", "--log-dir", str(tmp_path / "logs")]
    environment = {**os.environ, **ENVIRONMENT, "COLUMNS": "200"}
    with printed.open("wb") as output:
        process = forks(**ENVIRONMENT).start_command(
            [*command, *flags], stdout=output, stderr=output, environment=environment
        )
    try:
        yield process, printed, port
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


@pytest.mark.main_path
def test_a_killed_worker_is_restarted_and_nothing_is_left(up, qwen3):
    process, printed, port = up
    wait(lambda: "Ctrl-C stops" in printed.read_text() or process.poll() is not None, "up")
    assert process.poll() is None, printed.read_text()
    rows = re.findall(r"^(\S+) +(\d+) +(127\S+)", printed.read_text(), re.MULTILINE)
    table = {name: int(pid) for name, pid, _ in rows}
    addresses = {name: address for name, _, address in rows}
    assert len(table) == 4
    answer = qwen3[1].answers([200], OUTPUT)[0]
    seen, segments = set(), set()
    with Client(f"127.0.0.1:{port}") as client:
        wait(lambda: right(client, answer), "an answer")
        for name in [name for name in table if name.startswith(("prefill", "decode"))]:
            seen |= family(process)
            segments |= {path for pid in family(process) for path in mapped(pid)}
            os.kill(table[name], signal.SIGKILL)
            again = f"{name} is healthy again"
            wait(lambda again=again: again in printed.read_text(), f"{name} restarted")
            said = printed.read_text()
            assert f"{name} (pid {table[name]}) was killed by SIGKILL" in said
            assert addresses[name] in said.split(again)[1], "it has come back in its place"
        wait(lambda: right(client, answer), "an answer after the restarts")
        seen |= family(process)
        segments |= {path for pid in family(process) for path in mapped(pid)}
    assert set(table.values()) < seen and len(seen) >= 6 and len(segments) == 4
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == 0, printed.read_text()
    assert not [pid for pid in seen if alive(pid)]
    assert not [path for path in segments if path.exists()]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_it_outlives_the_reader_of_its_output_and_its_processes_do_not_outlive_it(tmp_path):
    """With a closed pipe as its output it still starts again what dies. Killed, it leaves nothing behind."""
    flags = ("--prefill", "0", "--port", "0", "--http-port", "0", "--kv-tokens", "4096")
    environment = {**os.environ, **ENVIRONMENT, "COLUMNS": "120"}
    reading, writing = os.pipe()
    with (
        os.fdopen(reading) as reader,
        os.fdopen(writing, "wb") as output,
        (tmp_path / "log").open("wb") as log,
    ):
        process = forks(**ENVIRONMENT).start_command(
            ["up", *flags, "--log-dir", str(tmp_path)], stdout=output, stderr=log, environment=environment
        )
        output.close()
        lines: list[list[str]] = []
        for line in reader:
            lines.append(line.split())
            if "Ctrl-C stops everything" in line:
                break
    try:
        rows = {words[0]: words[1:] for words in lines if len(words) == 4 and words[1].isdigit()}
        assert list(rows) == ["tokenizer", "decode-0", "gateway"], (tmp_path / "log").read_text()
        pid = int(rows["decode-0"][0])
        os.kill(pid, signal.SIGKILL)

        def started_again() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            return (tmp_path / "decode-0.log").read_text().count(" event=ready ") == 2

        wait(started_again, "a decode node in its place")
        status = ("status", "--server", rows["gateway"][1], "--json")
        wait(lambda: baton(*status).returncode == 0, "a gateway that reaches all")
        serving = {int(report["info"]["pid"]) for report in json.loads(baton(*status).stdout)}
        pids = family(process)
        assert len(serving) == 3 and serving <= pids and pid not in serving
    finally:
        process.kill()
        process.wait()
    wait(lambda: not any(alive(pid) for pid in pids), "the end of all its processes")


def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Forked, with forked processes."""
    return forks(**ENVIRONMENT).run(arguments, environment=os.environ)


def test_verify_split_against_aggregated():
    result = baton("verify", "--prompts", "2", "--max-tokens", "4", "--kv-tokens", "4096")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Equal, token for token." in result.stdout
    assert int(result.stdout.split("Split: ")[1].split()[0]) > 0, "pulled pages"


def test_demo():
    result = baton("demo")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {line.split("  ")[0]: line.split() for line in result.stdout.splitlines() if " ms " in line}
    assert set(rows) == {"long prompt", "shared prefix", "chat"}
    assert rows["long prompt"][-1] in ("shm", "grpc")
    assert int(rows["shared prefix"][7]) > 500  # prompt tokens found cached


def test_the_log_that_a_failed_start_names_can_be_read():
    result = baton("up", "--prefill", "0", "--memory-fraction", "0", "--port", "0", "--http-port", "0")
    assert result.returncode == 1
    found = re.search(r"decode-0 exited with code 2 .*; its log \((.+)\) ends:", result.stderr)
    assert found is not None, result.stderr
    assert "--memory-fraction" in Path(found[1]).read_text()


@pytest.mark.parametrize("command", ["up", "verify", "bench serve", "bench offline", "bench step"])
def test_a_wrong_model_is_one_line_before_anything_starts(command: str):
    done = baton(*command.split(), "--model", "./no-such-model")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "baton: model './no-such-model': no such directory or file; give a directory, a GGUF file or a "
        "Hugging Face id"
    ]


def test_where_only_ipv6_is(tmp_path):
    """In a network whose only address is ::1, with default addresses everywhere."""
    network = f"{NAMES}-{os.getpid()}-ipv6"
    try:
        run("ip", "netns", "add", network)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    # Other deployments of this user have the default ports, in another network.
    environment = {**os.environ, "COLUMNS": "200", "XDG_RUNTIME_DIR": str(tmp_path)}
    with contextlib.ExitStack() as ends, (tmp_path / "log").open("wb") as log:
        ends.callback(run, "ip", "netns", "delete", network)
        run("ip", "-n", network, "link", "set", "lo", "up")
        run("ip", "-n", network, "address", "delete", "127.0.0.1/8", "dev", "lo")

        def start(*arguments: str) -> Forked:
            process = forks(**ENVIRONMENT).start(
                arguments,
                stderr=log,
                environment=environment,
                prelude=f"from hosts.host import enter; enter({network!r})",
            )
            ends.callback(process.wait, 10)
            ends.callback(process.kill)
            return process

        up = start("up", "--kv-tokens", "4096", "--log-dir", str(tmp_path / "logs"))
        assert up.stdout is not None
        printed = b""
        while b"Ctrl-C stops everything" not in printed and (line := up.stdout.readline()):
            printed += line
        assert b"[::1]:50050" in printed and b"--server" not in printed, (tmp_path / "log").read_text()
        probe = start("probe")
        assert probe.stdout is not None
        found = probe.stdout.read()
        assert probe.wait(60) == 0, (tmp_path / "log").read_text()
        assert b"prefill [::1]:" in found
        up.send_signal(signal.SIGTERM)
        assert up.wait(90) == 0


def right(client: Client, answer: Answer) -> bool:
    """False: not there yet. A wrong answer fails."""
    try:
        completion = client.generate(
            token_ids=answer.prompt, max_tokens=OUTPUT, temperature=0.0, ignore_eos=True
        )
    except BatonError as error:
        assert error.code is grpc.StatusCode.UNAVAILABLE, error
        return False
    assert completion.token_ids == answer.tokens
    return True


def family(process: Forked) -> set[int]:
    return {child.pid for child in psutil.Process(process.pid).children(recursive=True)}


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"


def mapped(pid: int) -> set[Path]:
    """Baton's shared memory that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {Path(path) for path in re.findall(rf"{SHM}/baton-\S+", maps)}
