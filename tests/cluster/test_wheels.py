"""The wheels of baton-serve and baton-client: built, installed in environments of their own, used."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from polling import rows_of_up

from ports import free_port

ROOT = Path(__file__).parents[2]
SECONDS = 480
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
LINKED = re.compile(r"torch|triton|(nvidia|cuda)-.*")
"""Distributions too large to install once more for a test."""
PROGRAM = """
import asyncio, importlib.metadata, importlib.util, json, sys
import baton
from baton.client import AsyncClient, BatonError, Client
from baton.v1 import inference_pb2, inference_pb2_grpc

def said(answer):
    return [answer.text, answer.token_ids]

async def again():
    async with AsyncClient(sys.argv[1]) as client:
        return said(await client.generate("import os", max_tokens=8, temperature=0))

with Client(sys.argv[1]) as client:
    first = said(client.generate("import os", max_tokens=8, temperature=0))
    try:
        client.generate("x", temperature=-1)
    except BatonError as error:
        field = error.field
found = {name: importlib.util.find_spec(name) is not None for name in ("torch", "transformers", "fastapi")}
version = importlib.metadata.version("baton-client")
said = {"path": baton.__file__, "answers": [first, asyncio.run(again())], "field": field}
print(json.dumps(said | {"found": found, "version": [version, baton.__version__]}))
"""


pytestmark = pytest.mark.timeout(3 * SECONDS)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Distribution -> its wheel."""
    # A copy: the build makes the stubs anew, which other tests import meanwhile.
    source = tmp_path_factory.mktemp("source")
    for part in ("proto", "tools", "packages", "services"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for stubs in ("v1", "etcd"):
        shutil.rmtree(source / "services" / "baton" / stubs)
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, source / name)
    dist = source / "dist"
    built = [*PIP, "wheel", "--no-deps", "-w", dist, source, source / "packages" / "client"]
    subprocess.run(built, check=True, timeout=SECONDS)
    return {path.name.split("-")[0]: path for path in dist.iterdir()}


def installed(wheel: Path, venv: Path) -> Path:
    """A new environment with this wheel and what it requires. Torch, where it does, is the tests' own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=SECONDS)
    (packages,) = venv.glob("lib/python*/site-packages")
    if wheel.name.startswith("baton_serve"):
        link(packages)
    lock = ["-c", ROOT / "requirements.lock"]
    command = [*PIP, "--python", venv / "bin" / "python", "install", *lock, wheel]
    subprocess.run(command, check=True, timeout=SECONDS)
    return venv


def link(packages: Path) -> None:
    """Puts what is `LINKED` there, as if it had been installed."""
    for found in importlib.metadata.distributions():
        if LINKED.fullmatch(found.name.lower()):
            for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not (packages / top).exists():
                    (packages / top).symlink_to(Path(str(found.locate_file(top))).resolve())


@pytest.fixture(scope="module")
def server(wheels, tmp_path_factory) -> Path:
    return installed(wheels["baton_serve"], tmp_path_factory.mktemp("server") / "venv")


def command(venv: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`baton` of this environment, in an empty folder."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BATON"))
    }
    environment |= {"XDG_STATE_HOME": str(folder), "COLUMNS": "200"}
    with (folder / "printed").open("w") as printed:
        return subprocess.Popen(
            [venv / "bin" / "baton", *arguments],
            cwd=folder,
            env=environment,
            stdout=printed,
            stderr=printed,
            text=True,
        )


def test_the_demo(server, tmp_path):
    process = command(server, tmp_path, "demo")
    code, printed = process.wait(SECONDS), (tmp_path / "printed").read_text()
    assert code == 0, printed
    assert "Everything is stopped again" in printed
    for role in ("gateway", "tokenizer", "prefill", "decode"):
        assert role in printed


def test_the_demo_that_sees_needs_pillow(server, tmp_path):
    process = command(server, tmp_path, "demo", "--model", "demo-vision")
    code, printed = process.wait(SECONDS), (tmp_path / "printed").read_text()
    assert code == 2 and "pip install baton-serve[images]" in printed, printed
    assert next(server.glob("lib/python*/site-packages/baton/demo/vision/model.safetensors")).is_file()


@pytest.fixture
def address(server, tmp_path) -> Iterator[str]:
    """Of a deployment by the server's wheel."""
    port, folder = free_port(), tmp_path / "up"
    folder.mkdir()
    process = command(server, folder, "up", "--port", str(port), "--http-port", "0", "--threads", "1")
    try:
        assert len(rows_of_up(folder / "printed", lambda: process.poll() is not None)) == 4
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def test_the_client_alone(wheels, address, tmp_path):
    venv = installed(wheels["baton_client"], tmp_path / "venv")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    python = venv / "bin" / "python"
    done = subprocess.run([python, "-I", program, address], timeout=SECONDS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    first, second = said["answers"]
    assert first == second
    assert len(first[1]) == 8
    assert said["field"] == "sampling.temperature"
    assert Path(said["path"]).is_relative_to(venv)
    assert not any(said["found"].values())
    assert len(set(said["version"])) == 1
