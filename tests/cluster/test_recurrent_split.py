"""Models with recurrent layers, through all processes: handed off, cached, forked, retracted, resumed; drafts
are right seven times of ten, or made by the checkpoint's own layer."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
import torch
from asking import ask, greedy
from checkpoints import make_tokenizer
from deployment import Deployment
from polling import until
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, Lfm2Config, Qwen3_5TextConfig

from baton.client import AsyncClient
from baton.engine.draft.oracle import prompt_digest
from baton.layers.parameters import Parameters
from baton.models.config import read_config
from baton.models.qwen3_5 import build_mtp

OUTPUT = 48
LENGTHS = (15, 16, 17, 40, 63, 64, 65, 130)


_ALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS = {
    "qwen3.5": (
        Qwen3_5TextConfig,
        {
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        320,
        ("--tp", "2"),
    ),
    "granite4": (
        GraniteMoeHybridConfig,
        {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "shared_intermediate_size": 48,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
        224,
        (),
    ),
    "lfm2": (Lfm2Config, {"layer_types": ["conv", "full_attention", "conv"]}, 208, ()),
}
"""Configuration, what it has beyond _ALL, tokens of a decode node's pool: so few that some are retracted;
flags of the prefill node."""


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    torch.manual_seed(5)
    make, options, *_ = MODELS[name]
    return AutoModelForCausalLM.from_config(make(**{**_ALL, **options})).eval()


def add_mtp(path):
    """A layer of multi-token prediction, of random weights, which one of the decode nodes drafts by."""
    parameters = Parameters(torch.float32, torch.device("meta"))
    build_mtp(read_config(path), parameters)
    tensors = load_file(path / "model.safetensors")
    for name, parameter in parameters.table.items():
        tensors[name] = 0.15 * torch.randn(parameter.shape)
    save_file(tensors, path / "model.safetensors")


@pytest.fixture(scope="module")
def pair(tmp_path_factory, deployments, name, model, expected):
    folder = tmp_path_factory.mktemp("recurrent")
    path = folder / "model"
    model.save_pretrained(path)
    mtp = name == "qwen3.5"
    if mtp:
        add_mtp(path)
    make_tokenizer().save_pretrained(path)
    flags = ("--page-size", "16", "--token-budget", "32", "--max-rows", "8")
    decode = (
        "--kv-tokens",
        str(MODELS[name][2]),
        "--output-margin",
        "1",
        "--watermark",
        "0",
        "--transports",
        "grpc,shm",
    )
    deployment = Deployment.split(
        folder,
        path,
        decode=2,
        worker=flags,
        prefill_flags=("--kv-tokens", "4096", "--transports", "grpc,shm", *MODELS[name][3]),
        decode_flags=(*decode, "--local-prefill-tokens", "2", "--draft", "suffix", "--draft-tokens", "5"),
    )
    lines = [json.dumps({"prompt": prompt_digest(prompt), "tokens": tokens}) for prompt, tokens in expected]
    (folder / "known").write_text("\n".join(lines))
    one, other = deployment.of("decode")
    if mtp:
        other.flags[other.flags.index("suffix")] = "mtp"
    for process in (one,) if mtp else (one, other):
        process.prelude = f"import os\nos.environ['BATON_TEST_ORACLE'] = '{folder}/known:0.7'\n"
    with deployment:
        deployments.append(deployment)
        yield deployment


@pytest.fixture(scope="module")
def expected(model):
    draw = random.Random(7)
    prompts = [[draw.randrange(3, 160) for _ in range(length)] for length in LENGTHS]
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=OUTPUT, do_sample=False, pad_token_id=0)
        found.append((prompt, out[0, len(prompt) :].tolist()))
    return found


async def retracted(pair, expected):
    """Asks, of both nodes more than they have room for, until they have retracted some; their loads."""
    for number in range(10):
        loads = [node.load() for node in pair.of("decode")]
        if sum(load.retractions for load in loads):
            return loads
        several = [each for each in expected for _ in range(4)]
        requests = [greedy(prompt, OUTPUT, namespace=f"{number}") for prompt, _ in several]
        results = await ask(pair.gateway.address, requests)
        assert [found.token_ids for found in results] == [tokens for _, tokens in several]
    raise AssertionError("nothing was retracted")


@pytest.mark.parametrize("cached", [False, True])
async def test_tokens_are_those_of_transformers(pair, expected, cached):
    own = "own" if cached else "first"
    requests = [greedy(prompt, OUTPUT, namespace=own) for prompt, _ in expected]
    if cached:
        await ask(pair.gateway.address, requests)
    results = await ask(pair.gateway.address, requests)
    for (prompt, tokens), found in zip(expected, results, strict=True):
        assert found.token_ids == tokens, len(prompt)
        if cached and len(prompt) > 32:
            assert found.usage.cached_tokens
    # What is retracted or cached may lack so little that the decode node computes it by itself.
    assert any(found.stats.prefill_address == pair.prefill.address for found in results)
    loads = await retracted(pair, expected)
    told = [load for load in loads if load.drafter == "oracle"]
    drafted, right = (sum(getattr(load, f) for load in told) for f in ("drafted_tokens", "accepted_drafts"))
    assert 0.1 * drafted < right < 0.9 * drafted
    assert all(load.drafted_tokens > 100 for load in loads)


async def test_streams_of_a_killed_node_go_on(pair, expected):
    async with AsyncClient(pair.gateway.address) as client:
        # More than the nodes have room for, so that none has ended all of its streams when it is killed.
        several = [each for each in expected for _ in range(4)]
        streams = [client.stream(**greedy(prompt, OUTPUT)) for prompt, _ in several]
        tasks = [asyncio.create_task(stream.completion()) for stream in streams]
        await until(lambda: any(stream.so_far.token_ids for stream in streams), "a token")
        victim = max(pair.of("decode"), key=lambda node: node.load().running)
        victim.kill()
        completions = await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert [each.token_ids for each in completions] == [tokens for _, tokens in several]
    assert any(each.stats.resumed for each in completions)
    pair.start_all([victim])
    await until(lambda: all(peer.connected for peer in pair.gateway.info().peers), "connected again")
