"""What `baton doctor` says of process ids, and `baton health` of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from baton.bench.machine import DRIVER
from baton.cli.doctor import process_id, run_checks
from baton.cli.health import health
from baton.transport.shm import FIRST_PID_NAMESPACE, pid_namespace

ENTRY = ["python", "-m", "baton.cli.entry", "baton", "serve", "decode"]
SERVE = ["python", "/opt/baton/bin/baton", "serve", "decode"]


@pytest.mark.parametrize(
    ("namespace", "commands", "verdict", "says"),
    [
        (FIRST_PID_NAMESPACE, {1: ["init"], 77: SERVE}, "ok", "unique"),
        ("pid:[4026532000]", {1: SERVE}, "note", "has process id 1"),
        ("pid:[4026532000]", {1: ENTRY, 105: SERVE}, "ok", "is 105"),
        ("pid:[4026532000]", {1: ["bash"]}, "ok", "needs different ids"),
    ],
)
def test_a_worker_that_cuda_ipc_could_not_tell_apart_is_found(namespace, commands, verdict, says):
    check = process_id(namespace, commands)
    assert check.verdict == verdict and says in check.detail


@pytest.mark.skipif(any(path.exists() for path in DRIVER), reason="there is a GPU")
def test_without_a_gpu_nothing_that_needs_one_is_a_fault():
    findings = {(section, check.name): check.verdict for section, check in run_checks()}
    absent = {name for name, verdict in findings.items() if verdict == "absent"}
    assert {("devices", "cuda"), ("transports", "cuda_ipc"), ("attention", "fa3")} <= absent
    assert findings["attention", "torch"] == "ok"


def test_the_namespace_can_be_read_here():
    assert pid_namespace().startswith("pid:[")


def test_health_of_a_process_that_is_not_there():
    result = CliRunner().invoke(health, ["127.0.0.1:1", "--seconds", "2"])
    assert result.exit_code == 1
    assert result.output.count("\n") == 1 and "does not answer" in result.output


def test_the_command_of_a_container_is_light():
    """The probe runs every few seconds in every container: no torch, no transformers."""
    script = "import sys, baton.cli.health; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "[]\n"
