"""Ranks that are threads of one process, to test shards without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from baton.layers.tensor_parallel import Shard

T = TypeVar("T")


class ThreadGroup:
    """What the communicators of its ranks share."""

    def __init__(self, size: int, seconds: float = 20.0, ep: bool = False) -> None:
        self.size, self.ep = size, ep
        self.barrier = threading.Barrier(size, timeout=seconds)
        self.given: list[torch.Tensor] = [torch.empty(0)] * size

    def run(self, work: Callable[[Shard, ThreadCommunicator], T]) -> list[T]:
        """Each rank's result; the first error is raised."""

        def one(rank: int) -> T:
            try:
                return work(Shard(rank, self.size, ep=self.ep), ThreadCommunicator(self, rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as threads:
            futures = [threads.submit(one, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        broken = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in broken or errors:
            raise error
        return [future.result() for future in futures]


class ThreadCommunicator:
    """A Communicator."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What all ranks gave."""
        self._group.given[self._rank] = x.clone()
        self._group.barrier.wait()
        given = list(self._group.given)
        self._group.barrier.wait()
        return given

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._exchange(x)
        total = first.clone()
        for other in others:
            total += other
        return x.copy_(total)

    def check(self) -> None: ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        given = self._exchange(x)
        return x.new_empty(len(x), 0) if self._rank else torch.cat(given, -1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._exchange(x)[0])
