"""baton-client, the distribution without torch: built, installed in a bare environment, used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deployment import Deployment

ROOT = Path(__file__).parents[2]
SECONDS = 240
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


@pytest.mark.timeout(3 * SECONDS)
def test_the_client_alone(demo: Deployment, tmp_path: Path):
    # A copy: the build makes the stubs anew, which other tests import meanwhile.
    source = tmp_path / "source"
    for part in ("proto", "tools", "packages", "services/baton/client", "services/baton/rpc"):
        shutil.copytree(ROOT / part, source / part)
    for name in ("__init__.py", "py.typed"):
        shutil.copy(ROOT / "services" / "baton" / name, source / "services" / "baton" / name)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=SECONDS)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "-q"]
    lock = ["-c", ROOT / "requirements.lock"]
    subprocess.run([*pip, *lock, source / "packages" / "client"], check=True, timeout=SECONDS)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [python, "-I", program, demo.gateway.address], timeout=SECONDS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    answer = demo.client().generate("import os", max_tokens=8, temperature=0)
    assert said["answers"] == [[answer.text, answer.token_ids]] * 2
    assert said["field"] == "sampling.temperature"
    assert Path(said["path"]).is_relative_to(venv)
    assert not any(said["found"].values())
    assert len(set(said["version"])) == 1
