"""How pages are copied between GPUs, and what of CUDA IPC can be tested where there is no GPU."""

from __future__ import annotations

import random

import pytest
import torch

from baton.transport import (
    EndpointRefused,
    HostPages,
    TransportError,
    offered,
    open_receiver,
    share_gpu,
)
from baton.transport.base import pieces_of, runs_of
from baton.transport.cuda_copy import COPY_ENGINE, CopyStrategy, choose_copy_strategy, item_bytes
from baton.v1 import common_pb2 as pb

KB, MB = 2**10, 2**20


@pytest.mark.parametrize(
    ("pages", "page_bytes", "idle", "busy"),
    [
        (1, 9 * MB, COPY_ENGINE, COPY_ENGINE),
        (512, 9 * MB, COPY_ENGINE, COPY_ENGINE),
        (4, 256 * KB, COPY_ENGINE, COPY_ENGINE),
        (1024, 256 * KB, CopyStrategy(32), CopyStrategy(8)),
        (256, MB, CopyStrategy(32), COPY_ENGINE),
        (2048, 16 * KB, CopyStrategy(32), CopyStrategy(8)),
        (2048, 16 * KB + 8, COPY_ENGINE, COPY_ENGINE),
    ],
)
def test_the_strategy(pages, page_bytes, idle, busy):
    """Of pages at random places."""
    assert choose_copy_strategy(pages, pages, page_bytes, busy=False) == idle
    assert choose_copy_strategy(pages, pages, page_bytes, busy=True) == busy
    assert choose_copy_strategy(pages, pages, page_bytes, busy=False, kernel=False) == COPY_ENGINE


def test_adjacent_pages_are_one_copy():
    assert choose_copy_strategy(2048, 1, 16 * KB, busy=False) == COPY_ENGINE


def test_items_divide_pages():
    for page_bytes in (128, 4096, 9 * MB, 3 * 128 * 7, 4096 * 5 + 256):
        item = item_bytes(page_bytes)
        assert page_bytes % item == 0 and 128 <= item <= 4096
    assert item_bytes(4096 + 64) == 0


def test_runs():
    assert list(runs_of([])) == []
    pairs = [(3, 10), (4, 11), (5, 13), (6, 14), (6, 15), (1, 0), (2, 1)]
    assert list(runs_of(pairs)) == [(3, 10, 2), (5, 13, 2), (6, 15, 1), (1, 0, 2)]
    rng = random.Random(1)
    for _ in range(50):
        pairs = [(rng.randrange(6), rng.randrange(6)) for _ in range(rng.randrange(12))]
        spread = [(s + i, t + i) for s, t, count in runs_of(pairs) for i in range(count)]
        assert spread == pairs


def test_pieces_of_pages_that_ranks_share():
    """Every byte of each target comes once from a source that has it, in as few pieces as that takes."""
    assert pieces_of([(0, 4)], [(0, 2), (2, 4)]) == [(0, 0, 0, 2), (0, 1, 2, 4)]
    assert pieces_of([(0, 2), (2, 4)], [(0, 4)]) == [(0, 0, 0, 2), (1, 0, 2, 4)]
    # Two ranks hold the same head: one of them gives it, and both get it.
    assert pieces_of([(0, 4)], [(0, 2), (0, 2), (2, 4), (2, 4)]) == [(0, 0, 0, 2), (0, 2, 2, 4)]
    assert pieces_of([(0, 2), (0, 2)], [(0, 4)]) == [(0, 0, 0, 2), (1, 0, 0, 2)]
    # Three heads of two ranks against three of one each.
    assert pieces_of([(0, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)]) == [
        (0, 0, 0, 1),
        (0, 1, 1, 2),
        (1, 2, 2, 3),
    ]
    with pytest.raises(TransportError, match="byte 2 of a page lies in none of 2 parts"):
        pieces_of([(0, 4)], [(0, 2), (3, 4)])


def endpoint(**changes) -> pb.CudaIpcEndpoint:
    return pb.CudaIpcEndpoint(handle=bytes(64), page_bytes=64, num_pages=4, pid=1, **changes)


def local() -> HostPages:
    return HostPages(memoryview(bytearray(4 * 64)), 64)


def test_an_exported_pool_is_offered_first():
    endpoints = offered(local(), None, endpoint(offset=512))
    assert [one.WhichOneof("kind") for one in endpoints] == ["cuda_ipc", "grpc"]
    assert endpoints[0].cuda_ipc.offset == 512
    assert [one.WhichOneof("kind") for one in offered(local(), None, endpoint(), ["grpc"])] == ["grpc"]
    assert [one.WhichOneof("kind") for one in offered(local(), None, None)] == ["grpc"]


def test_who_shares_a_gpu():
    def at(uuid: str) -> list:
        it = endpoint()
        it.device_uuid = uuid
        return offered(local(), None, it)

    assert share_gpu(at("a"), at("a"))
    untold = offered(local())
    for ours, theirs in [("a", "b"), ("", "")]:
        assert not share_gpu(at(ours), at(theirs))
    assert not share_gpu(at("a"), untold) and not share_gpu(untold, untold) and not share_gpu([], [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_without_cuda_it_is_refused_and_grpc_taken():
    from baton.transport.cuda_ipc import CudaIpcReceiver

    with pytest.raises(EndpointRefused) as caught:
        await CudaIpcReceiver.open(endpoint(), local())
    assert "torch sees no CUDA device" in str(caught.value)
    opened = await open_receiver(offered(local(), None, endpoint()), local(), peer_address="127.0.0.1:1")
    assert opened.receiver.kind == "grpc"
    assert "cuda_ipc: torch sees no CUDA device" in opened.reason
    await opened.receiver.close()
    with pytest.raises(TransportError, match="no common transport"):
        await open_receiver(offered(local(), None, endpoint()), local(), ["cuda_ipc"])
