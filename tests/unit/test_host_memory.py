"""The host tier's memory: bytes of pages that one rank or several hold parts of, out and back."""

from __future__ import annotations

from queue import SimpleQueue

import pytest
import torch

from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.kv_groups import FULL
from baton.step_cost import StepCost
from baton.transport.base import TransportError
from baton.transport.cuda_pages import PagePart
from baton.worker import host_memory
from baton.worker.host_memory import HostMemory

SIZE, HEADS, HEAD = 4, 4, 40
PAGE = HEADS * HEAD
PAGES, TIER = 8, 64


def spans(ranks: int) -> list[tuple[int, int]]:
    """First byte and size of each rank's heads; more ranks than heads share them."""
    size = max(1, HEADS // ranks) * HEAD
    return [(rank * HEADS // ranks * HEAD, size) for rank in range(ranks)]


class Tiers:
    """A pool whose pages hold random bytes by the tokens that they end, and its host memory."""

    def __init__(self, ranks: int) -> None:
        self.parts = [
            PagePart(first, torch.full((PAGES + 1, size), 0xEE, dtype=torch.uint8))
            for first, size in spans(ranks)
        ]
        self.cache = KvCacheManager(PageAllocator(PAGES), PrefixTree(SIZE, "lru", (FULL,)))
        self.memory = HostMemory(self.parts, self.cache, TIER * PAGE)
        self._reports: SimpleQueue = SimpleQueue()
        self.memory.start(self._reports.put, lambda: StepCost(1.0, 0.0, 0.0, 0.0, 0.0))
        while self.memory.tier.cache.counts().free < TIER:
            self._reports.get(timeout=10)()  # a slab more is ready

    def run(self) -> None:
        """Until nothing is copied any more."""
        self.memory.tier.tick(0.0)
        while self.memory.tier.copies:
            self._reports.get(timeout=10)()
            self.memory.tier.tick(0.0)
        self.cache.check()

    def compute(self, tokens: list[int]) -> None:
        table = self.cache.hold((), "")
        self.cache.extend(table, len(tokens) // SIZE)
        for index, page in enumerate(table.tables[0]):
            for part in self.parts:
                first, end = part.span
                part.memory[page] = content(tokens[: (index + 1) * SIZE])[first:end]
        self.cache.commit(table, tokens, "")
        self.cache.release(table, 0)

    def promote(self, tokens: list[int]) -> list[int]:
        """Pages that hold them now."""
        key = self.cache.encode(tokens)
        rows, _ = self.memory.tier.promotable(key, "", 0, len(tokens) // SIZE)
        assert self.memory.tier.promote(key, "", rows, self.cache.available) is not None
        self.run()
        table = self.cache.hold(tokens, "", len(tokens) // SIZE)
        pages = list(table.tables[0])
        self.cache.release(table, 0)
        return pages


def content(tokens: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
    return torch.randint(0, 256, (PAGE,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_bytes_come_back_to_every_rank(monkeypatch, ranks):
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 3 * PAGE + 1)  # runs of pages go on in the next slab
    tiers = Tiers(ranks)
    try:
        prompts = [[100 * seed + i for i in range(4 * SIZE)] for seed in range(12)]
        for prompt in prompts:
            tiers.compute(prompt)
            tiers.run()
        for prompt in prompts[:3]:
            assert tiers.cache.match_length(prompt) == 0
            pages = tiers.promote(prompt)
            assert len(pages) == 4
            for index, page in enumerate(pages):
                for part in tiers.parts:
                    first, end = part.span
                    expected = content(prompt[: (index + 1) * SIZE])[first:end]
                    assert torch.equal(part.memory[page], expected)
        assert tiers.memory.tier.counters.dropped == 0
        for part in tiers.parts:
            assert (part.memory[PAGES] == 0xEE).all(), "the spare page"
    finally:
        tiers.memory.close()


def test_what_a_lost_gpu_had_pinned_ends_nothing_else(monkeypatch):
    """An engine closes on: ranks and shared memory come before, and nothing is raised."""
    tiers = Tiers(1)
    tiers.memory.close()
    tiers.memory._pinned += [4096, 8192]
    asked = []

    def unpin(address):
        asked.append(address)
        raise TransportError("cudaHostUnregister: cudaErrorIllegalAddress")

    monkeypatch.setattr(host_memory.cuda_runtime, "use", lambda device: None)
    monkeypatch.setattr(host_memory.cuda_runtime, "unpin", unpin)
    tiers.memory.unpin()
    assert asked == [8192]
