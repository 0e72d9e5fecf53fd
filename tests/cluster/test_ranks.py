"""Workers of several ranks: the tokens of one rank, and the end of all when one ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from asking import ask, greedy
from deployment import Deployment
from polling import until
from process import Process
from reference import Answer, Reference

from baton.client.types import PositionLogprobs

OUTPUT = 32
LENGTHS = [1, 16, 33, 64, 160]
OPTIONS = ("--kv-tokens", "4096")
END_SECONDS = 10.0
"""Within which all ranks of a worker have ended after one of them."""


@dataclass
class Ranks:
    deployment: Deployment
    answers: list[Answer]
    aggregated: Process
    """A gateway to `decode` alone."""
    one_rank: Process
    """A gateway to `single` alone."""
    both: Process
    """A gateway to `decode` and `single`."""
    decode: Process
    """Of two ranks."""
    single: Process


@pytest.fixture(scope="module")
def ranks(qwen3: tuple[Path, Reference], tmp_path_factory, deployments) -> Iterator[Ranks]:
    deployment = Deployment(tmp_path_factory.mktemp("ranks"), qwen3[0])
    decode = deployment.add_worker("decode", *OPTIONS, "--tp", "2")
    single = deployment.add_worker("decode", *OPTIONS)
    aggregated = deployment.add_gateway([decode])
    one_rank = deployment.add_gateway([single])
    both = deployment.add_gateway([decode, single], (), "--routing", "round-robin")
    with deployment:
        deployments.append(deployment)
        yield Ranks(deployment, qwen3[1].answers(LENGTHS, OUTPUT), aggregated, one_rank, both, decode, single)


def followers(worker: Process) -> list[psutil.Process]:
    found = psutil.Process(worker.pid).children(recursive=True)
    return [each for each in found if "baton.ranks.follower" in each.cmdline()]


async def test_greedy_tokens_are_those_of_transformers(ranks):
    completions = await ask(ranks.aggregated.address, [greedy(each.prompt, OUTPUT) for each in ranks.answers])
    for answer, completion in zip(ranks.answers, completions, strict=True):
        assert completion.token_ids == answer.tokens, f"prompt of {len(answer.prompt)} tokens"


async def test_sampled_tokens_and_log_probabilities_are_those_of_one_rank(ranks):
    options = {"max_tokens": 8, "temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.3, "seed": 5, "n": 2}
    options |= {"logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True}
    requests = [{"token_ids": answer.prompt, **options} for answer in ranks.answers[:3]]
    ours = await ask(ranks.aggregated.address, requests)
    theirs = await ask(ranks.one_rank.address, requests)
    for our, their in zip(ours, theirs, strict=True):
        assert [choice.token_ids for choice in our.choices] == [choice.token_ids for choice in their.choices]
        for one, other in zip(our.choices, their.choices, strict=True):
            assert logprobs(one.logprobs) == pytest.approx(logprobs(other.logprobs), abs=1e-4)
        assert logprobs(our.prompt_logprobs) == pytest.approx(logprobs(their.prompt_logprobs), abs=1e-4)


def logprobs(positions: list[PositionLogprobs]) -> list[float]:
    return [position.chosen.logprob for position in positions if position.chosen is not None]


async def test_a_worker_ends_with_one_of_its_ranks_and_its_requests_go_on_elsewhere(ranks):
    (follower,) = followers(ranks.decode)
    work = [greedy(answer.prompt, OUTPUT) for answer in ranks.answers]

    asked = asyncio.create_task(ask(ranks.both.address, work * 3))
    await until(lambda: ranks.decode.load().running, "requests run there")
    follower.kill()
    completions = await asked
    for answer, completion in zip(ranks.answers * 3, completions, strict=True):
        assert completion.token_ids == answer.tokens
    await until(lambda: not ranks.decode.alive, "the worker ends", END_SECONDS)
    assert not [path for path in ranks.decode.segments() if path.exists()]
    ranks.decode.start()
    ranks.decode.wait_ready()
    assert len(followers(ranks.decode)) == 1
