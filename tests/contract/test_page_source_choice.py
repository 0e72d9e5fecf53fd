"""Which transport two peers agree on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest

from baton.transport import HostPages, Segment, TransportError, check_kinds, offered, open_receiver
from baton.transport.grpc import PageSourceServicer
from baton.v1 import common_pb2, prefill_pb2_grpc

PAGE_BYTES, PAGES = 4096, 4


@pytest.fixture
def segment() -> Iterator[Segment]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-baton-") as name:
        segment = Segment.create(PAGES, PAGE_BYTES, 1, Path(name))
        segment.pages[:] = b"\x05" * (PAGES * PAGE_BYTES)
        yield segment
        segment.close()


def offer(segment: Segment | None, *kinds: str, address: str = "") -> list[common_pb2.Endpoint]:
    return offered(HostPages(local(), PAGE_BYTES), segment, None, kinds, address)


def host(pages: memoryview, page_bytes: int = PAGE_BYTES) -> HostPages:
    return HostPages(pages, page_bytes)


def local() -> memoryview:
    return memoryview(bytearray(PAGES * PAGE_BYTES))


def test_offers(segment: Segment) -> None:
    assert [e.WhichOneof("kind") for e in offer(segment)] == ["shm", "grpc"]
    assert [e.WhichOneof("kind") for e in offer(None)] == ["grpc"]
    assert [e.WhichOneof("kind") for e in offer(segment, "grpc")] == ["grpc"]
    shm, grpc_ = offer(segment, address="host:1")
    assert (shm.shm.path, shm.shm.num_pages, shm.shm.page_bytes) == (str(segment.path), PAGES, PAGE_BYTES)
    assert (grpc_.grpc.address, grpc_.grpc.num_pages, grpc_.grpc.page_bytes) == ("host:1", PAGES, PAGE_BYTES)
    with pytest.raises(ValueError, match="unknown transport 'rdma': use cuda_ipc, shm, nixl, grpc"):
        check_kinds(["rdma"])


async def test_shm_is_preferred_and_used(segment: Segment) -> None:
    pages = local()
    opened = await open_receiver(reversed(offer(segment)), host(pages), peer_address="127.0.0.1:1")
    assert (opened.receiver.kind, opened.reason) == ("shm", "shm chosen; cuda_ipc: not offered")
    await opened.receiver.pull([(0, 1)])
    assert bytes(pages[PAGE_BYTES : 2 * PAGE_BYTES]) == b"\x05" * PAGE_BYTES
    await opened.receiver.close()


async def test_what_cannot_be_opened_falls_back_to_grpc_with_a_reason(segment: Segment) -> None:
    server = grpc.aio.server()
    servicer = PageSourceServicer(host(segment.pages))
    prefill_pb2_grpc.add_PageSourceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    endpoints = offer(segment)
    endpoints[0].shm.path = "/dev/shm/missing"
    pages = local()
    opened = await open_receiver(endpoints, host(pages), peer_address=address)
    assert opened.receiver.kind == "grpc"
    assert opened.reason.startswith("grpc chosen; cuda_ipc: not offered; shm: cannot open /dev/shm/missing")
    await opened.receiver.pull([(0, 3)])
    assert bytes(pages[3 * PAGE_BYTES :]) == b"\x05" * PAGE_BYTES
    await opened.receiver.close()
    await server.stop(None)


async def test_the_receivers_kinds_bind(segment: Segment) -> None:
    opened = await open_receiver(offer(segment), host(local()), ["grpc"], "127.0.0.1:1")
    assert opened.receiver.kind == "grpc"
    await opened.receiver.close()
    opened = await open_receiver(offer(segment), host(local()), ["grpc", "shm"], "127.0.0.1:1")
    assert opened.receiver.kind == "grpc"
    await opened.receiver.close()


@pytest.mark.parametrize(
    ("kinds", "peer_kinds", "page_bytes", "reason"),
    [
        (["shm"], ["grpc"], PAGE_BYTES, r"\(shm: not offered\)"),
        ([], ["grpc"], PAGE_BYTES, r"grpc: the peer names no address"),
        ([], ["shm", "grpc"], 2048, r"shm: .* 4096 bytes, not 2048; grpc: the peer names"),
    ],
)
async def test_no_common_transport_names_every_reason(
    segment: Segment, kinds: list[str], peer_kinds: list[str], page_bytes: int, reason: str
) -> None:
    with pytest.raises(TransportError, match=f"no common transport .*{reason}"):
        await open_receiver(offer(segment, *peer_kinds), host(local(), page_bytes), kinds)


async def test_other_page_sizes_are_refused_by_grpc(segment: Segment) -> None:
    with pytest.raises(TransportError, match="grpc: the peer's pages have 4096 bytes, not 2048"):
        await open_receiver(offer(segment, "grpc"), host(local(), 2048), peer_address="127.0.0.1:1")
