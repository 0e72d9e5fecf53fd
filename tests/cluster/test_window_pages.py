"""A pool that could not hold all layers' KV of a request serves it if most layers have a window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from asking import ask, greedy
from checkpoints import make_model, save
from deployment import Deployment
from process import Process
from reference import Answer, Reference

PROMPT, OUTPUT, PAGE = 300, 64, 16
WHOLE = 3 * -(-(PROMPT + OUTPUT) // PAGE)
"""Pages of the request in all three groups: one of all positions, two with windows of 48."""
FLAGS = ("--kv-tokens", "208", "--token-budget", "16", "--max-rows", "4")
"""39 pages: 23 of the first group and the peak of the others, 7 each."""
TOKEN_BYTES = 2 * 2 * 16 * 4
"""Of a page, which holds one layer here."""


@dataclass
class Small:
    deployment: Deployment
    answer: Answer
    transport: str
    decode: Process
    split: Process
    aggregated: Process


@pytest.fixture(scope="module", params=["shm", "grpc"])
def small(request, tmp_path_factory, deployments) -> Iterator[Small]:
    folder = tmp_path_factory.mktemp("windows")
    model = make_model("gemma3")
    (answer,) = Reference(model).answers([PROMPT], OUTPUT)
    deployment = Deployment(folder, save(model, folder / "model"))
    flags = (*FLAGS, "--transports", request.param)
    prefill = deployment.add_worker("prefill", *flags)
    decode = deployment.add_worker("decode", *flags)
    split, aggregated = deployment.add_gateway([decode], [prefill]), deployment.add_gateway([decode])
    with deployment:
        deployments.append(deployment)
        yield Small(deployment, answer, request.param, decode, split, aggregated)


async def test_a_small_pool_serves_a_long_request(small):
    assert small.decode.load().pages.total == 39 < WHOLE
    for number, gateway in enumerate((small.split, small.aggregated, small.split)):
        asked = greedy(small.answer.prompt, OUTPUT, namespace="" if number else "first")
        (completion,) = await ask(gateway.address, [asked])
        assert completion.token_ids == small.answer.tokens
        if number:
            continue
        stats = completion.stats
        # 19 pages of all positions; of each window those from the 16th on, which position 288 sees.
        assert (stats.transport, stats.pulled_pages) == (small.transport, 19 + 2 * 4)
        assert stats.pulled_bytes == stats.pulled_pages * PAGE * TOKEN_BYTES
        assert stats.pulled_bytes < PROMPT * 3 * TOKEN_BYTES / 2, "half of what all layers have"
    assert small.decode.load().retractions == 0
    small.deployment.assert_idle()
