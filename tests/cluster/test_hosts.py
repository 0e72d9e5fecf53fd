"""Prefill and decode nodes on two hosts (network namespaces), the gateway on a third: pages and tokens go
over cables that are slow, bad, cut and healed. No process is started again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
from asking import ask, greedy
from deployment import Deployment
from hosts.cables import LongWire
from hosts.host import CannotMakeHosts
from hosts.lan import Lan, LanDeployment
from polling import until
from process import Process
from reference import Answer, Reference

from baton.client import Completion, Stats

LENGTHS = [17, 64, 160, 300]
OUTPUT = 24
LONG = 900
"""Tokens of a prompt whose pages take seconds over a throttled cable: 768 bytes of KV each."""
PAGE_SIZE = 16
KBIT = 1500
DELAY_SECONDS, LOSS = 0.020, 0.01
PULLED_BYTES = 100_000
STREAMED = 128
STREAM_KBIT = 16
"""So that streams last: 2 s after the first row they still flow. At 64 they had ended after 1 s."""
BATCHES = 3
NOTICED_SECONDS = 60.0
"""A request that a cut has hit has gone on, and ended, by then; it takes some 8 s where nothing else runs."""
HEALED_SECONDS = 12.0
"""Peers find each other again: the longest pause between tries is 2 s."""
WORKER = ("--transports", "grpc", "--kv-tokens", "16384", "--page-size", str(PAGE_SIZE))
numbers = itertools.count()
Asking = asyncio.Future[tuple[list[Completion], list[Completion]]]


@dataclass(frozen=True)
class Site:
    """A deployment on three hosts, with the incarnations that its processes have to keep."""

    lan: Lan
    deployment: LanDeployment
    crossed: Process
    """A gateway that knows the left decode node and the right prefill node: every prompt crosses."""
    near: Process
    """Likewise, but it knows both prefill nodes and takes them in turns: every other prompt crosses."""
    both: Process
    """A gateway that knows all nodes."""

    @property
    def left(self) -> Process:
        return self.deployment.of("decode")[0]

    async def ask(self, gateway: Process, answers: list[Answer], output: int = OUTPUT) -> list[Completion]:
        """Prompts that no tree holds; every token must be as transformers has it."""
        space = f"space {next(numbers)}"
        requests = [greedy(answer.prompt, output, namespace=space) for answer in answers]
        completions = await ask(gateway.outside, requests)
        for completion, answer in zip(completions, answers, strict=True):
            assert completion.token_ids == answer.tokens[:output]
        return completions

    @contextlib.asynccontextmanager
    async def pulling(self, long: list[Answer]) -> AsyncIterator[Asking]:
        """Long prompts' pages are on their way from right to left, slowly; to be awaited: the answers through
        `crossed` and through `near`."""
        # A node is connected to when it is first named, and passed over until it is.
        await self.ask(self.near, long, 1)
        await self.until_healed()
        wire = self.lan.left_right
        wire.throttle(KBIT)
        before = wire.carried
        asking = asyncio.gather(self.ask(self.crossed, long[:1], 8), self.ask(self.near, long, 8))
        try:
            await until(lambda: wire.carried - before > PULLED_BYTES, "a pull is under way")
            assert self.left.load().pulls
            yield asking
        finally:
            asking.cancel()
            wire.throttle(0)

    async def until_both_decode(self, answers: list[Answer]) -> None:
        """Both decode nodes are used; in one batch a prompt may be answered before the next is there."""
        used: set[str] = set()
        for _ in range(5):
            used |= {stats.decode_address for stats in stats_of(await self.ask(self.both, answers))}
        assert used == {each.address for each in self.deployment.of("decode")}

    async def until_healed(self) -> float:
        """Every process has all its peers again, and nothing is wrong with any. Returns how long it took."""

        def well() -> bool:
            processes = self.deployment.processes
            peers = [peer for process in processes for peer in process.info().peers]
            return all(peer.connected for peer in peers) and not any(p.load().problems for p in processes)

        return await until(well, "all peers connected", HEALED_SECONDS)

    def status(self) -> subprocess.CompletedProcess[str]:
        """`baton status`, at the front."""
        words = [sys.executable, "-m", "baton.cli.main", "status", "--server", self.both.address]
        command = self.lan.front.command(*words)
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def lan() -> Iterator[Lan]:
    try:
        made = Lan()
    except CannotMakeHosts as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def site(lan, qwen3, tmp_path_factory, deployments: list[Deployment]) -> Iterator[Site]:
    deployment = LanDeployment(tmp_path_factory.mktemp("hosts"), qwen3[0], lan)
    prefill, decode = [], []
    for host in (lan.left, lan.right):
        prefill.append(deployment.at(host).add_worker("prefill", *WORKER))
        decode.append(deployment.at(host).add_worker("decode", *WORKER, "--local-prefill-tokens", "0"))
    deployment.at(lan.front)
    crossed = deployment.add_gateway(decode[:1], prefill[1:])
    near = deployment.add_gateway(decode[:1], prefill, "--routing", "round-robin", "--split", "always")
    both = deployment.add_gateway(decode, prefill)
    with deployment:
        deployments.append(deployment)
        yield Site(lan, deployment, crossed, near, both)
        for process in deployment.processes:
            assert "Traceback" not in process.log.read_text(), process.log


@pytest.fixture(autouse=True)
def never_restarted(site: Site) -> Iterator[None]:
    """All processes live through every test. (That they then hold nothing, another fixture sees.)"""
    before = {process.name: process.incarnation for process in site.deployment.processes}
    yield
    for wire in site.lan.wires:
        wire.heal()
    assert {each.name: each.info().incarnation for each in site.deployment.processes} == before


@pytest.fixture(scope="module")
def short(qwen3: tuple[object, Reference]) -> list[Answer]:
    return qwen3[1].answers(LENGTHS, OUTPUT)


@pytest.fixture(scope="module")
def long(qwen3: tuple[object, Reference]) -> list[Answer]:
    return qwen3[1].answers([LONG, LONG - 7], OUTPUT, seed=1)


def stats_of(completions: list[Completion]) -> list[Stats]:
    return [completion.stats for completion in completions if completion.stats is not None]


def crossed_over(site: Site, completions: list[Completion]) -> bool:
    """All came from the other host, by gRPC."""
    right = site.deployment.of("prefill")[1].address
    return all(
        (s.prefill_address, s.transport) == (right, "grpc") and s.pulled_pages > 0
        for s in stats_of(completions)
    )


async def test_pages_cross_the_wire(site, short):
    before = site.lan.left_right.carried
    completions = await site.ask(site.crossed, short)
    assert crossed_over(site, completions)
    pulled = sum(each.stats.pulled_bytes for each in completions)
    assert site.lan.left_right.carried - before > pulled > 100_000
    await site.until_both_decode(short)


async def test_delay_and_loss(site, short):
    lan = site.lan
    cables = {wire: LongWire(wire.ends[0][0], wire.ends[1][0], DELAY_SECONDS, LOSS) for wire in lan.wires}
    with contextlib.ExitStack() as stack:
        for wire, cable in cables.items():
            stack.enter_context(lan.replaced(wire, cable))
        started = time.monotonic()
        for _ in range(BATCHES):
            assert crossed_over(site, await site.ask(site.crossed, short))
            await site.ask(site.both, short)
        took, lost = time.monotonic() - started, sum(cable.dropped for cable in cables.values())
    print(f"{2 * BATCHES} batches, {1000 * DELAY_SECONDS:g} ms each way: {took:.1f} s, {lost} packets lost")
    assert took > 2 * BATCHES * 4 * DELAY_SECONDS and lost


async def test_a_cut_in_mid_pull(site, long, short):
    wire, deployment = site.lan.left_right, site.deployment
    async with site.pulling(long) as asking:
        wire.cut()
        started = time.monotonic()
        alone, near = await asking
        noticed = time.monotonic() - started
    # The left decode node has computed the prompt itself, or gone to the prefill node of its own host.
    assert [s.prefill_address for s in stats_of(alone)] == [""]
    # Of what it pulls, the pages of a first chunk may have come.
    assert all(s.pulled_pages < LONG // PAGE_SIZE for s in stats_of(alone))
    moved = {s.prefill_address for s in stats_of(near) if s.handoff_retries}
    assert deployment.of("prefill")[0].address in moved and deployment.of("prefill")[1].address not in moved
    assert all(s.handoff_retries >= 1 for s in stats_of(alone)) and noticed < NOTICED_SECONDS
    # While the cable is cut nothing is held on either side, and requests are served.
    deployment.assert_idle(NOTICED_SECONDS)
    await site.ask(site.near, short)
    await site.ask(site.crossed, short)
    wire.heal()
    healed = await site.until_healed()
    assert crossed_over(site, await site.ask(site.crossed, short))
    print(f"requests ended {noticed:.1f} s after the cut; peers connected {healed:.1f} s after it was healed")


async def test_a_host_that_is_cut_off_while_it_serves(site, long, short, qwen3):
    lan, deployment = site.lan, site.deployment
    right = deployment.of("decode")[1]
    answers = qwen3[1].answers([20, 30, 40, 50], STREAMED, seed=2)
    lan.front_right.throttle(STREAM_KBIT)
    async with site.pulling(long) as asking:
        streams = asyncio.create_task(site.ask(site.both, answers, STREAMED))
        await until(lambda: right.load().running, "the right decode node streams")
        lan.front_right.cut()
        lan.left_right.cut()
        lan.front_right.throttle(0)
        started = time.monotonic()
        await asking
        completions = await streams
        noticed = time.monotonic() - started
    assert any(s.resumed for s in stats_of(completions)) and noticed < NOTICED_SECONDS
    assert all(s.decode_address == site.left.address for s in stats_of(completions) if s.resumed)
    deployment.assert_idle(NOTICED_SECONDS)
    await site.ask(site.both, short)
    lan.front_right.heal()
    lan.left_right.heal()
    healed = await site.until_healed()
    assert crossed_over(site, await site.ask(site.crossed, short))
    await site.until_both_decode(short)
    await site.until_healed()  # a connection that slept through the cut may have timed out since
    status = await asyncio.to_thread(site.status)
    assert status.returncode == 0, status.stdout + status.stderr
    print(f"requests ended {noticed:.1f} s after the cut; peers connected {healed:.1f} s after it was healed")
