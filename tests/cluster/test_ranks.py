"""Workers of several ranks: the tokens of one rank, and the end of all when one ends."""

from __future__ import annotations

import asyncio
import os
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from asking import ask, greedy
from checkpoints import make_model, save
from deployment import Deployment
from forking import forks
from polling import until
from process import ENVIRONMENT, SHM, Process
from prometheus_client.parser import text_string_to_metric_families
from reference import Answer, Reference
from spare_followers import NAME

from baton.cli.node_reports import ask_deployment
from baton.cli.status import status_table
from baton.client.types import PositionLogprobs
from baton.transport.shm import reap_orphans

OUTPUT = 32
LENGTHS = [1, 16, 33, 64, 160]
OPTIONS = ("--kv-tokens", "4096")
END_SECONDS = 12.0
"""Within which all ranks of a worker have ended after one of them: a link's own timeout is 15 s."""


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
    pairs: dict[str, tuple[Process, str]]
    """By the sizes of prefill and decode node: a gateway, and the transport between them."""
    decode: Process
    """Of two ranks."""
    single: Process


@pytest.fixture(scope="module")
def ranks(qwen3: tuple[Path, Reference], tmp_path_factory, deployments) -> Iterator[Ranks]:
    deployment = Deployment(tmp_path_factory.mktemp("ranks"), qwen3[0])
    decode = deployment.add_worker("decode", *OPTIONS, "--tp", "2", "--http-port", "0")
    single = deployment.add_worker("decode", *OPTIONS, "--transports", "grpc")
    prefill = deployment.add_worker("prefill", *OPTIONS)
    prefill_of_two = deployment.add_worker("prefill", *OPTIONS, "--tp", "2")
    aggregated = deployment.add_gateway([decode])
    one_rank = deployment.add_gateway([single])
    both = deployment.add_gateway([decode, single], (), "--routing", "round-robin")
    pairs = {
        "1 to 2": (deployment.add_gateway([decode], [prefill]), "shm"),
        "2 to 2": (deployment.add_gateway([decode], [prefill_of_two]), "shm"),
        "2 to 1": (deployment.add_gateway([single], [prefill_of_two]), "grpc"),
    }
    with deployment:
        deployments.append(deployment)
        yield Ranks(
            deployment, qwen3[1].answers(LENGTHS, OUTPUT), aggregated, one_rank, both, pairs, decode, single
        )


async def test_a_worker_tells_its_ranks(ranks):
    told = ranks.decode.info().ranks
    assert [rank.rank for rank in told] == [0, 1]
    assert [rank.pid for rank in told] == [ranks.decode.pid, followers(ranks.decode)[0].pid]
    assert all(rank.resident_bytes > 2**20 and rank.device == "cpu" for rank in told)
    assert not ranks.single.info().ranks
    found = await ask_deployment(ranks.both.address)
    devices = list(status_table(found).columns[7].cells)
    assert "cpu" in devices
    assert any(re.fullmatch(r"cpu x 2 \(\d+\.\d, \d+\.\d GiB\)", each) for each in devices)


def test_metrics_know_the_ranks(ranks):
    """Of steps there have been some: they are measured at the start."""
    lines = urllib.request.urlopen(f"http://{ranks.decode.http}/metrics", timeout=10).read().decode()
    found = {each.name: each.samples for each in text_string_to_metric_families(lines)}
    memory = {each.labels["rank"]: each.value for each in found["baton_rank_resident_bytes"]}
    assert memory.keys() == {"0", "1"} and min(memory.values()) > 2**20
    plans = {(each.name, each.labels.get("le")): each.value for each in found["baton_plan_seconds"]}
    count = plans["baton_plan_seconds_count", None]
    assert count == plans["baton_plan_seconds_bucket", "+Inf"] > 0
    assert 0 < plans["baton_plan_seconds_sum", None] / count < 1.0


def followers(worker: Process) -> list[psutil.Process]:
    found = psutil.Process(worker.pid).children(recursive=True)
    return [each for each in found if each.name() == NAME]


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


@pytest.mark.parametrize("sizes", ["1 to 2", "2 to 2", "2 to 1"])
async def test_pages_are_handed_off_between_different_numbers_of_ranks(ranks, sizes):
    gateway, transport = ranks.pairs[sizes]
    await hand_off(gateway, transport, ranks.answers, namespace=sizes)
    await hand_off(gateway, transport, ranks.answers, namespace=sizes)  # of prompts that both have cached


async def hand_off(gateway: Process, transport: str, answers: list[Answer], **options: Any) -> None:
    """All at once; those longer than 32 tokens are computed on the prefill node."""
    completions = await ask(gateway.address, [greedy(each.prompt, OUTPUT, **options) for each in answers])
    for answer, completion in zip(answers, completions, strict=True):
        assert completion.token_ids == answer.tokens, f"prompt of {len(answer.prompt)} tokens"
        handed_off = len(answer.prompt) > 32 and not completion.usage.cached_tokens
        assert completion.stats.transport == (transport if handed_off else "")


@pytest.mark.parametrize(
    ("sizes", "architecture", "flags"), [((1, 4), "qwen3", ()), ((4, 2), "deepseek", ("--ep",))]
)
async def test_four_ranks_with_heads_and_latents_that_several_hold(tmp_path, sizes, architecture, flags):
    """Four ranks and two KV heads: two ranks hold each. Latents are held by all."""
    model = make_model(architecture)
    answers = Reference(model).answers([33, 64, 160], OUTPUT)
    deployment = Deployment(tmp_path, save(model, tmp_path / "model"))
    of = {"prefill": sizes[0], "decode": sizes[1]}
    prefill, decode = (deployment.add_worker(role, *OPTIONS, *flags, "--tp", str(of[role])) for role in of)
    gateway = deployment.add_gateway([decode], [prefill])
    with deployment:
        await hand_off(gateway, "shm", answers)
        # Choices of one prompt copy its last page.
        requests = [greedy(each.prompt, OUTPUT, n=2, namespace="copies") for each in answers]
        for answer, completion in zip(answers, await ask(gateway.address, requests), strict=True):
            assert [choice.token_ids for choice in completion.choices] == [answer.tokens] * 2
        assert len(followers(prefill)) == sizes[0] - 1 and len(followers(decode)) == sizes[1] - 1


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
    (follower,) = followers(ranks.decode)
    ranks.decode.kill()
    _, left = psutil.wait_procs([follower], END_SECONDS)
    assert not left, "a follower outlives rank 0"
    assert not ranks.decode.segments(), "it has removed the pool"
    ranks.decode.start()
    ranks.decode.wait_ready()
    (follower,) = followers(ranks.decode)
    follower.kill()  # of an idle worker
    await until(lambda: not ranks.decode.alive, "the idle worker ends", END_SECONDS)


RANK_ZERO = """
import spare_followers, tempfile, time
spare_followers.prepare(["--tp", "2"])
tempfile.tempdir = None  # what forks has asked for it with another environment
from baton.config import DecodeConfig
from baton.rpc import logs
from baton.worker.engine import build_engine
from baton.worker.ranks.leader import Ranks
logs.configure("decode", "error", "json")  # not to the standard output
if {moment!r} == "loading":
    def loaded(self, fingerprint):
        print(self.followers.processes[1].pid, flush=True)
        time.sleep(60)
    Ranks.loaded = loaded
engine = build_engine(DecodeConfig(model="demo", tp=2, kv_tokens=1024), {incarnation})
if {moment!r} == "ending slowly":
    engine.ranks.followers.channels[1].close()
print(engine.ranks.followers.processes[1].pid, flush=True)
time.sleep(60)
"""
INCARNATION = 0x7A9D52


@pytest.mark.parametrize("moment", ["loading", "idle", "stopped", "ending slowly"])
def test_a_killed_rank_0_leaves_nothing(moment, tmp_path):
    """Neither a follower, be it stopped, nor files: its pool is removed by the follower."""

    def segments() -> list[Path]:
        return list(SHM.glob(f"baton-*{INCARNATION:016x}"))

    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = {**os.environ, **ENVIRONMENT, "TMPDIR": str(folder)}
    prelude = RANK_ZERO.format(moment=moment, incarnation=INCARNATION)
    with (tmp_path / "log").open("wb") as log:
        rank_0 = forks(**ENVIRONMENT).start([], stderr=log, environment=environment, prelude=prelude)
    assert rank_0.stdin is not None and rank_0.stdout is not None
    with rank_0.stdin, rank_0.stdout:
        try:
            follower = psutil.Process(int(rank_0.stdout.readline()))
            assert follower.name() == NAME and len(segments()) == (moment != "loading")
            if moment == "stopped":
                follower.suspend()
            if moment == "ending slowly":
                time.sleep(2)  # as a driver that releases a GPU's memory
        finally:
            rank_0.kill()
            rank_0.wait()
    _, left = psutil.wait_procs([follower], 60)  # while it loads it does not look
    assert not left, "the follower outlives rank 0"
    assert moment == "stopped" or not segments()
    reap_orphans()
    assert not segments()
    assert not list(folder.iterdir())
