"""Other people's clients against a deployment of a real language model, and of one that sees.

Skipped without the environment that they live in: make .venv/clients
"""

from __future__ import annotations

import io
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from PIL import Image

from baton.model_path import CheckpointError, resolve
from vision_models import TOKENIZER_VOCAB, save_qwen3_vl, save_tokenizer

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv" / "clients" / "bin"
SECONDS = 900
pytestmark = [
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.skipif(not (BIN / "python").exists(), reason="no clients: make .venv/clients"),
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, deployments) -> Iterator[Deployment]:
    try:
        resolve("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    with Deployment.split(
        tmp_path_factory.mktemp("clients"),
        "smollm2",
        worker=("--kv-tokens", "16384"),
        gateway_flags=("--omit-images",),
    ) as made:
        deployments.append(made)
        yield made


def run(program: str, *arguments: str) -> dict[str, Any]:
    """What a program of tests/clients found: objects, one a line."""
    command = [str(BIN / "python"), str(ROOT / "tests" / "clients" / program), *arguments]
    done = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]  # litellm prints others
    return {key: value for line in lines for key, value in json.loads(line).items()}


@pytest.fixture(scope="module")
def suites(deployment: Deployment) -> dict[str, Any]:
    return run("comply.py", f"http://{deployment.gateway.http}/v1", "smollm2")


THE_MODEL = (
    "expected at least",
    "expected no tool call",
    "expected a content answer",
    "argument values lost",
    "got [",  # goes on with it
)
"""What canitoolcall says of a model that does not do as it is told, as one of 135 million parameters may not.
All else is the server's: marks in answers, arguments that are no JSON or do not fit, streams that differ."""


@pytest.mark.parametrize(("api", "count"), [("chat", 9), ("responses", 13), ("messages", 9)])
def test_llm_comply(suites: dict[str, Any], api: str, count: int):
    results = {each["id"]: each for each in suites[api]}
    assert len(results) == count
    assert not {id: each for id, each in results.items() if each["status"] != "passed"}


def test_canitoolcall(suites: dict[str, Any]):
    outcomes = suites["probe"]
    assert len(outcomes) == 27
    for each in outcomes:
        wrong = (each["detail"] or "").split("; ") if each["status"] != "pass" else []
        assert all(said.startswith(THE_MODEL) for said in wrong), each
        assert not wrong or each["scenario_id"] != "single-call", each


def test_clients_drive_the_api(deployment: Deployment):
    url = f"http://{deployment.gateway.http}/v1"
    found = run("drive.py", url, "smollm2")
    assert found["with_litellm"]["arguments"]["city"] in ("Paris", "Oslo")
    assert found["with_litellm"]["second"] in ("stop", "length", "tool_calls")
    chain = found["with_langchain"]
    for method in ("bind_tools", "function_calling", "json_schema", "json_mode"):
        assert chain[method]["city"] in ("Paris", "Oslo"), method
    assert chain["chunks"] > 1
    messages = found["with_anthropic"]
    assert messages["arguments"]["city"] in ("Paris", "Oslo") and messages["stops"][0] == "tool_use"
    assert messages["counted"][0] == messages["counted"][1] > 0
    assert {"content_block_start", "input_json", "message_stop"} <= set(messages["events"])
    index = found["with_llama_index"]
    assert index["tool"] == "get_weather" and "city" in index["arguments"] and index["answer"]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory, deployments) -> Iterator[Deployment]:
    """Its answers depend on every pixel, and say nothing."""
    folder = tmp_path_factory.mktemp("seeing")
    save_qwen3_vl(folder / "model", vocab_size=TOKENIZER_VOCAB, max_position_embeddings=1024)
    save_tokenizer(folder / "model")
    flags = ("--kv-tokens", "4096", "--transports", "grpc,shm")
    with Deployment.split(folder, folder / "model", worker=flags) as made:
        deployments.append(made)
        yield made


def test_clients_send_images(seeing: Deployment, tmp_path: Path):
    """However they send one, it is the same prompt and the same answer as by Baton's own client, and another
    answer for another image."""
    own, files = [], []
    for seed in range(2):
        made = io.BytesIO()
        Image.frombytes("RGB", (40, 24), random.Random(seed).randbytes(3 * 40 * 24)).save(made, "PNG")
        files.append(str(tmp_path / f"{seed}.png"))
        Path(files[-1]).write_bytes(made.getvalue())
        with seeing.client() as client:
            messages = [{"role": "user", "content": ["What is this?", made.getvalue()]}]
            answer = client.generate(messages=messages, max_tokens=16, temperature=0)
        own.append([answer.text, answer.usage.prompt_tokens])
    found = run("see.py", f"http://{seeing.gateway.http}/v1", "model", *files)
    assert len(found) == 5
    ways = {(name, way): said for name, ways in found.items() for way, said in ways.items()}
    tool = ways["with_openai", "chat tool"]
    for (name, way), said in ways.items():
        assert said[0][0] != said[1][0], (name, way)
        if not way.endswith("told"):
            assert said == (tool if way.endswith("tool") else own), (name, way)
    assert len(ways) >= 25
    seeing.assert_idle()
