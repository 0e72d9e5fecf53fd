"""Layers with heads of two sizes, through all processes: handed off, cached, retracted, resumed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from asking import ask, greedy
from checkpoints import make_model, save
from deployment import Deployment
from polling import until

import two_head_sizes
from baton.client import AsyncClient
from two_head_sizes import DenseReference

OUTPUT = 48
LENGTHS = (15, 16, 17, 40, 63, 64, 65, 130)

PRELUDE = f"""
import sys
sys.path.insert(0, {str(Path(two_head_sizes.__file__).parent)!r})
import two_head_sizes
two_head_sizes.register()
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory, deployments):
    folder = tmp_path_factory.mktemp("two_head_sizes")
    path = save(make_model("qwen3"), folder / "model")  # for its tokenizer
    (path / "model.safetensors").unlink()
    two_head_sizes.save(path)
    flags = ("--load-format", "dummy", "--page-size", "16", "--token-budget", "32", "--max-rows", "8")
    decode = ("--kv-tokens", "240", "--output-margin", "1", "--watermark", "0", "--transports", "grpc,shm")
    deployment = Deployment.split(
        folder,
        path,
        decode=2,
        worker=flags,
        prefill_flags=("--kv-tokens", "4096", "--transports", "grpc,shm"),
        decode_flags=(*decode, "--local-prefill-tokens", "2"),
    )
    deployment.tokenizer.flags = ["--model", str(path), "--threads", "1"]
    for process in deployment.processes:
        process.prelude = PRELUDE
    with deployment:
        deployments.append(deployment)
        yield deployment


@pytest.fixture(scope="module")
def expected(pair):
    draw = random.Random(7)
    two_head_sizes.register()
    reference = DenseReference(pair.folder / "model")
    prompts = [[draw.randrange(3, 160) for _ in range(length)] for length in LENGTHS]
    return [(prompt, reference.greedy(prompt, OUTPUT)) for prompt in prompts]


@pytest.mark.parametrize("cached", [False, True])
async def test_tokens_are_those_of_dense_attention(pair, expected, cached):
    requests = [greedy(prompt, OUTPUT, namespace="own") for prompt, _ in expected]
    if cached:
        await ask(pair.gateway.address, requests)
    results = await ask(pair.gateway.address, requests)
    for (prompt, tokens), found in zip(expected, results, strict=True):
        assert found.token_ids == tokens, len(prompt)
        if cached and len(prompt) > 32:
            assert found.usage.cached_tokens
    # What is retracted or cached may lack so little that the decode node computes it by itself.
    assert any(found.stats.prefill_address == pair.prefill.address for found in results)
    assert sum(node.load().retractions for node in pair.of("decode"))


async def test_streams_of_a_killed_node_go_on(pair, expected):
    async with AsyncClient(pair.gateway.address) as client:
        streams = [client.stream(**greedy(prompt, OUTPUT)) for prompt, _ in expected]
        tasks = [asyncio.create_task(stream.completion()) for stream in streams]
        await until(lambda: any(stream.so_far.token_ids for stream in streams), "a token")
        await until(lambda: any(node.load().running for node in pair.of("decode")), "what a node runs")
        victim = max(pair.of("decode"), key=lambda node: node.load().running)
        victim.kill()
        completions = await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert [each.token_ids for each in completions] == [tokens for _, tokens in expected]
    assert any(each.stats.resumed for each in completions)
    pair.start_all([victim])
    await until(lambda: all(peer.connected for peer in pair.gateway.info().peers), "connected again")
