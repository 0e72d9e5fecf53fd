"""Pages over UCX between two processes of this machine, by TCP. Skipped where nixl is not installed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from segment_owner import page_content

from baton.transport import EndpointRefused, HostPages, TransportError, offered, open_receiver
from baton.transport import nixl as transport
from baton.transport.nixl import NixlReceiver
from baton.v1 import common_pb2 as pb

pytest.importorskip("nixl", reason="nixl is not installed: pip install 'baton-serve[nixl]'")

PAGES = 64
LARGE = 2**20
START_SECONDS = 60


@pytest.fixture(autouse=True, scope="module")
def tcp() -> Iterator[None]:
    """Else UCX takes shared memory here. Before the first agent is made: UCX reads it once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        yield


class Owner:
    def __init__(self, page_bytes: int = LARGE) -> None:
        script = Path(__file__).with_name("nixl_owner.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(PAGES), str(page_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        line = self.process.stdout.readline() if readable else ""
        assert line.startswith("endpoint "), line
        self.endpoint = pb.NixlEndpoint.FromString(bytes.fromhex(line.split()[1]))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.kill()


def pool(page_bytes: int = LARGE) -> bytearray:
    return bytearray(b"\xee" * page_bytes * PAGES)


def host(local: bytearray, page_bytes: int = LARGE) -> HostPages:
    return HostPages(memoryview(local), page_bytes)


def page(local: bytearray, number: int, page_bytes: int = LARGE) -> bytes:
    return bytes(local[number * page_bytes : (number + 1) * page_bytes])


def everything() -> list[tuple[int, int]]:
    return [(number, number) for number in range(PAGES)]


async def until_first_byte(local: bytearray) -> None:
    deadline = time.monotonic() + 20
    while local[0] == 0xEE and local[1] == 0xEE:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.0005)


@pytest.mark.parametrize("page_bytes", [8, 5000, LARGE + 8])
async def test_pulled_bytes_are_the_owners(page_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BATCH_BYTES", 10 * page_bytes)
    owner = Owner(page_bytes)
    try:
        local = pool(page_bytes)
        receiver = await NixlReceiver.open(owner.endpoint, host(local, page_bytes))
        assert local == pool(page_bytes)  # The probe touches no page.
        order = np.random.default_rng(1)
        for count in (0, 1, 7, PAGES):
            local[:] = pool(page_bytes)
            sources, targets = order.permutation(PAGES)[:count], order.permutation(PAGES)[:count]
            if count == 7:
                sources, targets = np.arange(20, 27), np.arange(30, 37)
            pairs = [(int(s), int(t)) for s, t in zip(sources, targets, strict=True)]
            await receiver.pull(pairs)
            expected = {target: page_content(source, page_bytes) for source, target in pairs}
            for number in range(PAGES):
                got = page(local, number, page_bytes)
                assert got == expected.get(number, b"\xee" * page_bytes), f"page {number} of {count}"
        assert receiver.generations([0]) is None
        await receiver.close()
        await receiver.close()
        with pytest.raises(TransportError, match="closed"):
            await receiver.pull([(0, 0)])
    finally:
        owner.kill()


async def test_pages_out_of_range_and_other_pools_are_refused(owner: Owner) -> None:
    local = pool()
    receiver = await NixlReceiver.open(owner.endpoint, host(local))
    for pair in [(PAGES, 0), (-1, 0), (0, PAGES), (0, -1)]:
        with pytest.raises(TransportError, match="is not one of"):
            await receiver.pull([(0, 0), pair])
    assert local == pool()
    await receiver.close()
    changes: list[tuple[dict[str, object], str]] = [
        ({"page_bytes": 4096}, "the peer's pages have"),
        ({"memory": "VRAM"}, "ours in DRAM"),
        ({"metadata": b"nothing"}, "the peer's agent cannot be reached"),
        ({"agent": "another"}, "the metadata are of agent"),
        ({"address": 4096}, "the peer's memory cannot be read"),
    ]
    for change, refusal in changes:
        endpoint = pb.NixlEndpoint()
        endpoint.CopyFrom(owner.endpoint)
        for name, value in change.items():
            setattr(endpoint, name, value)
        with pytest.raises(EndpointRefused) as refused:
            await NixlReceiver.open(endpoint, host(local))
        assert refusal in str(refused.value), change


async def test_an_owner_killed_in_mid_pull_and_its_successor(owner: Owner) -> None:
    local = pool()
    receiver = await NixlReceiver.open(owner.endpoint, host(local))
    pulls = [asyncio.create_task(receiver.pull(everything())) for _ in range(3)]
    await until_first_byte(local)
    owner.kill()
    results = await asyncio.wait_for(asyncio.gather(*pulls, return_exceptions=True), 30)
    assert [type(result) for result in results] == [TransportError] * 3
    still = bytes(local)
    await asyncio.sleep(0.2)
    assert local == still
    with pytest.raises(TransportError, match="reached"):
        await asyncio.wait_for(receiver.pull([(0, 0)]), 30)
    await receiver.close()
    successor = Owner()
    try:
        assert successor.endpoint.agent != owner.endpoint.agent
        again = await NixlReceiver.open(successor.endpoint, host(local))
        local[:] = pool()
        await again.pull([(5, 9)])
        assert page(local, 9) == page_content(5, LARGE)
        await again.close()
    finally:
        successor.kill()


async def test_a_cancelled_pull_ends_with_its_batch(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BATCH_BYTES", 4 * LARGE)
    local = pool()
    receiver = await NixlReceiver.open(owner.endpoint, host(local))
    pull = asyncio.create_task(receiver.pull(everything()))
    await until_first_byte(local)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(pull, 30)
    still = bytes(local)
    assert still.endswith(b"\xee" * LARGE)
    await asyncio.sleep(0.3)
    assert local == still
    await receiver.pull([(3, 63)])
    assert page(local, 63) == page_content(3, LARGE)
    await receiver.close()


@pytest.mark.parametrize("how", ["stalled", "cancelled", "closed"])
async def test_nothing_is_written_after_a_pull_from_a_frozen_owner(owner: Owner, how: str) -> None:
    """The owner stops, the pull ends, the owner goes on: what it sends then must not arrive."""
    local = pool()
    receiver = await NixlReceiver.open(
        owner.endpoint, host(local), stall_seconds=1 if how == "stalled" else 60
    )
    pull = asyncio.create_task(receiver.pull(everything()))
    await until_first_byte(local)
    os.kill(owner.process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    await asyncio.sleep(0.1)
    if how == "cancelled":
        pull.cancel()
    closing = asyncio.create_task(receiver.close()) if how == "closed" else None
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else TransportError):
        await asyncio.wait_for(pull, 30)
    assert 0.5 < time.monotonic() - begun < 20
    still = bytes(local)
    assert b"\xee" * LARGE in still
    os.kill(owner.process.pid, signal.SIGCONT)
    await asyncio.sleep(0.5)
    # The receiver's next reads are what would let late bytes in. UCX may have ended the owner (see the docs).
    with contextlib.suppress(TransportError):
        await asyncio.wait_for(receiver.pull([(0, 0), (1, 1)]), 90)
    assert local[2 * LARGE :] == still[2 * LARGE :]
    await asyncio.wait_for(closing or receiver.close(), 30)


async def test_nixl_comes_before_grpc_where_both_name_it(owner: Owner) -> None:
    local = host(pool())
    endpoints = offered(local, None, None, ["nixl", "grpc"], "127.0.0.1:1", owner.endpoint)
    for kinds, chosen in ((["nixl", "grpc"], "nixl"), ([], "grpc")):
        opened = await open_receiver(endpoints, local, kinds, "127.0.0.1:1")
        assert opened.receiver.kind == chosen
        await opened.receiver.close()
    owner.kill()
    opened = await open_receiver(endpoints, local, ["nixl", "grpc"], "127.0.0.1:1")
    assert opened.reason.startswith("grpc chosen; nixl: the peer's agent cannot be reached")
    await opened.receiver.close()
