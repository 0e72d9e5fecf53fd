"""Qwen3-VL through all processes: its text, handed off, cached, from the host tier; pictures are refused."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request

import pytest
import torch
from asking import ask, greedy
from checkpoints import make_tokenizer
from deployment import Deployment

from vision_models import IMAGE_TOKEN, save_qwen3_vl

OUTPUT = 12
LENGTHS = (15, 17, 40, 65, 130, 131, 132, 133)


@pytest.fixture(scope="module")
def expected(saved):
    draw, found = random.Random(7), []
    for length in LENGTHS:
        prompt = [draw.randrange(3, IMAGE_TOKEN) for _ in range(length)]
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = saved[1].generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=OUTPUT, do_sample=False, pad_token_id=0
        )
        found.append((prompt, out[0, len(prompt) :].tolist()))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3vl") / "model"
    model = save_qwen3_vl(path)
    make_tokenizer().save_pretrained(path)
    return path, model


@pytest.fixture(scope="module")
def pair(tmp_path_factory, deployments, saved):
    flags = ("--page-size", "16", "--token-budget", "32", "--max-rows", "8", "--transports", "grpc,shm")
    deployment = Deployment.split(
        tmp_path_factory.mktemp("qwen3vl-split"),
        saved[0],
        worker=flags,
        prefill_flags=("--kv-tokens", "320", "--host-memory", "16M"),
        decode_flags=("--kv-tokens", "2048", "--local-prefill-tokens", "2"),
    )
    with deployment:
        deployments.append(deployment)
        yield deployment


async def test_tokens_are_those_of_transformers(pair, expected):
    requests = [greedy(prompt, OUTPUT) for prompt, _ in expected]
    for _ in range(3):
        results = await ask(pair.gateway.address, requests)
        assert [found.token_ids for found in results] == [tokens for _, tokens in expected]
    assert any(found.usage.cached_tokens for found in results)
    assert any(found.stats.prefill_address == pair.prefill.address for found in results)


def test_a_picture_is_refused_by_one_line(pair):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": "model", "messages": [{"role": "user", "content": [part]}]}
    asked = urllib.request.Request(
        f"http://{pair.gateway.http}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=10)
    assert caught.value.code == 400 and b"no model here sees" in caught.value.read()
