"""Rank 0's side of a worker of several ranks: it starts the others, and gives its runner to them all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import psutil
import torch

from baton.config import WorkerConfig
from baton.engine.plan import Runner
from baton.layers.shard import ONE_RANK, Communicator, Shard
from baton.ranks.communicator import COLLECTIVE_SECONDS, GroupCommunicator
from baton.ranks.followers import IMPORT_SECONDS, LOAD_SECONDS, Followers, MakePool
from baton.ranks.runner import RankedRunner, RanksLost
from baton.v1 import node_pb2


class Ranks:
    """Of a worker with one rank it does nothing."""

    def __init__(self, config: WorkerConfig) -> None:
        """Starts the followers, which begin to load. Raises FollowerError or CollectiveError."""
        self.shard: Shard = ONE_RANK
        self.communicator: Communicator | None = None
        self.followers: Followers | None = None
        if config.tp == 1:
            return
        self.shard = Shard(0, config.tp)
        self.followers = Followers(config.tp, config)
        try:
            self.followers.await_all(IMPORT_SECONDS)
            self.communicator = GroupCommunicator(self.shard, self.followers.rendezvous, COLLECTIVE_SECONDS)
        except BaseException:
            self.close()
            raise

    def loaded(self) -> None:
        """Waits until all have loaded their shards. Raises FollowerError."""
        if self.followers is not None:
            self.followers.await_all(LOAD_SECONDS)
            self.followers.met()

    def lead(self, runner: Runner[Any], pool: MakePool) -> Runner[Any]:
        """A runner of all ranks, whose pools are made for it. Raises FollowerError."""
        if self.followers is None:
            return runner
        self.followers.ask(pool)
        return RankedRunner(runner, self.followers.channels)

    def watch(self, lost: Callable[[int, int], None]) -> None:
        """See Followers.watch."""
        if self.followers is not None:
            self.followers.watch(lost)

    def describe(self, device: torch.device) -> list[node_pb2.Rank]:
        """All of them; none if there is one."""
        if self.followers is None:
            return []
        found = []
        for rank, pid in enumerate([os.getpid(), *(each.pid for each in self.followers.processes)]):
            with contextlib.suppress(psutil.NoSuchProcess):
                resident = psutil.Process(pid).memory_info().rss
                found.append(node_pb2.Rank(rank=rank, pid=pid, device=str(device), resident_bytes=resident))
        return found

    def failed(self, error: RanksLost) -> bool:
        """Whether what was computed may have ended the ranks: a step failed on one of them."""
        return error.by_step or (self.followers is not None and self.followers.failed())

    def kill(self) -> None:
        """At once."""
        if self.followers is not None:
            self.followers.kill()

    def close(self) -> None:
        """They end by themselves, or are killed soon."""
        if self.followers is not None:
            self.followers.close()
