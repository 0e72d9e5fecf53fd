"""The `baton` command itself: help, errors, start-up time, doctor."""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
import structlog
import trustme

from baton.cli.bench_options import Report
from baton.cli.config_fields import ROLES
from baton.cli.doctor import ports
from baton.cli.main import COMMANDS, MEASUREMENTS, main
from baton.demo import model_path

Baton = Callable[..., subprocess.CompletedProcess[str]]
NAMES = [name for section in COMMANDS.values() for name in section]


def baton(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "baton.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "100", **env},
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Baton]:
    """`baton`, in this process: a start of Python takes half a second of a processor, with torch four."""

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        for name, value in {"COLUMNS": "100", **env}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), *capsys.readouterr())

    root, configured = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    yield run
    structlog.configure(**configured)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    "name",
    [
        [],
        *([name] for name in NAMES),
        *(["serve", role] for role in ROLES),
        *(["bench", name] for name in MEASUREMENTS["Measurements"]),
    ],
)
def test_help_of_every_command(name: list[str], here: Baton) -> None:
    result = here(*name, "--help")
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith("Usage: baton")
    assert "Example" in result.stdout or name == ["serve"]


@pytest.mark.alone
@pytest.mark.times
def test_help_is_quick_and_light() -> None:
    code = """
import atexit, sys
from baton.cli.main import main

atexit.register(lambda: print(sorted(set(sys.modules) & {"torch", "grpc", "rich"})))
main(["--help"])
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.stdout.splitlines()[-1] == "[]"
    # Of processor time: other work may hold the cores.
    assert used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime < 0.3


@pytest.mark.parametrize("name", ["up", "generate", "chat", "status", "serve"])
def test_importing_a_command_imports_neither_torch_nor_numpy(name: str) -> None:
    module = next(section[name][0] for section in COMMANDS.values() if name in section).split(":")[0]
    code = f"import sys, baton.cli.{module}; sys.exit(not {{'torch', 'numpy'}}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["serve", "decode", "--nonsense"], "--nonsense"),
        (["serve", "decode", "--port", "x"], "'x' is not a valid integer"),
        (["serve", "decode", "--http-port", "x"], "neither an integer nor 'none'"),
        (["up", "--decode", "0"], "--decode"),
        (["up", "--http-port", "x"], "neither an integer nor 'none'"),
        (["up", "--port", "8000"], "--port and --http-port are both 8000"),
        (["up", "some/model"], "unexpected argument 'some/model'; a model is named by --model some/model"),
        (["serve", "some/model"], "`baton up --model MODEL` starts all of them"),
        (["up", "--max-model-len", "4096"], "here it is --context-length"),
        (["up", "--tensor_parallel_size", "2"], "here it is --tp"),
        (["up", "--enable-prefix-caching"], "it is always on"),
        (["serve", "prefill", "--config", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_wrong_usage_is_one_line_and_2(arguments: list[str], words: str, here: Baton) -> None:
    result = here(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and words in result.stderr
    assert result.stderr.startswith("baton: ") and "--help" in result.stderr


def test_a_parser_that_is_not_known_is_refused_before_anything_starts() -> None:
    result = baton("up", "--port", "0", "--http-port", "0", "--reasoning-parser", "qwen3")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--reasoning-parser must be auto, none, think or gpt_oss, not 'qwen3'" in result.stderr


@pytest.mark.parametrize("words", ["up model --kv-tok", "serve model --kv-tok"])
def test_completion_in_a_shell_prints_no_error(words: str) -> None:
    """While a line is typed, its words may be wrong."""
    line = {"COMP_WORDS": f"baton {words}", "COMP_CWORD": "3", "_BATON_COMPLETE": "bash_complete"}
    result = baton(**line)
    assert result.stderr == "" and ("--kv-tokens" in result.stdout) == words.startswith("up"), result.stdout


def test_an_http_port_is_told_from_a_gateway() -> None:
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(server.serve_forever)
        result = baton("generate", "x", "--server", f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert "give the gateway's gRPC port" in result.stderr


def test_a_certificate_that_is_not_trusted_is_one_line(tmp_path: Path) -> None:
    issued, other = trustme.CA().issue_cert("127.0.0.1"), tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    pair = issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    result = baton("generate", "x", "--server", f"127.0.0.1:{port}", BATON_TLS_CA=str(other))
    server.stop(None)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert "is not trusted" in result.stderr and "BATON_TLS_CA" in result.stderr


@pytest.mark.parametrize(
    "command",
    ["verify", "bench serve", "bench offline", "bench offline --engine", "bench step", "bench quality"],
)
def test_options_are_checked_before_the_model_is_fetched(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetched(name: str) -> None:
        raise AssertionError(f"{name} was fetched first")

    monkeypatch.setattr("baton.model_path.resolve", fetched)
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--model", "some/model", "--threads", "-1"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("baton: --threads must be at least 0, not -1 (")


@pytest.mark.parametrize("group", [[], ["serve"], ["bench"]])
def test_a_group_without_a_command_shows_its_help(group: list[str], here: Baton) -> None:
    result = here(*group)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith(" ".join(["Usage: baton", *group])) and "--help" in result.stderr


def test_environment_is_named_in_errors(here: Baton) -> None:
    result = here("serve", "decode", BATON_MAX_ROWS="many")
    assert result.returncode == 2 and "BATON_MAX_ROWS" in result.stderr


def test_version() -> None:
    result = baton("--version")
    assert result.returncode == 0 and result.stdout.startswith("baton 0.")


def test_doctor_cuts_no_line_in_a_pipe(here: Baton) -> None:
    assert str(model_path()) in here("doctor", COLUMNS="60").stdout


def test_doctor_json(here: Baton) -> None:
    result = here("doctor", "--json")
    assert result.returncode == 0, result.stdout
    report = json.loads(result.stdout)
    found = {(check["section"], check["name"]): check for check in report["checks"]}
    assert report["can_run"] is True
    assert {check["verdict"] for check in report["checks"]} <= {"ok", "note", "absent"}
    for key in [
        ("machine", "python"),
        ("machine", "cores"),
        ("machine", "memory"),
        ("machine", "/dev/shm"),
        ("devices", "torch"),
        ("attention", "torch"),
        ("attention", "sgl_kernel"),
        ("transports", "grpc"),
        ("model", "demo"),
        ("ports", "gateway"),
    ]:
        assert found[key]["detail"]
    assert found["attention", "torch"]["verdict"] == "ok"


def test_doctor_finds_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr("baton.cli.doctor.DEFAULT_PORTS", {"gateway": (port, port)})
        assert [check.verdict for check in ports()] == ["note"]
    assert [check.verdict for check in ports()] == ["ok"]


@pytest.mark.thorough
def test_a_full_disk_is_one_line() -> None:
    for arguments in (["plan", "--help"], ["doctor"]):
        with Path("/dev/full").open("w") as full:
            result = subprocess.run(
                [sys.executable, "-m", "baton.cli.main", *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=240,
            )
        assert result.stderr == "baton: cannot write the output: No space left on device\n"
        assert result.returncode == 1


def test_results_that_cannot_be_written_are_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Report(Path("/dev/full"), "").save({"measurement": "kv"})
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"measurement": "kv"}
    assert "cannot write /dev/full: No space left on device" in printed.err
