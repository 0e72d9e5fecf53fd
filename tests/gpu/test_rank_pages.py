"""Pages between workers of different numbers of ranks, each with its own pool: right bytes everywhere."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from owners import gpus
from part_owner import LEAD, UNTOUCHED, content

from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.kv_groups import FULL
from baton.step_cost import StepCost
from baton.transport import TransportError, cuda_runtime
from baton.transport.cuda_ipc import CudaIpcReceiver, cuda_ipc_endpoint, local_part
from baton.transport.cuda_pages import CudaPages, PagePart
from baton.v1 import common_pb2 as pb
from baton.worker import host_memory
from baton.worker.host_memory import HostMemory

PAGES = 24
HEADS = 4
HEAD = 3 * 4096 + 512
"""Bytes of a head in a page."""
PAGE = HEADS * HEAD


def spans(ranks: int) -> list[tuple[int, int]]:
    """First byte and size of each rank's heads; more ranks than heads share them."""
    if ranks > HEADS:
        return [(rank * HEADS // ranks * HEAD, HEAD) for rank in range(ranks)]
    size = HEADS // ranks * HEAD
    return [(rank * size, size) for rank in range(ranks)]


class PartOwner:
    def __init__(self, gpu: int, first: int, size: int, filled: bool) -> None:
        script = Path(__file__).with_name("part_owner.py")
        arguments = [str(each) for each in (gpu, PAGES, PAGE, first, size, int(filled))]
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def part(self) -> pb.CudaIpcPart:
        return pb.CudaIpcPart.FromString(bytes.fromhex(self.process.stdout.readline()))

    def hash(self) -> str:
        print("hash", file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def owners(parts: list[tuple[int, int]], filled: bool, count: int = 1):
    """On `count` GPUs in turn, the last first, so that pages cross between GPUs whatever the sizes."""
    found = [PartOwner(count - 1 - rank % count, *part, filled) for rank, part in enumerate(parts)]
    try:
        yield found, [owner.part() for owner in found]
    finally:
        for owner in found:
            owner.process.kill()
            owner.process.communicate()


def endpoint_of(parts: list[pb.CudaIpcPart], local: CudaPages) -> pb.CudaIpcEndpoint:
    """As rank 0 publishes it; of one rank without parts."""
    endpoint = cuda_ipc_endpoint(local, None, parts)
    endpoint.pid, endpoint.num_pages = parts[0].pid, PAGES
    if len(parts) == 1:
        endpoint.handle, endpoint.offset = parts[0].handle, parts[0].offset
        del endpoint.parts[:]
    return endpoint


def local_pages(ranks: int, others: list[pb.CudaIpcPart]) -> CudaPages:
    """This process is rank 0, on the first GPU."""
    size = spans(ranks)[0][1]
    memory = torch.full((LEAD + (PAGES + 1) * size,), UNTOUCHED, dtype=torch.uint8, device="cuda:0")
    pool = memory[LEAD:].view(PAGES + 1, size)
    parts = [PagePart(0, pool), *(local_part(part, PAGES, pool.device) for part in others)]
    cuda_runtime.use(pool.device)
    torch.cuda.synchronize()
    return CudaPages(pool, PAGES, parts)


def expected(pairs: list[tuple[int, int]], first: int, size: int) -> str:
    """The hash of a part that pages have been pulled into."""
    by_target = {target: source for source, target in pairs}
    untouched = torch.full((size,), UNTOUCHED, dtype=torch.uint8)
    pages = [
        content(by_target[page], PAGE)[first : first + size] if page in by_target else untouched
        for page in range(PAGES)
    ]
    return hashlib.sha256(torch.stack(pages).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("other_gpu", gpus())
@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (8, 2), (1, 8)])
async def test_pulled_bytes_are_the_owners(theirs, ours, other_gpu):
    rng = random.Random(10 * theirs + ours)
    # Single pages, and runs of neighbours.
    pairs = [(page, page + 3) for page in range(2, 9)]
    sources, targets = [0, 1, *range(9, PAGES)], [0, 1, 2, *range(12, PAGES)]
    pairs += zip(rng.sample(sources, 8), rng.sample(targets, 8), strict=True)
    used = 1 + other_gpu
    with (
        owners(spans(theirs), True, used) as (_, held),
        owners(spans(ours)[1:], False, used) as (followers, parts),
    ):
        local = local_pages(ours, parts)
        receiver = await CudaIpcReceiver.open(endpoint_of(held, local), local)
        await receiver.pull(pairs)
        await receiver.close()
        assert len(local.devices) == (2 if other_gpu and ours > 1 else 1), "each GPU copies its own part"
        first, size = spans(ours)[0]
        mine = hashlib.sha256(local.pool[:PAGES].cpu().numpy().tobytes()).hexdigest()
        assert mine == expected(pairs, first, size)
        for (first, size), follower in zip(spans(ours)[1:], followers, strict=True):
            assert follower.hash() == expected(pairs, first, size)
        # Whole pages again, for transports through the host.
        reader = local.reader()
        for source, target in pairs:
            assert bytes(await reader.read(target)) == content(source, PAGE).numpy().tobytes()
        writer = local.writer()
        writer.write(11, 0, content(1000, PAGE).numpy().tobytes()[:5000])
        writer.write(11, 5000, content(1000, PAGE).numpy().tobytes()[5000:])
        await writer.finish()
        assert bytes(await reader.read(11)) == content(1000, PAGE).numpy().tobytes()
        local.close()


@pytest.mark.parametrize("other_gpu", gpus())
@pytest.mark.parametrize("ours", [1, 2, 4, 8])
async def test_host_memory_has_whole_pages_of_all_ranks(monkeypatch, ours, other_gpu):
    """Out of each rank's part, and back into each: also where several hold the same heads."""
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 5 * PAGE)
    with owners(spans(ours)[1:], False, 1 + other_gpu) as (followers, parts):
        local = local_pages(ours, parts)
        cache = KvCacheManager(PageAllocator(PAGES), PrefixTree(4, "lru", (FULL,)))
        memory = HostMemory(local.parts, cache, 20 * PAGE)
        for page, part in itertools.product(range(8), local.parts):
            part.memory[page].copy_(content(page, PAGE)[slice(*part.span)])
        for device in local.devices:
            torch.cuda.synchronize(device)
        reports: SimpleQueue = SimpleQueue()
        memory.start(reports.put, lambda: StepCost(1.0, 0.0, 0.0, 0.0, 0.0))
        for _ in range(3):  # slabs that are pinned later
            reports.get(timeout=30)()
        down = [(page, page + 3) for page in range(8)]
        up = [(page + 3, 12 + 7 - page) for page in range(5)] + [(8, 9), (9, 10), (10, 11)]
        for number, (pairs, to_gpu) in enumerate([(down, False), (up, True)]):
            memory.copy(number, pairs, to_gpu)
            assert reports.get(timeout=30).args == (number, None)
        reader = local.reader()
        for source, target in up:
            assert bytes(await reader.read(target)) == content(source - 3, PAGE).numpy().tobytes()
        there = {page: page for page in range(8)} | {target: source - 3 for source, target in up}
        for (first, size), follower in zip(spans(ours)[1:], followers, strict=True):
            assert follower.hash() == expected(
                [(source, target) for target, source in there.items()], first, size
            )
        memory.close()
        local.close()
        assert memory._pinned
        memory.unpin()
        assert not memory._pinned


async def test_a_part_that_cannot_be_unmapped_keeps_no_other_mapped(monkeypatch):
    closed = []

    def close(base):
        closed.append(base)
        real(base)
        if len(closed) == 1:
            raise TransportError("planted")

    real = cuda_runtime.close_memory
    with owners(spans(2), True) as (_, held):
        local = local_pages(1, [])
        receiver = await CudaIpcReceiver.open(endpoint_of(held, local), local)
        await receiver.pull([(0, 0)])
        monkeypatch.setattr(cuda_runtime, "close_memory", close)
        with pytest.raises(TransportError, match="planted"):
            await receiver.close()
        assert len(set(closed)) == 2
        local.close()


async def test_parts_that_do_not_make_up_a_page_are_refused():
    with owners(spans(4)[:3], True) as (_, sources):
        local = local_pages(1, [])
        with pytest.raises(TransportError, match="lies in none of 3 parts"):
            await CudaIpcReceiver.open(endpoint_of(sources, local), local)
        sources[1].pid = os.getpid()
        with pytest.raises(TransportError, match="in this very process"):
            await CudaIpcReceiver.open(endpoint_of(sources, local), local)
        local.close()
