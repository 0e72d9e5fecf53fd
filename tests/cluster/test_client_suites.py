"""Other people's clients against a deployment of a real language model.

Skipped without the environment that they live in: make .venv/clients
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import Deployment

from baton.checkpoint import CheckpointError, resolve

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv" / "clients" / "bin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (BIN / "python").exists(), reason="no clients: make .venv/clients"),
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, deployments) -> Iterator[Deployment]:
    try:
        resolve("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    with Deployment.split(
        tmp_path_factory.mktemp("clients"), "smollm2", worker=("--kv-tokens", "16384")
    ) as made:
        deployments.append(made)
        yield made


def run(*command: str) -> str:
    done = subprocess.run(command, timeout=250, capture_output=True, text=True)
    assert done.stdout, done.stderr[-2000:]
    return done.stdout


def test_clients_drive_the_api(deployment: Deployment):
    url = f"http://{deployment.gateway.http}/v1"
    said = run(str(BIN / "python"), str(ROOT / "tests/clients/drive.py"), url, "smollm2")
    found = {key: value for line in said.splitlines() for key, value in json.loads(line).items()}
    assert found["with_litellm"]["arguments"]["city"] in ("Paris", "Oslo")
    assert found["with_litellm"]["second"] in ("stop", "length", "tool_calls")
    chain = found["with_langchain"]
    for method in ("bind_tools", "function_calling", "json_schema", "json_mode"):
        assert chain[method]["city"] in ("Paris", "Oslo"), method
    assert chain["chunks"] > 1
    index = found["with_llama_index"]
    assert index["tool"] == "get_weather" and "city" in index["arguments"] and index["answer"]
