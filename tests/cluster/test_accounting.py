"""Workers are killed in the middle of streams: what can goes on, clients are told, nothing is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from asking import ask, greedy
from checkpoints import make_model, save
from deployment import Deployment
from polling import until
from process import Process
from reference import Answer, Reference

from baton.client import AsyncClient, BatonError

SLOW = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 64}
OUTPUT = 48
TRANSPORTS = ["shm", "grpc"]
TOLD_SECONDS = 8.0
"""A client whose request cannot go on hears of it before silence would tell its peers of a loss: 10 s."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> tuple[Path, list[Answer]]:
    """A checkpoint whose prompts take a while, and the answers to some."""
    model = make_model("qwen3", max_position_embeddings=2048, **SLOW)
    folder = save(model, tmp_path_factory.mktemp("slow") / "model")
    return folder, Reference(model).answers([780, 540, 720, 420, 600, 640, 480, 560], OUTPUT)


@pytest.fixture(scope="module")
def pair(slow, tmp_path_factory, deployments) -> Iterator[Deployment]:
    """Two prefill nodes, one for each transport, and two decode nodes, one with a step always in flight."""
    deployment = Deployment(tmp_path_factory.mktemp("pair"), slow[0])
    worker = ("--token-budget", "32", "--max-rows", "16", "--kv-tokens", "16384")
    prefill = [deployment.add_worker("prefill", *worker, "--transports", kind) for kind in TRANSPORTS]
    decode = [deployment.add_worker("decode", *worker, overlap) for overlap in ("--overlap", "--no-overlap")]
    deployment.add_gateway(decode, prefill, "--resume-wait-seconds", "1")
    with deployment:
        deployments.append(deployment)
        # A decode node connects with the first request; until then the first node connected gets them all.
        asyncio.run(ask(deployment.gateway.address, all_of(slow[1][:2])))
        asyncio.run(until(lambda: all(connected(decode, each) for each in prefill), "all connected"))
        yield deployment


def all_of(answers: list[Answer], **options) -> list[dict]:
    return [greedy(answer.prompt, OUTPUT, **options) for answer in answers]


def check(answers, completions) -> None:
    for answer, completion in zip(answers, completions, strict=True):
        assert completion.token_ids == answer.tokens


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_killed_prefill_node_costs_time_only(pair, slow, transport):
    """Its prompts go to the other one, while pages of some had been pulled already."""
    victim = pair.of("prefill")[TRANSPORTS.index(transport)]
    (other,) = set(pair.of("prefill")) - {victim}
    decodes = pair.of("decode")
    old = victim.segments()
    assert len(old) == (1 if transport == "shm" else 0)
    asking = asyncio.create_task(ask(pair.gateway.address, all_of(slow[1], namespace=f"{transport} killed")))
    await until(
        lambda: victim.load().requests and sum(d.load().pulled_pages for d in decodes) > 20, "pages pulled"
    )
    # Decode nodes copy from it; with shm they have mapped its memory.
    victim.kill()
    completions = await asking
    check(slow[1], completions)
    retried = sum(completion.stats.handoff_retries for completion in completions)
    counted = [decode.load() for decode in decodes]
    assert sum(load.handoff_retries for load in counted) >= retried > 0
    assert all(sum(load.handoff_retry_reasons.values()) == load.handoff_retries for load in counted)
    assert any(load.handoff_retry_reasons["PEER_LOST"] for load in counted)
    assert {completion.stats.prefill_address for completion in completions} <= {
        other.address,
        victim.address,
        "",
    }
    assert all(decode.alive for decode in decodes)
    victim.start()
    victim.wait_ready()
    assert not any(path.exists() for path in old), "the segment of the killed incarnation"
    await until(lambda: connected(decodes, victim), "decode nodes connected to the new incarnation")
    some, again = slow[1][4:], list[Any]()
    for turn in range(5):  # prompts go to the other one until more is known of this one
        completions = await ask(pair.gateway.address, all_of(some, namespace=f"{transport} {turn}"))
        check(some, completions)
        again += [c for c in completions if c.stats.prefill_address == victim.address]
        if again:
            break
    assert again and all(c.stats.transport == transport and c.stats.pulled_pages for c in again)


def connected(decodes: list[Process], prefill: Process) -> bool:
    peers = [peer for decode in decodes for peer in decode.info().peers]
    found = [peer for peer in peers if peer.address == prefill.address and peer.connected]
    return len(found) == len(decodes) and all(peer.incarnation == prefill.incarnation for peer in found)


async def test_without_any_prefill_node_decode_computes_prompts_itself(pair, slow):
    asking = asyncio.create_task(ask(pair.gateway.address, all_of(slow[1], namespace="no prefill")))
    await until(lambda: any(prefill.load().prefilling for prefill in pair.of("prefill")), "prompts computed")
    for prefill in pair.of("prefill"):
        prefill.kill()
    completions = await asking
    check(slow[1], completions)
    assert any(c.stats.prefill_address == "" and c.stats.handoff_retries for c in completions)
    pair.start_all(pair.of("prefill"))


async def test_streams_of_a_killed_decode_node_go_on_at_the_other(pair, slow):
    victim, other = pair.of("decode")
    old = victim.segments()
    async with AsyncClient(pair.gateway.address) as client:
        requests = all_of(slow[1], namespace="decode killed")
        streams = [client.stream(**request) for request in requests]
        tasks = [asyncio.create_task(stream.completion()) for stream in streams]
        await until(lambda: victim.load().running and victim.load().output_tokens, "decoding")
        await until(lambda: any(stream.so_far.token_ids for stream in streams), "tokens delivered")
        victim.kill()
        completions = await asyncio.wait_for(asyncio.gather(*tasks), 120)
        check(slow[1], completions)
        assert any(completion.stats.resumed for completion in completions)
        assert {c.stats.decode_address for c in completions if c.stats.resumed} == {other.address}
    victim.start()
    victim.wait_ready()
    assert not any(path.exists() for path in old)
    await until(lambda: all(peer.connected for peer in pair.gateway.info().peers), "gateway connected again")
    some = slow[1][4:]
    completions = await ask(pair.gateway.address, all_of(some, namespace="decode restarted"))
    check(some, completions)
    assert {completion.stats.decode_address for completion in completions} == {victim.address, other.address}


async def test_clients_of_a_lost_decode_node_hear_of_it_in_time(pair, slow):
    """With no other decode node left, after --resume-wait-seconds."""
    first, second = pair.of("decode")
    second.kill()
    async with AsyncClient(pair.gateway.address) as client:
        tasks = [
            asyncio.create_task(client.generate(**request)) for request in all_of(slow[1], namespace="both")
        ]
        await until(lambda: first.load().requests == len(tasks), "all requests there")
        prefill = pair.of("prefill")
        await until(lambda: all(each.load().prefilling for each in prefill), "prompts computed for it")
        first.kill()
        killed = time.monotonic()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - killed < TOLD_SECONDS
        pair.assert_idle()  # the prefill nodes have let go, long before a lease would have run out
        for error in errors:
            assert isinstance(error, BatonError) and error.code is grpc.StatusCode.UNAVAILABLE, error
        with pytest.raises(BatonError) as refused:
            await client.generate(token_ids=[1], max_tokens=1)
        assert refused.value.reason == "NO_DECODE_NODE"
    pair.start_all([first, second])
    await until(lambda: all(peer.connected for peer in pair.gateway.info().peers), "gateway connected again")


async def test_a_killed_gateway_frees_everything_at_the_workers(pair, slow):
    async with AsyncClient(pair.gateway.address) as client:
        tasks = [
            asyncio.create_task(client.generate(**request))
            for request in all_of(slow[1], namespace="gateway")
        ]
        await until(
            lambda: all(decode.load().requests for decode in pair.of("decode")), "requests at both nodes"
        )
        pair.gateway.kill()
        errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), TOLD_SECONDS)
        assert all(isinstance(e, BatonError) and e.code is grpc.StatusCode.UNAVAILABLE for e in errors), (
            errors
        )
    pair.assert_idle()
    pair.gateway.start()
    pair.gateway.wait_ready()
    check(slow[1][3:4], await ask(pair.gateway.address, all_of(slow[1][3:4])))


async def test_running_streams_do_not_notice_a_killed_tokenizer(pair, slow):
    async with AsyncClient(pair.gateway.address) as client:
        request = greedy(slow[1][0].prompt[:40], 240)
        before = await client.generate(**request)
        tasks = [asyncio.create_task(client.generate(**request)) for _ in range(4)]
        await until(lambda: sum(decode.load().running for decode in pair.of("decode")) == 4, "decoding")
        pair.tokenizer.kill()
        for answer in await asyncio.wait_for(asyncio.gather(*tasks), 60):
            assert (answer.token_ids, answer.text) == (before.token_ids, before.text)
        with pytest.raises(BatonError) as error:
            await client.generate("text", max_tokens=1)
        assert error.value.reason == "TOKENIZER_UNAVAILABLE"
        pair.assert_idle()
        pair.tokenizer.start()
        pair.tokenizer.wait_ready()
        await until(
            lambda: all(peer.connected for peer in pair.gateway.info().peers), "gateway connected again"
        )
        check(slow[1][3:4], await ask(pair.gateway.address, all_of(slow[1][3:4])))


async def test_a_new_deployment_reaps_what_killed_workers_left(slow, tmp_path, deployments):
    first = Deployment.split(tmp_path, slow[0], worker=("--kv-tokens", "8192")).start()
    workers = [first.prefill, first.decode]
    left = [path for worker in workers for path in worker.segments()]
    assert len(left) == 2
    for process in first.processes:
        process.kill()
    (tmp_path / "second").mkdir()
    with Deployment.split(tmp_path / "second", slow[0], worker=("--kv-tokens", "8192")) as second:
        assert not any(path.exists() for path in left)
        answer = slow[1][3]
        check([answer], await ask(second.gateway.address, [greedy(answer.prompt, OUTPUT)]))
        second.assert_idle()
