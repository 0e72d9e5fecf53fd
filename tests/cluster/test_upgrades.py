"""Exact tokens through deaths and upgrades: what runs on a lost or replaced node goes on elsewhere."""

from __future__ import annotations

import asyncio

import pytest
from deployment import Deployment
from polling import until

from baton.client import AsyncClient

PROMPTS = ["textwrap.dedent(text)", "class Stack:", "import json", "os.path.join("]
PLAIN = {"max_tokens": 192, "ignore_eos": True}


def requests(stop: str) -> list[dict]:
    """Greedy, seeded, with log-probabilities, with a stop string, with several choices and penalties."""
    kinds = [
        {**PLAIN, "temperature": 0, "logprobs": 2},
        {**PLAIN, "temperature": 0.9, "seed": 7, "top_p": 0.95},
        {**PLAIN, "temperature": 0.8, "seed": 11, "n": 2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        {**PLAIN, "temperature": 0, "stop": [stop], "repetition_penalty": 1.1},
    ]
    return [{"prompt": prompt, **kind} for prompt, kind in zip(PROMPTS, kinds, strict=True)]


def said(completion) -> list:
    """What must be the same, whatever happens: tokens, text, ends, log-probabilities (rounded)."""
    return [
        (
            choice.token_ids,
            choice.text,
            choice.finish_reason,
            choice.stop_matched,
            [
                (round(position.chosen.logprob, 2), position.chosen.token_bytes)
                for position in choice.logprobs
            ],
        )
        for choice in completion.choices
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory, deployments):
    # Short of what any machine takes for an answer: some are always under way when a node stops.
    flags = ("--kv-tokens", "8192", "--drain-seconds", "0.05")
    folder = tmp_path_factory.mktemp("resume")
    deployment = Deployment.split(
        folder, "demo", prefill=1, decode=2, worker=flags, decode_flags=("--local-prefill-tokens", "2")
    )
    deployment.tokenizer.flags += ["--drain-seconds", "0.5"]
    with deployment:
        deployments.append(deployment)
        yield deployment


@pytest.fixture(scope="module")
def expected(pair):
    client = pair.client()
    text = client.generate(**requests("\0")[3]).text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    made = requests(stop)
    answers = [said(client.generate(**request)) for request in made]
    assert answers[3][0][2:4] == ("stop", stop) and len(answers[3][0][0]) > 16
    return made, answers


@pytest.mark.main_path
async def test_streams_of_a_killed_decode_node_go_on(pair, expected):
    made, answers = expected
    async with AsyncClient(pair.gateway.address) as client:
        streams = [client.stream(**request) for request in made * 2]
        tasks = [asyncio.create_task(stream.completion()) for stream in streams]
        await until(lambda: all(stream.so_far.token_ids for stream in streams), "tokens of all")
        victim = max(pair.of("decode"), key=lambda node: node.load().running)
        assert victim.load().running
        victim.kill()
        completions = await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert [said(completion) for completion in completions] == answers * 2
    assert any(completion.stats.resumed for completion in completions)
    assert all(
        completion.stats.decode_address != victim.address or not completion.stats.resumed
        for completion in completions
    )
    pair.start_all([victim])
    await until(lambda: all(peer.connected for peer in pair.gateway.info().peers), "connected again")


async def test_a_rolling_restart_of_all_workers_fails_nothing(pair, expected):
    made, answers = expected
    running, resumed, done = True, 0, 0

    async def ask(client, number):
        nonlocal resumed, done
        while running:
            which = number % len(made)
            completion = await client.generate(**made[which])
            assert said(completion) == answers[which]
            resumed += completion.stats.resumed
            done, number = done + 1, number + 1

    async with AsyncClient(pair.gateway.address) as client:
        tasks = [asyncio.create_task(ask(client, number)) for number in range(4)]
        try:
            for process in (*pair.of("decode"), *pair.of("prefill"), pair.tokenizer):
                incarnation = process.incarnation
                assert await asyncio.to_thread(process.stop) == 0
                process.start()
                await asyncio.to_thread(process.wait_ready)
                assert process.incarnation != incarnation
                await until(
                    lambda: all(p.connected for p in pair.gateway.info().peers), "connected again", 20.0
                )
                failed = [task for task in tasks if task.done()]
                assert not failed, failed[0].exception()
        finally:
            running = False
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert done >= len(tasks) and resumed
