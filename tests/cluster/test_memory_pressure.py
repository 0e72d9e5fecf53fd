"""Pools too small for two prompts: everything ends, right, in time. Who stops holds up nobody else."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from asking import greedy
from deployment import Deployment
from polling import until
from process import Process
from reference import Answer, Reference

from baton.client import AsyncClient, Completion
from baton.client.messages import make_start
from baton.rpc.channel import open_channel
from baton.v1 import inference_pb2_grpc

CLIENTS = 64
OUTPUT = 16
LONG_OUTPUT = 300
PROMPTS = [210, 230, 250, 270, 290, 310, 330, 340]
TINY = ("--kv-tokens", "400", "--overlap")
"""25 pages of 16 tokens: one prompt with its output, and never two."""
BOUND_SECONDS = 240.0


@dataclass
class Cluster:
    """Two prefill and two decode nodes, one of each tiny, behind a gateway for each pair."""

    deployment: Deployment
    answers: list[Answer]
    pairs: dict[tuple[str, str], Process]
    """(prefill, decode), each "tiny" or "roomy"; prefill may also be "none"."""
    workers: dict[tuple[str, str], Process]
    """(role, size)."""


@pytest.fixture(scope="module")
def cluster(qwen3: tuple[Path, Reference], tmp_path_factory, deployments) -> Iterator[Cluster]:
    deployment = Deployment(tmp_path_factory.mktemp("tiny"), qwen3[0])
    sizes = {"tiny": TINY, "roomy": ("--kv-tokens", "32768")}
    workers = {
        (role, size): deployment.add_worker(role, *flags)
        for role, (size, flags) in itertools.product(("prefill", "decode"), sizes.items())
    }
    pairs = {
        (prefill, decode): deployment.add_gateway(
            [workers["decode", decode]], [workers["prefill", prefill]] if prefill != "none" else []
        )
        for prefill, decode in (
            ("tiny", "roomy"),
            ("roomy", "tiny"),
            ("tiny", "tiny"),
            ("none", "tiny"),
            ("roomy", "roomy"),
        )
    }
    with deployment:
        deployments.append(deployment)
        yield Cluster(deployment, qwen3[1].answers(PROMPTS, OUTPUT), pairs, workers)


@pytest.fixture(scope="module")
def long(qwen3: tuple[Path, Reference]) -> list[Answer]:
    return qwen3[1].answers([80, 90, 100, 120], LONG_OUTPUT)


@pytest.mark.parametrize(
    ("pair", "sharing"),
    [
        (("tiny", "roomy"), False),
        (("roomy", "tiny"), False),
        (("tiny", "tiny"), True),
        (("tiny", "tiny"), False),
        (("none", "tiny"), True),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, tuple) else "shared" if each else "not-shared",
)
async def test_64_clients_and_room_for_one_prompt(cluster, pair, sharing):
    """Each client is a connection of its own."""
    gateway = cluster.pairs[pair]
    rng = random.Random(7)
    asked = [rng.choice(cluster.answers) for _ in range(CLIENTS)]
    started = time.monotonic()
    completions = await asyncio.gather(
        *(
            one_client(gateway, answer, f"{pair} {sharing}" if sharing else f"{pair} {number}")
            for number, answer in enumerate(asked)
        )
    )
    assert time.monotonic() - started < BOUND_SECONDS
    for answer, completion in zip(asked, completions, strict=True):
        assert completion.token_ids == answer.tokens
    used = {completion.stats.prefill_address for completion in completions}
    assert used == {""} if pair[0] == "none" else cluster.workers["prefill", pair[0]].address in used


async def one_client(gateway: Process, answer: Answer, namespace: str) -> Completion:
    async with AsyncClient(gateway.address) as client:
        return await client.generate(
            **greedy(answer.prompt, OUTPUT, namespace=namespace, timeout=BOUND_SECONDS)
        )


async def test_a_client_that_reads_nothing_holds_up_nobody(cluster, long):
    """Its own tokens wait for it at the gateway; the others' do not."""
    gateway = cluster.pairs["roomy", "roomy"]
    async with open_channel(gateway.address) as channel, AsyncClient(gateway.address) as client:
        deaf = inference_pb2_grpc.InferenceStub(channel).Generate()
        for number, answer in enumerate(long):
            request = {"max_tokens": LONG_OUTPUT, "temperature": 0.0, "ignore_eos": True, "logprobs": 20}
            await deaf.write(make_start(f"deaf {number}", None, {**request, "token_ids": answer.prompt}))
        completions = await asyncio.gather(
            *(client.generate(**greedy(answer.prompt, LONG_OUTPUT, timeout=240)) for answer in long)
        )
        assert [c.token_ids for c in completions] == [answer.tokens for answer in long]
        await until(lambda: not gateway.load().requests, "the deaf client's requests have finished")
        await deaf.done_writing()
        heard: dict[str, list[int]] = {}
        terminal: list[str] = []
        async for event in deaf:
            if event.WhichOneof("kind") == "delta":
                assert event.id not in terminal
                heard.setdefault(event.id, []).extend(event.delta.token_ids)
            elif event.WhichOneof("kind") == "finished":
                terminal.append(event.id)
        assert sorted(terminal) == sorted(heard) == [f"deaf {number}" for number in range(len(long))]
        assert list(map(heard.__getitem__, sorted(heard))) == [answer.tokens for answer in long]


async def test_a_stopped_gateway_holds_up_nobody(cluster, long):
    """Two gateways of one decode node: one is stopped, the other's tokens go on; then its own come too."""
    stopped, going = cluster.pairs["roomy", "roomy"], cluster.pairs["tiny", "roomy"]
    async with AsyncClient(stopped.address) as first, AsyncClient(going.address) as second:
        waiting = [first.stream(**greedy(answer.prompt, LONG_OUTPUT, timeout=240)) for answer in long]
        tasks = [asyncio.create_task(stream.completion()) for stream in waiting]
        await until(
            lambda: all(stream.so_far.token_ids for stream in waiting), "tokens from the first gateway"
        )
        stopped.signal(signal.SIGSTOP)
        try:
            completions = await asyncio.gather(
                *(second.generate(**greedy(answer.prompt, LONG_OUTPUT, timeout=240)) for answer in long)
            )
            assert [c.token_ids for c in completions] == [answer.tokens for answer in long]
            # The decode node has gone on with the stopped gateway's requests, too.
            decode = cluster.workers["decode", "roomy"]
            await until(lambda: not decode.load().requests, "all finished at the decode node")
            assert not any(task.done() for task in tasks)
        finally:
            stopped.signal(signal.SIGCONT)
        completions = await asyncio.gather(*tasks)
        assert [c.token_ids for c in completions] == [answer.tokens for answer in long]
