"""Guessed tokens change nothing that a client sees: the demo model with an oracle that is often wrong, beside
itself without drafts; split, and while decode nodes are killed."""

from __future__ import annotations

import asyncio
import json

import pytest
from asking import ask
from deployment import Deployment
from polling import until

from baton.client import AsyncClient
from baton.engine.draft.oracle import prompt_digest

OUTPUT = 64
PROMPTS = [[(start * step) % 900 + 20 for step in range(3, 3 + start)] for start in (5, 17, 40, 77)]
COLOURS = {"enum": ["red", "green", "blue"]}


def requests():
    """One of each kind."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 6, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 7, "n": 2},
        {"temperature": 0.0, "stop": ["the"]},
        {"temperature": 0.0, "min_tokens": 20},
        {"temperature": 0.9, "seed": 8, "response_format": COLOURS},
    ]
    return [
        {"token_ids": [*prompt, index], "max_tokens": OUTPUT, **kind}
        for index, kind in enumerate(kinds)
        for prompt in PROMPTS
    ]


def seen(completion):
    """What a client sees of an answer."""
    return [
        (
            choice.text,
            choice.token_ids,
            choice.finish_reason,
            [round(each.chosen.logprob, 4) for each in choice.logprobs],
        )
        for choice in completion.choices
    ]


@pytest.fixture(scope="module")
def expected(demo):
    return asyncio.run(ask(demo.gateway.address, requests()))


@pytest.fixture(scope="module")
def drafting(expected, tmp_path_factory, deployments):
    folder = tmp_path_factory.mktemp("drafts")
    lines = [
        {"prompt": prompt_digest(request["token_ids"]), "tokens": list(choice.token_ids)}
        for request, completion in zip(requests(), expected, strict=True)
        for choice in completion.choices
    ]
    (folder / "known").write_text("\n".join(map(json.dumps, lines)))
    flags = ("--draft", "suffix", "--draft-tokens", "5")
    deployment = Deployment.split(folder, "demo", decode=2, decode_flags=flags)
    for process in deployment.of("decode"):
        process.prelude = f"import os\nos.environ['BATON_TEST_ORACLE'] = '{folder}/known:0.8'\n"
    with deployment:
        deployments.append(deployment)
        yield deployment


async def test_answers_are_those_without(drafting, expected):
    found = await ask(drafting.gateway.address, requests())
    for request, one, other in zip(requests(), found, expected, strict=True):
        assert seen(one) == seen(other), request
    loads = [node.load() for node in drafting.of("decode")]
    drafted, right = (
        sum(getattr(load, name) for load in loads) for name in ("drafted_tokens", "accepted_drafts")
    )
    assert drafted > 500 and 0.3 * drafted < right < 0.95 * drafted
    # Clients are told what nodes have counted, but where the gateway has ended a request by a stop string.
    for name, total in (("drafted_tokens", drafted), ("accepted_drafts", right)):
        assert 0.9 * total < sum(getattr(each.usage, name) for each in found) <= total
    assert all(load.drafter == "oracle" and len(load.drafted_places) == 5 for load in loads)


async def test_streams_of_a_killed_node_go_on(drafting, expected):
    async with AsyncClient(drafting.gateway.address) as client:
        streams = [client.stream(**request) for request in requests()]
        tasks = [asyncio.create_task(stream.completion()) for stream in streams]
        await until(
            lambda: any(stream.so_far.token_ids for stream in streams if stream.so_far.choices), "a token"
        )
        victim = max(drafting.of("decode"), key=lambda node: node.load().running)
        victim.kill()
        completions = await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert [seen(each) for each in completions] == [seen(each) for each in expected]
    drafting.start_all([victim])
    await until(lambda: all(peer.connected for peer in drafting.gateway.info().peers), "connected again")
