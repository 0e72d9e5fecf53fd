"""The `grpc` transport over a real server, and what a receiver makes of a peer that breaks the contract."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import numpy as np
import pytest

from baton.transport import HostPages, TransportError
from baton.transport.grpc import PIECE_BYTES, GrpcReceiver, PageSourceServicer
from baton.v1 import prefill_pb2 as pb
from baton.v1 import prefill_pb2_grpc

PAGES = 24
Answers = AsyncIterator[pb.FetchResponse]


def contents(page_bytes: int, pages: int = PAGES) -> bytes:
    return np.random.default_rng(page_bytes).bytes(page_bytes * pages)


@asynccontextmanager
async def served(servicer: prefill_pb2_grpc.PageSourceServicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PageSourceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def receiving(
    address: str, page_bytes: int, pages: int = PAGES, progress_seconds: float = 10.0
) -> AsyncIterator[tuple[GrpcReceiver, bytearray]]:
    local = bytearray(b"\xee" * page_bytes * pages)
    receiver = GrpcReceiver(address, HostPages(memoryview(local), page_bytes), pages, progress_seconds)
    try:
        yield receiver, local
    finally:
        await receiver.close()


def source(page_bytes: int, pages: int = PAGES) -> PageSourceServicer:
    return PageSourceServicer(HostPages(memoryview(contents(page_bytes, pages)), page_bytes))


def check(local: bytearray, pairs: list[tuple[int, int]], page_bytes: int, pages: int = PAGES) -> None:
    data = contents(page_bytes, pages)
    by_target = {target: origin for origin, target in pairs}
    for page in range(pages):
        got = bytes(local[page * page_bytes : (page + 1) * page_bytes])
        if page in by_target:
            begin = by_target[page] * page_bytes
            assert got == data[begin : begin + page_bytes], f"page {page}"
        else:
            assert got == b"\xee" * page_bytes, f"page {page} was touched"


@pytest.mark.parametrize("page_bytes", [8, 5000, PIECE_BYTES, 2 * PIECE_BYTES + 8])
async def test_pulled_bytes_are_the_sources(page_bytes: int) -> None:
    async with served(source(page_bytes)) as address, receiving(address, page_bytes) as (receiver, local):
        random = np.random.default_rng(3)
        for count in (0, 1, 2, 7, PAGES):
            local[:] = b"\xee" * len(local)
            pairs = [
                (int(a), int(b))
                for a, b in zip(random.permutation(PAGES), random.permutation(PAGES), strict=True)
            ][:count]
            await receiver.pull(pairs)
            check(local, pairs, page_bytes)
        assert receiver.generations([0]) is None


async def test_pulls_at_once_do_not_mix() -> None:
    page_bytes = PIECE_BYTES + 16
    async with served(source(page_bytes)) as address, receiving(address, page_bytes) as (receiver, local):
        pairs = [(page, PAGES - 1 - page) for page in range(PAGES)]
        await asyncio.gather(*(receiver.pull(pairs[start::5]) for start in range(5)))
        check(local, pairs, page_bytes)


async def test_a_cancelled_pull_writes_nothing_more() -> None:
    page_bytes = 2**20
    async with served(source(page_bytes)) as address, receiving(address, page_bytes) as (receiver, local):
        everything = [(page, page) for page in range(PAGES)]
        landed = 0
        for turns in range(1, 40, 3):
            task = asyncio.create_task(receiver.pull(everything))
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            task.cancel()
            await asyncio.wait([task])
            landed += not task.cancelled()
            local[:] = b"\xee" * len(local)
            await receiver.pull([(5, 9)])
            check(local, [(5, 9)], page_bytes)
        assert landed < 13  # the first, after half a millisecond, surely not


async def test_page_ids_out_of_range_are_refused_on_both_sides() -> None:
    async with served(source(64)) as address, receiving(address, 64) as (receiver, local):
        for pair in ((PAGES, 0), (-1, 0), (0, PAGES), (0, -1)):
            with pytest.raises(TransportError, match="is not one of"):
                await receiver.pull([pair])
        # A receiver that believes the peer has more pages than it has.
        receiver._num_pages = 1000
        with pytest.raises(TransportError, match=f"page 999 is not one of the pool's {PAGES}"):
            await receiver.pull([(0, 0), (999, 1)])
        assert local == bytearray(b"\xee" * len(local))
        await receiver.pull([(1, 1)])
        check(local, [(1, 1)], 64)


async def test_the_answers_on_the_wire() -> None:
    """As a foreign client sees them: order, pieces, errors."""
    page_bytes = PIECE_BYTES + 10
    data = contents(page_bytes)
    async with served(source(page_bytes)) as address, grpc.aio.insecure_channel(address) as channel:
        call = prefill_pb2_grpc.PageSourceStub(channel).Fetch()
        for request in (
            pb.FetchRequest(id=7, page_ids=[3, 0]),
            pb.FetchRequest(id=8, page_ids=[1, PAGES]),
            pb.FetchRequest(id=9),
            pb.FetchRequest(id=10, page_ids=[2**32 - 1]),
        ):
            await call.write(request)
        await call.done_writing()
        answers = [answer async for answer in call]
    head = [(a.id, a.index, a.offset, len(a.data), a.last) for a in answers]
    assert head == [
        (7, 0, 0, PIECE_BYTES, False),
        (7, 0, PIECE_BYTES, 10, False),
        (7, 1, 0, PIECE_BYTES, False),
        (7, 1, PIECE_BYTES, 10, True),
        (8, 0, 0, 0, False),
        (9, 0, 0, 0, True),
        (10, 0, 0, 0, False),
    ]
    assert b"".join(a.data for a in answers[:2]) == data[3 * page_bytes : 4 * page_bytes]
    assert b"".join(a.data for a in answers[2:4]) == data[:page_bytes]
    assert [a.error.code for a in answers if a.HasField("error")] == [
        grpc.StatusCode.INVALID_ARGUMENT.value[0]
    ] * 2
    assert await call.code() is grpc.StatusCode.OK


class Scripted(prefill_pb2_grpc.PageSourceServicer):
    """Answers as a test says."""

    def __init__(self, answer: Callable[[pb.FetchRequest], Answers]) -> None:
        self.answer = answer

    async def Fetch(
        self, request_iterator: AsyncIterator[pb.FetchRequest], context: grpc.aio.ServicerContext
    ) -> Answers:
        async for request in request_iterator:
            async for response in self.answer(request):
                yield response


def piece(request: pb.FetchRequest, **changes: object) -> pb.FetchResponse:
    response = pb.FetchResponse(id=request.id, index=0, offset=0, data=b"x" * 64, last=True)
    for name, value in changes.items():
        setattr(response, name, value)
    return response


@pytest.mark.parametrize(
    "changes",
    [
        {"id": 77},
        {"index": 1},
        {"offset": 8},
        {"data": b"x" * 65},
        {"data": b""},
        {"data": b"x" * 63},
        {"last": False, "data": b"x" * 64},
    ],
)
async def test_answers_out_of_turn_fail_the_pull_and_touch_no_other_page(changes: dict[str, object]) -> None:
    async def answer(request: pb.FetchRequest) -> Answers:
        yield piece(request, **changes)

    async with served(Scripted(answer)) as address, receiving(address, 64) as (receiver, local):
        with pytest.raises(TransportError, match=r"turn|early"):
            await receiver.pull([(0, 2)])
        assert local[: 2 * 64] + local[3 * 64 :] == b"\xee" * (PAGES - 1) * 64


async def test_a_pause_fails_the_pull_and_the_next_one_starts_afresh() -> None:
    async def answer(request: pb.FetchRequest) -> Answers:
        if list(request.page_ids) == [0]:
            await asyncio.sleep(60)
        yield piece(request)

    async with (
        served(Scripted(answer)) as address,
        receiving(address, 64, progress_seconds=0.4) as (receiver, local),
    ):
        begin = asyncio.get_running_loop().time()
        with pytest.raises(TransportError, match=r"no page bytes for 0\.4 s"):
            await receiver.pull([(0, 0)])
        assert 0.35 < asyncio.get_running_loop().time() - begin < 5
        await receiver.pull([(1, 1)])
        assert local[64:128] == b"x" * 64


async def test_slow_but_steady_is_no_pause() -> None:
    async def answer(request: pb.FetchRequest) -> Answers:
        for offset in range(0, 64, 8):
            await asyncio.sleep(0.3)
            yield piece(request, offset=offset, data=b"y" * 8, last=offset == 56)

    async with (
        served(Scripted(answer)) as address,
        receiving(address, 64, progress_seconds=2.0) as (receiver, local),
    ):
        await receiver.pull([(0, 0)])
        assert local[:64] == b"y" * 64


async def test_an_idle_stream_is_used_again() -> None:
    opened = 0

    class Counting(PageSourceServicer):
        async def Fetch(self, request_iterator: AsyncIterator[pb.FetchRequest], context: object) -> Answers:
            nonlocal opened
            opened += 1
            async for response in super().Fetch(request_iterator, context):  # type: ignore[arg-type]
                yield response

    servicer = Counting(HostPages(memoryview(contents(64)), 64))
    async with served(servicer) as address, receiving(address, 64, progress_seconds=0.3) as (receiver, local):
        for page in range(3):
            await receiver.pull([(page, page)])
            await asyncio.sleep(0.4)
        assert opened == 1
        await asyncio.gather(*(receiver.pull([(page, page)]) for page in (3, 4)))
        assert opened == 2
        check(local, [(page, page) for page in range(5)], 64)


SERVER = """
import asyncio, grpc.aio
from baton.transport import HostPages
from baton.transport.grpc import PageSourceServicer
from baton.v1 import prefill_pb2_grpc

async def main():
    server = grpc.aio.server()
    servicer = PageSourceServicer(HostPages(memoryview(bytes(1024 * 2**20)), 2**20))
    prefill_pb2_grpc.add_PageSourceServicer_to_server(servicer, server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_peer_killed_in_the_middle_fails_all_pulls() -> None:
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    address = f"127.0.0.1:{int(await server.stdout.readline())}"
    async with receiving(address, 2**20, 64) as (receiver, local):
        receiver._num_pages = 1024
        everything = [(page, page % 64) for page in range(1024)]
        pulls = [asyncio.create_task(receiver.pull(everything)) for _ in range(3)]
        for _ in range(10_000):
            if local.startswith(bytes(8)):
                break
            await asyncio.sleep(0.001)
        server.kill()
        results = await asyncio.wait_for(asyncio.gather(*pulls, return_exceptions=True), 20)
        assert [type(result) for result in results] == [TransportError] * 3
        with pytest.raises(TransportError, match="UNAVAILABLE"):
            await asyncio.wait_for(receiver.pull([(0, 0)]), 20)
    await server.wait()


async def test_nobody_listens() -> None:
    async with receiving("127.0.0.1:1", 64) as (receiver, _):
        with pytest.raises(TransportError, match="UNAVAILABLE"):
            await asyncio.wait_for(receiver.pull([(0, 0)]), 10)


async def test_close_fails_what_waits_and_what_comes() -> None:
    async def answer(request: pb.FetchRequest) -> Answers:
        await asyncio.sleep(60)
        yield piece(request)

    async with served(Scripted(answer)) as address, receiving(address, 64) as (receiver, _):
        pull = asyncio.create_task(receiver.pull([(0, 0)]))
        await asyncio.sleep(0.1)
        await receiver.close()
        with pytest.raises(TransportError, match="closed"):
            await pull
        with pytest.raises(TransportError, match="closed"):
            await receiver.pull([(0, 0)])


async def test_the_server_serves_others_during_a_long_pull() -> None:
    page_bytes = 2**20
    async with served(source(page_bytes)) as address, receiving(address, page_bytes) as (receiver, _):
        busy = late = 0.0
        pull = asyncio.create_task(receiver.pull([(page, page) for page in range(PAGES)]))
        while not pull.done():
            began, worked = time.monotonic(), time.thread_time()
            await asyncio.sleep(0)
            busy = max(busy, time.thread_time() - worked)
            late = max(late, time.monotonic() - began)
        await pull
        assert busy < 0.25
        assert late < 3.0, "others may use the machine, but nothing here waits with the loop"


def test_a_pool_of_no_whole_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole pages of 30"):
        HostPages(memoryview(bytes(100)), 30)


async def test_an_owner_that_dies_while_pages_travel_leaves_nothing_behind() -> None:
    """gRPC leaves a generator of requests waiting, which nobody can close: an unhandled exception each."""
    unhandled: list[str] = []

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        # gRPC's one completion queue gives this loop, which polls it, also the end of a call that an earlier
        # test left behind, whose loop is closed. This loop is open until the test has ended.
        if "Event loop is closed" not in str(context.get("exception")):
            unhandled.append(str(context))

    asyncio.get_running_loop().set_exception_handler(note)

    class Dies(prefill_pb2_grpc.PageSourceServicer):
        async def Fetch(self, request_iterator: AsyncIterator[pb.FetchRequest], context: object) -> Answers:
            async for request in request_iterator:
                yield pb.FetchResponse(id=request.id, index=0, offset=0, data=b"x" * 64)
                await asyncio.sleep(60)

    for delay in (0.0, 0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.1):
        async with served(Dies()) as address:
            local = bytearray(64 * PAGES)
            receiver = GrpcReceiver(address, HostPages(memoryview(local), 64), PAGES)
            pulls = [asyncio.create_task(receiver.pull([(page, page), (9, 9)])) for page in range(3)]
            await asyncio.sleep(delay)
        ended = await asyncio.gather(*pulls, return_exceptions=True)
        assert all(isinstance(one, TransportError) for one in ended)
        del pulls, ended
        await receiver.close()
        del receiver
        gc.collect()
        await asyncio.sleep(0.01)
    gc.collect()
    await asyncio.sleep(0.01)
    assert not unhandled
