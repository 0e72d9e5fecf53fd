"""GGUF files through all processes: greedy output is that of transformers on the weights that they hold."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from asking import ask, greedy
from checkpoints import make_model, make_tokenizer
from deployment import Deployment
from reference import Reference

from gguf_models import write_gguf

OUTPUT = 48


@pytest.mark.parametrize(
    ("name", "kind", "parts"), [("llama", "Q4_0", 1), ("gpt-oss", "MXFP4", 1), ("deepseek", "Q8_0", 3)]
)
def test_greedy_output_and_text(name, kind, parts, tmp_path, deployments):
    model = make_model(name)
    path = write_gguf(tmp_path / f"{name}-{kind}.gguf", model, kind, make_tokenizer(), parts=parts)
    answers = Reference(model).answers([1, 16, 33, 65, 160], OUTPUT)
    worker = ("--kv-tokens", "4096", "--page-size", "16", "--quantization", "none")
    with Deployment.split(tmp_path, path, worker=worker) as deployment:
        deployments.append(deployment)
        requests = [greedy(answer.prompt, OUTPUT) for answer in answers]
        completions = asyncio.run(ask(deployment.gateway.address, requests))
        for answer, completion in zip(answers, completions, strict=True):
            assert completion.token_ids == answer.tokens, f"prompt of {len(answer.prompt)} tokens"
        client = deployment.client()
        chat = client.generate(messages="the pages of a prompt", temperature=0.0, max_tokens=8)
        assert chat.text and chat.usage.prompt_tokens > 3


def test_up_says_in_one_line_that_a_file_is_truncated(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", make_model("llama"), "F32", make_tokenizer())
    path.write_bytes(path.read_bytes()[:-1000])
    command = [sys.executable, "-m", "baton.cli.main", "up", "--model", str(path), "--port", "0"]
    run = subprocess.run(
        [*command, "--http-port", "0"], capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 2
    assert "model.gguf cannot be read: it is truncated or damaged" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
