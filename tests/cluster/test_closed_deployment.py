"""The commands against a deployment that is closed on all sides: mutual TLS and a secret between its
processes, TLS and API keys towards clients. They work with what the environment names, and without that say
what is missing."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from forking import forks
from polling import rows_of_up
from process import ENVIRONMENT

KEY = secrets.token_hex(16)


@dataclass
class Closed:
    rows: dict[str, list[str]]
    """Process name -> pid, gRPC address, HTTP address."""
    known: dict[str, str]
    """What a command's environment needs."""
    base: dict[str, str]
    printed: str

    @property
    def gateway(self) -> str:
        return self.rows["gateway"][1]

    def run(self, *arguments: str, known: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {**self.base, **(self.known if known else {})}
        return forks(**ENVIRONMENT).run(arguments, environment=environment)


def private(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    folder = tmp_path_factory.mktemp("closed")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    ca = private(folder / "ca.pem", authority.cert_pem.bytes())
    cert = private(folder / "cert.pem", b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key = private(folder / "key.pem", issued.private_key_pem.bytes())
    secret = private(folder / "secret", secrets.token_hex(32))
    keys = private(folder / "keys", f"{KEY} name=tester\n")
    cluster = {"cert": cert, "key": key, "ca": ca, "secret-file": secret}
    flags = [word for name, path in cluster.items() for word in (f"--cluster-{name}", path)]
    flags += ["--tls-cert", cert, "--tls-key", key, "--api-keys", keys, "--port", "0", "--http-port", "0"]
    flags += ["--threads", "1", "--kv-tokens", "8192", "--served-name", "closed"]
    runtime = folder / "runtime"
    runtime.mkdir(0o700)
    base = {**os.environ, **ENVIRONMENT, "COLUMNS": "200", "XDG_RUNTIME_DIR": str(runtime)}
    known = {f"BATON_CLUSTER_{name.upper().replace('-', '_')}": path for name, path in cluster.items()}
    known |= {"BATON_TLS_CA": ca, "BATON_API_KEY": KEY}
    printed = folder / "printed"
    with printed.open("wb") as output:
        process = forks(**ENVIRONMENT).start_command(
            ["up", *flags], stdout=output, stderr=output, environment=base
        )
    try:
        rows = rows_of_up(printed, lambda: process.poll() is not None)
        yield Closed(rows, known, base, printed.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0, printed.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def test_up_says_what_clients_need(closed):
    for words in (
        "export BATON_API_KEY",
        "export BATON_TLS_CA",
        '--cacert "$BATON_TLS_CA"',
        '"model": "closed"',
    ):
        assert words in closed.printed


def test_a_missing_key_and_a_certificate_for_another_host_are_named(closed):
    """For 127.0.0.1 alone, so not for localhost."""
    trusting = {"BATON_TLS_CA": closed.known["BATON_TLS_CA"]}
    for server, words in (
        (closed.gateway, "from BATON_API_KEY (MISSING_API_KEY)"),
        (closed.gateway.replace("127.0.0.1", "localhost"), "name a host of its certificate"),
    ):
        command, environment = ["generate", "x", "--server", server], {**closed.base, **trusting}
        done = forks(**ENVIRONMENT).run(command, environment=environment)
        assert done.returncode == 1 and words in done.stderr, done.stderr


@pytest.mark.parametrize("words", [("status",), ("trace",), ("top", "--once")], ids=lambda words: words[0])
def test_a_missing_secret_is_named(closed, words):
    """To clients the gateway is open."""
    client = {name: closed.known[name] for name in ("BATON_TLS_CA", "BATON_API_KEY")}
    command = [*words, "--server", closed.gateway]
    done = forks(**ENVIRONMENT).run(command, environment={**closed.base, **client})
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "BATON_CLUSTER_SECRET_FILE" in done.stderr and "no gateway" not in done.stderr


def test_status_and_health_see_every_process(closed):
    status = closed.run("status", "--server", closed.gateway)
    assert status.returncode == 0, status.stdout + status.stderr
    assert all(address in status.stdout for _, address, _ in closed.rows.values())
    for name, (_, address, _) in closed.rows.items():
        health = closed.run("health", address)
        assert (health.returncode, health.stdout.strip()) == (0, "SERVING"), (name, health.stderr)


def test_probe_generate_and_bench_go_through(closed):
    probe = closed.run("probe", "--server", closed.gateway)
    assert probe.returncode == 0 and "pages by" in probe.stdout, probe.stderr
    generate = closed.run("generate", "a decode node", "--max-tokens", "4", "--server", closed.gateway)
    assert generate.returncode == 0, generate.stderr
    bench = ["bench", "serve", "--server", closed.gateway, "--concurrency", "2", "--requests", "4"]
    done = closed.run(*bench, "--prompt-tokens", "32", "--output-tokens", "4")
    assert done.returncode == 0, done.stdout + done.stderr


def test_verify_compares_it_with_a_deployment_of_its_own(closed):
    words = ["--against", closed.gateway, "--prompts", "4", "--max-tokens", "8"]
    done = closed.run("verify", *words, "--threads", "1", "--kv-tokens", "8192")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Equal, token for token." in done.stdout
    assert int(done.stdout.split("Split: ")[1].split()[0]) > 0, "no page was pulled"


def test_without_what_they_need_commands_say_so(closed):
    for words in (
        ("status",),
        ("probe",),
        ("generate", "x"),
        ("bench", "serve", "--requests", "1", "--concurrency", "1"),
    ):
        done = closed.run(*words, "--server", closed.gateway, known=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, (words, done.stderr)
        assert "BATON_TLS_CA" in done.stderr, words
