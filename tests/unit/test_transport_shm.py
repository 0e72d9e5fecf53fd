from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from segment_owner import page_content

from baton.transport import HostPages, TransportError
from baton.transport.shm import Segment, ShmReceiver, host_id, reap_orphans, segment_endpoint
from baton.v1 import common_pb2 as pb

PAGES = 32


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-baton-") as name:
        yield Path(name)


def exists(endpoint: pb.ShmEndpoint) -> bool:
    return Path(endpoint.path).exists()


def mapped(endpoint: pb.ShmEndpoint) -> bool:
    return endpoint.path in Path("/proc/self/maps").read_text()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Owner:
    def __init__(self, directory: Path, page_bytes: int = 5000, incarnation: int = 1) -> None:
        script = Path(__file__).with_name("segment_owner.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(directory), str(PAGES), str(page_bytes), str(incarnation)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.endpoint = pb.ShmEndpoint.FromString(bytes.fromhex(self.line()))

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str) -> None:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        assert self.line() == "done"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner(directory: Path) -> Iterator[Owner]:
    owner = Owner(directory)
    yield owner
    owner.kill()


def pool(page_bytes: int = 5000, pages: int = PAGES) -> bytearray:
    return bytearray(b"\xee" * page_bytes * pages)


@pytest.mark.parametrize("page_bytes", [8, 5000, 2**20, 2**20 + 8])
async def test_pulled_bytes_are_the_owners(directory: Path, page_bytes: int) -> None:
    owner = Owner(directory, page_bytes)
    try:
        local = pool(page_bytes)
        receiver = ShmReceiver(owner.endpoint, HostPages(memoryview(local), page_bytes))
        order = np.random.default_rng(1)
        for count in (0, 1, 2, 7, PAGES):
            local[:] = b"\xee" * len(local)
            sources, targets = order.permutation(PAGES)[:count], order.permutation(PAGES)[:count]
            await receiver.pull([(int(s), int(t)) for s, t in zip(sources, targets, strict=True)])
            expected = {
                int(t): page_content(int(s), page_bytes) for s, t in zip(sources, targets, strict=True)
            }
            for page in range(PAGES):
                got = bytes(local[page * page_bytes : (page + 1) * page_bytes])
                assert got == expected.get(page, b"\xee" * page_bytes), f"page {page} of a pull of {count}"
        await receiver.close()
    finally:
        owner.kill()


async def test_generations_are_read_live(owner: Owner) -> None:
    receiver = ShmReceiver(owner.endpoint, HostPages(memoryview(pool()), 5000))
    assert receiver.generations([0, 31, 7]) == [2**63, 2**63 + 31, 2**63 + 7]
    owner.ask("bump 7")
    assert receiver.generations([0, 31, 7]) == [2**63, 2**63 + 31, 2**63 + 8]
    await receiver.close()


async def test_a_pull_waits_for_the_owners_step(owner: Owner) -> None:
    local = pool()
    receiver = ShmReceiver(owner.endpoint, HostPages(memoryview(local), 5000))
    assert receiver.sees_steps
    told: list[float] = []
    later = asyncio.create_task(receiver.pull([(1, 1)], 9, told.append))
    await asyncio.sleep(0.02)
    sooner = asyncio.create_task(receiver.pull([(2, 2)], step=8))
    await receiver.pull([(0, 0)])  # overtakes what waits
    assert local[:5000] == page_content(0, 5000) and not later.done()
    owner.ask("retire 7")
    await asyncio.sleep(0.05)
    assert not sooner.done() and local[5000:15_000] == b"\xee" * 10_000
    owner.ask("retire 8")
    await asyncio.wait_for(sooner, 10)
    assert local[10_000:15_000] == page_content(2, 5000)
    await asyncio.sleep(0.5)
    assert not later.done() and not told and local[5000:10_000] == b"\xee" * 5000
    owner.ask("retire 10")
    await asyncio.wait_for(later, 10)
    assert len(told) == 1 and 0 <= told[0] < 0.5, "the wait counts as copying"
    assert local[5000:10_000] == page_content(1, 5000)
    await receiver.close()


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_waiting_pull_ends_without_its_step(owner: Owner, how: str) -> None:
    """Its owner may be dead."""
    local = pool()
    receiver = ShmReceiver(owner.endpoint, HostPages(memoryview(local), 5000))
    pulls = [asyncio.create_task(receiver.pull([(page, page)], step=1)) for page in range(3)]
    await asyncio.sleep(0.02)
    owner.kill()
    if how == "cancelled":
        for pull in pulls:
            pull.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(pull, 5)
        await receiver.pull([(4, 4)])  # the thread is free again
        assert local[20_000:25_000] == page_content(4, 5000)
    await asyncio.wait_for(receiver.close(), 5)
    if how == "closed":
        for pull in pulls:
            with pytest.raises(TransportError, match="closed before"):
                await pull
    assert local[:15_000] == b"\xee" * 15_000


async def test_what_a_caller_raises_fails_its_pull(owner: Owner) -> None:
    def wrong(seconds: float) -> None:
        raise TransportError("not like this")

    receiver = ShmReceiver(owner.endpoint, HostPages(memoryview(pool()), 5000))
    with pytest.raises(TransportError, match="not like this"):
        await receiver.pull([(0, 0)], copied=wrong)
    await receiver.pull([(0, 0)])
    await receiver.close()


async def test_an_owner_that_does_not_tell_its_steps(owner: Owner) -> None:
    """One of an earlier version."""
    owner.endpoint.ClearField("retired_offset")
    receiver = ShmReceiver(owner.endpoint, HostPages(memoryview(pool()), 5000))
    assert not receiver.sees_steps
    with pytest.raises(TransportError, match="steps cannot be seen over shm"):
        await receiver.pull([(0, 0)], step=1)
    await receiver.close()


async def test_the_mapping_survives_the_owners_death(owner: Owner, directory: Path) -> None:
    local = pool()
    receiver = ShmReceiver(owner.endpoint, HostPages(memoryview(local), 5000))
    owner.kill()
    assert len(reap_orphans(directory)) == 1
    assert not exists(owner.endpoint)
    await receiver.pull([(page, page) for page in range(PAGES)])
    for page in range(PAGES):
        assert local[page * 5000 : (page + 1) * 5000] == page_content(page, 5000)
    assert receiver.generations([3]) == [2**63 + 3]
    assert mapped(owner.endpoint)
    await receiver.close()
    gc.collect()
    assert not mapped(owner.endpoint)
    with pytest.raises(TransportError, match="cannot open"):
        ShmReceiver(owner.endpoint, HostPages(memoryview(local), 5000))


async def test_the_mapping_survives_a_graceful_close(owner: Owner) -> None:
    local = pool()
    receiver = ShmReceiver(owner.endpoint, HostPages(memoryview(local), 5000))
    owner.ask("close")
    assert not exists(owner.endpoint)
    await receiver.pull([(5, 0)])
    assert local[:5000] == page_content(5, 5000)
    await receiver.close()


def test_the_receiver_cannot_write(owner: Owner) -> None:
    """In a process of its own: numpy refuses, and a raw write ends it by SIGSEGV."""
    program = textwrap.dedent(
        """
        import ctypes, sys
        from baton.transport import HostPages
        from baton.transport.shm import ShmReceiver
        from baton.v1 import common_pb2 as pb
        endpoint = pb.ShmEndpoint.FromString(bytes.fromhex(sys.argv[1]))
        receiver = ShmReceiver(endpoint, HostPages(memoryview(bytearray(5000)), 5000))
        try:
            receiver._peer.pages[0, 0] = 1
        except ValueError:
            print("refused", flush=True)
        address = receiver._peer.pages.__array_interface__["data"][0]
        ctypes.memset(address, 1, 1)
        print("written")
        """
    )
    command = [sys.executable, "-c", program, owner.endpoint.SerializeToString().hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "refused\n", done.stderr
    assert done.returncode == -11


@pytest.mark.parametrize("pair", [(PAGES, 0), (-1, 0), (0, PAGES), (0, -1)])
async def test_page_ids_out_of_range(owner: Owner, pair: tuple[int, int]) -> None:
    local = pool()
    receiver = ShmReceiver(owner.endpoint, HostPages(memoryview(local), 5000))
    with pytest.raises(TransportError, match="is not one of"):
        await receiver.pull([(0, 0), pair])
    assert local == pool()
    with pytest.raises(TransportError, match="is not one of"):
        receiver.generations([PAGES])
    await receiver.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"host_id": "elsewhere"}, "another host"),
        ({"host_id": ""}, "another host"),
        ({"token": 1}, "not the segment"),
        ({"num_pages": PAGES + 1}, "not the segment"),
        ({"page_bytes": 4096}, "have 4096 bytes, not 5000"),
        ({"path": "/dev/shm/missing"}, "cannot open"),
        ({"path": "/dev/shm/\0"}, "cannot open"),
        ({"path": "/dev/null"}, "not a segment"),
        ({"path": "/dev/shm"}, "cannot map"),
    ],
)
def test_what_is_not_the_endpoints_segment_is_refused(
    owner: Owner, change: dict[str, object], reason: str
) -> None:
    endpoint = pb.ShmEndpoint()
    endpoint.CopyFrom(owner.endpoint)
    for name, value in change.items():
        setattr(endpoint, name, value)
    before = descriptors()
    with pytest.raises(TransportError, match=reason):
        ShmReceiver(endpoint, HostPages(memoryview(pool()), 5000))
    assert descriptors() == before


def test_a_truncated_file_is_refused(owner: Owner) -> None:
    os.truncate(owner.endpoint.path, 9000)
    with pytest.raises(TransportError, match="shorter"):
        ShmReceiver(owner.endpoint, HostPages(memoryview(pool()), 5000))


def test_a_read_only_local_pool_is_refused(owner: Owner) -> None:
    with pytest.raises(ValueError, match="read-only"):
        ShmReceiver(owner.endpoint, HostPages(memoryview(bytes(5000)), 5000))
    with pytest.raises(ValueError, match="no whole pages"):
        ShmReceiver(owner.endpoint, HostPages(memoryview(bytearray(5001)), 5000))


class Slow(ShmReceiver):
    """Stops inside the copy until the test says go on, then copies."""

    def _copy(self, pairs, stop) -> None:  # type: ignore[no-untyped-def, override]
        self.entered.set()
        assert self.go_on.wait(30)
        super()._copy(pairs, stop)
        self.left.set()


def slow(endpoint: pb.ShmEndpoint, local: bytearray) -> Slow:
    receiver = Slow(endpoint, HostPages(memoryview(local), 5000))
    receiver.entered, receiver.go_on, receiver.left = (threading.Event() for _ in range(3))  # type: ignore[attr-defined]
    return receiver


async def test_a_cancelled_pull_returns_after_its_copy_ended(owner: Owner) -> None:
    local = pool()
    receiver = slow(owner.endpoint, local)
    told: list[float] = []
    task = asyncio.create_task(receiver.pull([(0, 0), (1, 1)], copied=told.append))
    await asyncio.to_thread(receiver.entered.wait, 30)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
    receiver.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert receiver.left.is_set()
    assert local == pool() and not told  # and it stopped before the first batch
    await receiver.pull([(2, 2)])
    assert local[10_000:15_000] == page_content(2, 5000)
    await receiver.close()


async def test_close_waits_for_the_running_copy(owner: Owner) -> None:
    local = pool()
    receiver = slow(owner.endpoint, local)
    pulling = asyncio.create_task(receiver.pull([(4, 4)]))
    await asyncio.to_thread(receiver.entered.wait, 30)
    closing = asyncio.create_task(receiver.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    receiver.go_on.set()
    await asyncio.gather(pulling, closing)
    assert local[20_000:25_000] == page_content(4, 5000)
    await receiver.close()
    with pytest.raises(TransportError, match="closed"):
        await receiver.pull([(4, 4)])
    with pytest.raises(TransportError, match="closed"):
        receiver.generations([4])


async def test_the_event_loop_runs_on_during_a_pull(directory: Path) -> None:
    segment = Segment.create(64, 2**20, 1, directory)
    receiver = ShmReceiver(segment_endpoint(segment), HostPages(memoryview(bytearray(64 * 2**20)), 2**20))
    ticks = 0
    pulls = asyncio.gather(*(receiver.pull([(page, page) for page in range(64)]) for _ in range(4)))
    while not pulls.done():
        ticks += 1
        await asyncio.sleep(0)
    await pulls
    assert ticks > 10
    await receiver.close()
    segment.close()


def test_host_id_is_stable_and_names_the_boot() -> None:
    assert host_id() == host_id()
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in host_id()
