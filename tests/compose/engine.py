"""A Docker engine for tests, and the compose file of this repository on it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "baton:test"
START = "BATON_TEST_DOCKER_UP"
"""Environment variable: a command that starts an engine where none is running."""
COMMAND_SECONDS = 300.0
FIRST_TOKEN_SECONDS = 60.0
"""From `up` on a built image."""


def run(command: Sequence[str], seconds: float = COMMAND_SECONDS, **variables: str) -> str:
    """What the command prints to stdout; fails with its stderr."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def works(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def need_engine() -> None:
    """Skips the tests, and says why, where no engine can be had."""
    if works("docker", "info"):
        return
    command = os.environ.get(START)
    if not command:
        pytest.skip(f"no Docker engine is running, and {START} names no command that starts one")
    run(shlex.split(command), 600.0)
    assert works("docker", "info"), f"{START} has started no engine"


def compose_command() -> list[str]:
    if works("docker", "compose", "version"):
        return ["docker", "compose"]
    if works("docker-compose", "version"):
        return ["docker-compose"]
    pytest.skip("neither `docker compose` nor `docker-compose` is installed")


def build_image() -> float:
    """Returns the seconds it took: few where the layers of the last time are still there."""
    started = time.monotonic()
    command = ["docker", "build", "--network=host", "-f", "docker/Dockerfile", "--target", "cpu", "-t", IMAGE]
    command += ["--build-arg", f"PIP_TORCH_ARGS={os.environ.get('PIP_TORCH_ARGS', '')}", "."]
    builder = {} if works("docker", "buildx", "version") else {"DOCKER_BUILDKIT": "0"}
    run(command, 1200.0, **builder)
    return time.monotonic() - started


class Compose:
    """One project of docker-compose.yaml. `settings` are its variables."""

    def __init__(self, project: str, **settings: str) -> None:
        self.project = project
        self._command = [*compose_command(), "-p", project]
        self._settings = settings

    def __call__(self, *arguments: str, seconds: float = COMMAND_SECONDS) -> str:
        return run([*self._command, *arguments], seconds, **self._settings)

    def containers(self, service: str) -> list[str]:
        """Ids, also of those that do not run."""
        of = f"label=com.docker.compose.service={service}"
        return run(["docker", "ps", "-aq", "--filter", self._mine, "--filter", of]).split()

    def inspect(self, container: str) -> Any:
        return json.loads(run(["docker", "inspect", container]))[0]

    @property
    def _mine(self) -> str:
        return f"label=com.docker.compose.project={self.project}"

    def left(self) -> list[str]:
        """What there is of the project."""
        listings = (["ps", "-aq"], ["network", "ls", "-q"], ["volume", "ls", "-q"])
        found = [run(["docker", *listing, "--filter", self._mine]).split() for listing in listings]
        return [name for names in found for name in names]
