"""Collectives among the ranks of a worker: gloo on CPUs, by torch.distributed; on GPUs see peer_memory.

The ranks meet at torch's own stores: a file on one host, TCP between several. Each worker has a process group
of its own: torch's default group, of which a process has one, is not used.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from baton.layers.tensor_parallel import DeviceCommunicator, Shard
from baton.worker.ranks.channel import CollectiveError

COLLECTIVE_SECONDS = 30.0
"""Time limit of a call: by so much ranks may differ in reaching it."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where all ranks meet."""

    store: str | tuple[str, int]
    """Path of an empty file that all see for as long as they live; or host and port of rank 0's store."""
    address: str = "127.0.0.1"
    """Address of this rank's host, for the others' connections."""


class GroupCommunicator:
    """A `Communicator` on CPUs. Its calls raise CollectiveError."""

    def __init__(
        self,
        shard: Shard,
        rendezvous: Rendezvous,
        seconds: float,
        listener: socket.socket | None = None,
    ) -> None:
        """`seconds`: time limit of each call, and of meeting the others; `listener`: of rank 0, where the
        store is at an address; it is taken over. Blocks. Raises CollectiveError."""
        self._rank, self._size, limit = shard.rank, shard.size, timedelta(seconds=seconds)
        with _meeting():
            store = _store(shard, rendezvous, limit, listener)
            self._group = _gloo(store, shard, limit, rendezvous.address)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._run(lambda: self._group.allreduce([x]))
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        options = dist.GatherOptions()
        options.rootRank = 0
        if self._rank:
            self._run(lambda: self._group.gather([], [x.contiguous()], options))
            return x.new_empty(len(x), 0)
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._run(lambda: self._group.gather([parts], [x.contiguous()], options))
        return torch.cat(parts, -1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self._run(lambda: self._group.broadcast(x, 0))
        return x

    def check(self) -> None:
        """Nothing: what fails raises or ends the process."""

    def _run(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise CollectiveError(f"rank {self._rank}: {str(error).splitlines()[0]}") from error


@contextlib.contextmanager
def _meeting() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"the ranks do not meet: {str(error).splitlines()[0]}") from error


def _store(shard: Shard, rendezvous: Rendezvous, limit: timedelta, listener: socket.socket | None) -> Any:
    if isinstance(rendezvous.store, str):
        store: Any = dist.FileStore(rendezvous.store, shard.size)  # type: ignore[attr-defined]
    else:
        host, port = rendezvous.store
        descriptor = None if listener is None else listener.detach()
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, None, descriptor is not None, limit, False, master_listen_fd=descriptor
        )
    store.set_timeout(limit)
    return store


def meet_on_gpus(
    shard: Shard, rendezvous: Rendezvous, seconds: float, device: torch.device
) -> DeviceCommunicator:
    """A GroupCommunicator on this rank's device, which it may share. Raises CollectiveError."""
    from baton.worker.ranks.peer_memory import PeerCommunicator

    with _meeting():
        store = _store(shard, rendezvous, timedelta(seconds=seconds), None)
        return PeerCommunicator(shard, store, seconds, device)


def _gloo(store: Any, shard: Shard, limit: timedelta, address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = limit
    options._threads = 1
    return dist.ProcessGroupGloo(store, shard.rank, shard.size, options)
