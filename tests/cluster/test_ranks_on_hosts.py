"""Workers whose ranks are on two hosts: the tokens of one rank, and the end of all when one host ends.

Both "hosts" are this machine; nothing is shared between their processes but the loopback interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from asking import ask, greedy
from checkpoints import make_model, save
from deployment import Deployment
from hosts.host import CannotMakeHosts
from hosts.lan import Lan, LanDeployment
from polling import until
from process import READY_SECONDS, Process
from reference import Answer, Reference
from spare_followers import NAME

from ports import free_port

OUTPUT = 32
LENGTHS = [1, 33, 64, 160]
OPTIONS = ("--kv-tokens", "4096")
END_SECONDS = 12.0
"""Within which ranks end that see the end of another: a link's own timeout is 15 s."""
CUT_SECONDS = 60.0
"""Within which hosts notice that they do not reach each other: 15 s, or 30 in the middle of a sum."""


class RankHost(Process):
    """`baton serve ROLE --node-rank 1`: it serves nothing."""

    def wait_ready(self) -> None:
        words = self._read_line(time.monotonic() + READY_SECONDS).split()
        assert words and words[0] == "ready", f"{self.name} said {words}: {self.tail()}"


def followers(process: Process) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    return [each for each in found if each.name() == NAME]


@dataclass
class Worker:
    """On two hosts."""

    first: Process
    other: RankHost

    def end(self) -> None:
        assert self.other._popen is not None
        assert self.other._popen.wait(END_SECONDS) == 0


def add(deployment: Deployment, role: str, ranks: int) -> Worker:
    flags = [*OPTIONS, "--tp", str(ranks), "--nnodes", "2", "--master", f"127.0.0.1:{free_port()}"]
    first = deployment.add_worker(role, *flags)
    other = RankHost(role, f"{role}-host-1", [*first.flags, "--node-rank", "1"], deployment.folder)
    return Worker(first, other)


@dataclass
class Site:
    deployment: Deployment
    answers: list[Answer]
    decode: Worker
    prefill: Worker
    single: Process
    """A decode node of one rank."""
    pairs: dict[str, Process]
    """Gateways."""


@pytest.fixture(scope="module")
def site(qwen3: tuple[Path, Reference], tmp_path_factory, deployments) -> Iterator[Site]:
    """Two KV heads: each host holds one of them, the decode node's in two ranks."""
    folder = tmp_path_factory.mktemp("rank-hosts")
    deployment = Deployment(folder, qwen3[0])
    decode, prefill = add(deployment, "decode", 4), add(deployment, "prefill", 2)
    single, prefill_of_one = (deployment.add_worker(role, *OPTIONS) for role in ("decode", "prefill"))
    pairs = {
        "1 to 2": deployment.add_gateway([decode.first], [prefill_of_one]),
        "2 to 1": deployment.add_gateway([single], [prefill.first]),
        "2 to 2": deployment.add_gateway([decode.first], [prefill.first]),
        "both": deployment.add_gateway([decode.first, single], (), "--routing", "round-robin"),
    }
    for worker in (decode, prefill):
        worker.other.start()
    with deployment:
        for worker in (decode, prefill):
            worker.other.wait_ready()
        deployments.append(deployment)
        yield Site(deployment, qwen3[1].answers(LENGTHS, OUTPUT), decode, prefill, single, pairs)
    prefill.end()


@pytest.mark.parametrize("hosts", ["1 to 2", "2 to 1", "2 to 2"])
async def test_pages_are_handed_off_between_workers_on_one_and_on_two_hosts(site, hosts):
    """The second time all nodes have the prompts cached."""
    for cached in (False, True):
        requests = [greedy(each.prompt, OUTPUT, namespace=hosts) for each in site.answers]
        for answer, completion in zip(
            site.answers, await ask(site.pairs[hosts].address, requests), strict=True
        ):
            assert completion.token_ids == answer.tokens, f"prompt of {len(answer.prompt)} tokens"
            if not cached and len(answer.prompt) > 32:
                assert completion.stats.transport == "grpc"
    # Choices of one prompt copy its last page on each host.
    requests = [greedy(each.prompt, OUTPUT, n=2, namespace="copies") for each in site.answers]
    for answer, completion in zip(site.answers, await ask(site.pairs[hosts].address, requests), strict=True):
        assert [choice.token_ids for choice in completion.choices] == [answer.tokens] * 2


async def test_a_worker_tells_its_ranks_on_all_hosts(site):
    told = site.decode.first.info().ranks
    assert [rank.rank for rank in told] == [0, 1, 2, 3]
    (own,) = followers(site.decode.first)
    others = [each.pid for each in followers(site.decode.other)]
    assert [rank.pid for rank in told] == [site.decode.first.pid, own.pid, *sorted(others)]
    assert all(rank.resident_bytes > 2**20 and rank.host for rank in told)


async def test_a_worker_ends_with_one_of_its_hosts_and_its_requests_go_on_elsewhere(site):
    decode = site.decode
    own, others = followers(decode.first), followers(decode.other)
    asked = asyncio.create_task(
        ask(site.pairs["both"].address, [greedy(each.prompt, OUTPUT) for each in site.answers * 3])
    )
    await until(lambda: decode.first.load().running, "requests run there")
    decode.other.kill()
    for answer, completion in zip(site.answers * 3, await asked, strict=True):
        assert completion.token_ids == answer.tokens
    await until(lambda: not decode.first.alive, "rank 0 ends", END_SECONDS)
    _, left = psutil.wait_procs([*own, *others], END_SECONDS)
    assert not left, "ranks are left"
    assert not [path for path in decode.first.segments() if path.exists()]

    decode.first.start()  # before the other host: it waits
    decode.other.start()
    decode.first.wait_ready()
    decode.other.wait_ready()
    work = [greedy(each.prompt, OUTPUT, namespace="again") for each in site.answers]
    completions = await ask(site.pairs["2 to 2"].address, work)
    assert [each.token_ids for each in completions] == [answer.tokens for answer in site.answers]
    others = followers(decode.other)
    decode.first.kill()  # rank 0's host is gone
    _, left = psutil.wait_procs(others, END_SECONDS)
    assert not left, "ranks outlive rank 0"
    assert decode.other._popen is not None
    assert decode.other._popen.wait(END_SECONDS) == 70


async def test_latents_are_on_all_hosts(tmp_path):
    model = make_model("deepseek")
    answers = Reference(model).answers(LENGTHS, OUTPUT)
    deployment = Deployment(tmp_path, save(model, tmp_path / "model"))
    decode, prefill = add(deployment, "decode", 2), deployment.add_worker("prefill", *OPTIONS)
    gateway = deployment.add_gateway([decode.first], [prefill])
    decode.other.start()
    with deployment:
        decode.other.wait_ready()
        for choices in (1, 2):
            requests = [greedy(each.prompt, OUTPUT, n=choices) for each in answers]
            for answer, completion in zip(answers, await ask(gateway.address, requests), strict=True):
                assert [each.token_ids for each in completion.choices] == [answer.tokens] * choices
    decode.end()


async def test_ranks_on_hosts_of_their_own_end_when_the_cable_between_them_is_cut(qwen3, tmp_path):
    """Network namespaces: neither the loopback nor names are shared."""
    with contextlib.ExitStack() as ends:
        try:
            lan = Lan()
        except CannotMakeHosts as error:
            pytest.skip(f"no network namespaces here: {error}")
        ends.callback(lan.close)
        deployment = LanDeployment(tmp_path, qwen3[0], lan)
        flags = [*OPTIONS, "--tp", "2", "--nnodes", "2", "--master", f"{lan.left.address}:29500"]
        first = deployment.at(lan.left).add_worker("decode", *flags)
        gateway = deployment.at(lan.front).add_gateway([first])
        other = RankHost("decode", "decode-host-1", [*first.flags, "--node-rank", "1"], tmp_path)
        other.prelude = f"from hosts.host import enter; enter({lan.right.namespace!r})"
        other.start()
        ends.callback(lambda: other.alive and other.kill())
        deployment.start()
        ends.callback(deployment._abandon)
        other.wait_ready()
        ranks = followers(other)
        answers = qwen3[1].answers(LENGTHS, OUTPUT)
        completions = await ask(gateway.outside, [greedy(each.prompt, OUTPUT) for each in answers])
        assert [each.token_ids for each in completions] == [answer.tokens for answer in answers]
        lan.left_right.cut()
        await until(lambda: not first.alive, "rank 0 ends", CUT_SECONDS)
        _, left = psutil.wait_procs(ranks, CUT_SECONDS)
        assert not left, "rank 1 waits for rank 0"
        assert other._popen is not None
        assert other._popen.wait(END_SECONDS) == 70
