"""Rank 0's side of a worker of several ranks: it starts the others, and gives its runner to them all."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import psutil
import torch

from baton.authentication.cluster import ClusterCredentials
from baton.config import WorkerConfig
from baton.engine.plan import Runner
from baton.kvcache.kv_pool import PoolLayout
from baton.layers.tensor_parallel import ONE_RANK, Communicator, Shard
from baton.rpc.address import family_of
from baton.rpc.errors import invalid
from baton.rpc.logs import get_logger
from baton.transport import HostPages, PageStore
from baton.v1 import common_pb2, node_pb2
from baton.worker.model import rank_device
from baton.worker.ranks.channel import Channel
from baton.worker.ranks.communicator import COLLECTIVE_SECONDS, GroupCommunicator, Rendezvous, meet_on_gpus
from baton.worker.ranks.followers import (
    ANSWER_SECONDS,
    IMPORT_SECONDS,
    LOAD_SECONDS,
    FollowerError,
    Followers,
)
from baton.worker.ranks.hosts import master_address, settings_of
from baton.worker.ranks.messages import Loaded, MakePool, Meet, Ready, Started
from baton.worker.ranks.pages import PagesOfHosts, Part, RemotePart
from baton.worker.ranks.rendezvous import PAGES, PLANS, Master
from baton.worker.ranks.runner import PLAN_SECONDS, PlanTimes, RankedRunner, RanksLost

_log = get_logger()


def on_gpus(config: WorkerConfig, device: torch.device) -> torch.device:
    """Device of rank 0. Raises BatonError for several ranks that do not work on GPUs."""
    if device.type != "cuda":
        raise invalid("tp", f"--tp works on CPUs and NVIDIA GPUs, not on {device.type}; leave it out")
    if config.nnodes > 1:
        raise invalid("nnodes", "ranks of several hosts compute on CPUs only; leave out --nnodes")
    count = torch.cuda.device_count()
    if device.index is None and count < config.tp:
        raise invalid(
            "tp",
            f"--tp {config.tp} takes as many GPUs, and {count} can be used; lower it, or let the ranks share "
            "one for a trial: --device cuda:0",
        )
    if device.index:
        raise invalid("device", "ranks share cuda:0 alone, for a trial: name that, or cuda for a GPU each")
    return rank_device(config.device, Shard(0, config.tp))


def meet(
    config: WorkerConfig,
    shard: Shard,
    rendezvous: Rendezvous,
    device: torch.device,
    listener: socket.socket | None = None,
) -> Communicator:
    """See GroupCommunicator. Raises CollectiveError."""
    if device.type == "cpu":
        return GroupCommunicator(shard, rendezvous, COLLECTIVE_SECONDS, listener)
    return meet_on_gpus(shard, rendezvous, COLLECTIVE_SECONDS, device)


class Ranks:
    """Rank 0's side of a worker's ranks. With one rank it does nothing."""

    def __init__(self, config: WorkerConfig, stopping: threading.Event | None = None) -> None:
        """Starts the followers, which begin to load, and waits for those of other hosts, not after `stopping`
        is set. Raises BatonError, FollowerError, JoinError or CollectiveError."""
        self.shard: Shard = ONE_RANK
        self.communicator: Communicator | None = None
        self.followers: Followers | None = None
        self._pages: dict[int, Channel] = {}
        """By host: connections for its pages."""
        self._here: dict[int, Ready] = {}
        """What other ranks of this host have said of their last pools."""
        self._there: dict[int, Ready] = {}
        """What ranks of other hosts have said of themselves."""
        self._plan_times = PlanTimes()
        if config.tp == 1:
            return
        self.shard = Shard(0, config.tp, config.nnodes, config.ep)
        try:
            self._start(config, stopping)
        except BaseException:
            self.close()
            raise

    def _start(self, config: WorkerConfig, stopping: threading.Event | None) -> None:
        here = [replace(self.shard, rank=rank) for rank in range(1, self.shard.per_host)]
        listener: socket.socket | None = None
        address = "127.0.0.1"
        if config.nnodes == 1:
            self.followers = Followers(here, config)
        else:
            host, port, address = master_address(config)
            listener = socket.create_server((address, 0), family=family_of(address))
            store = (host, int(listener.getsockname()[1]))
            cluster = ClusterCredentials.load(config)
            if cluster.tls is not None:
                _log.warning("the sums of ranks on several hosts are not encrypted")
            master = Master(address, port, cluster, self._expected(), settings_of(config))
            try:
                master.start(store)
                self.followers = Followers(here, config, store, address=address)
                _log.info("waiting for ranks of other hosts", master=config.master)
                for (rank, purpose), channel in master.await_all(stopping=stopping).items():
                    if purpose == PLANS:
                        self.followers.add(rank, channel)
                    else:
                        self._pages[rank // self.shard.per_host] = channel
            finally:
                master.close()
        self.followers.await_all(Started, IMPORT_SECONDS)
        self.followers.tell(Meet())
        meeting = Rendezvous(self.followers.rendezvous, address)
        device = rank_device(config.device, self.shard)
        self.communicator = meet(config, self.shard, meeting, device, listener)

    def _expected(self) -> list[tuple[int, str]]:
        """The connections of other hosts: of each rank for plans, and of the first ones for pages."""
        others = range(self.shard.per_host, self.shard.size)
        first = range(self.shard.per_host, self.shard.size, self.shard.per_host)
        return [*((rank, PLANS) for rank in others), *((rank, PAGES) for rank in first)]

    def loaded(self, fingerprint: str) -> None:
        """Waits until all have loaded their shards. `fingerprint`: of rank 0's checkpoint. Raises
        FollowerError."""
        if self.followers is None:
            return
        for rank, answer in self.followers.await_all(Loaded, LOAD_SECONDS).items():
            if answer.fingerprint != fingerprint:
                raise FollowerError(f"rank {rank} has another checkpoint: copy rank 0's --model to its host")

    def lead(self, make: Callable[[], Runner[Any]], pool: MakePool) -> Runner[Any]:
        """A runner of all ranks, whose pools are made for it; `make`: rank 0's own. Raises FollowerError."""
        if self.followers is None:
            return make()
        here = range(1, self.shard.per_host)
        self.followers.tell(pool, here)
        runner = make()  # at the same time: on GPUs making one computes
        self._here = self.followers.await_all(Ready, ANSWER_SECONDS, here)
        for first in range(self.shard.per_host, self.shard.size, self.shard.per_host):
            there = msgspec.structs.replace(pool, segment=None)
            self._there |= self.followers.ask(there, Ready, [first])
            there = msgspec.structs.replace(pool, segment=self._there[first].segment)
            others = range(first + 1, first + self.shard.per_host)
            self._there |= self.followers.ask(there, Ready, others)
        ranked = RankedRunner(runner, list(self.followers.channels.values()), torch.get_num_threads)
        self._plan_times = ranked.plan_times
        return ranked

    def pages(self, local: PageStore, layout: PoolLayout) -> PageStore:
        """Whole pages of the worker. `local`: of this host; `layout`: of all heads."""
        if self.shard.hosts == 1:
            return local
        assert isinstance(local, HostPages)
        others = []
        for host, channel in self._pages.items():
            other = RemotePart(self._part(host, layout), channel)
            if self.followers is not None:
                other.lost = partial(self.followers.lose, host * self.shard.per_host)
            others.append(other)
        return PagesOfHosts(layout.page_bytes, local, self._part(0, layout), others)

    def parts(self) -> list[common_pb2.CudaIpcPart]:
        """Parts of the other ranks' pools on GPUs."""
        return [common_pb2.CudaIpcPart.FromString(self._here[rank].part) for rank in sorted(self._here)]

    def _part(self, host: int, layout: PoolLayout) -> Part:
        head = layout.page_bytes // layout.num_kv_heads
        rank = replace(self.shard, rank=host * self.shard.per_host)
        first, count = rank.host_kv_heads(layout.num_kv_heads)
        return Part(first * head, count * head)

    def watch(self, lost: Callable[[int, int], None]) -> None:
        """See Followers.watch."""
        if self.followers is not None:
            self.followers.watch(lost)

    def describe(self, device: torch.device) -> list[node_pb2.Rank]:
        """All of them; none if there is one."""
        if self.followers is None:
            return []
        found = []
        here = {0: os.getpid()} | {rank: each.pid for rank, each in self.followers.processes.items()}
        for rank, pid in here.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                resident = psutil.Process(pid).memory_info().rss
                where = self._here[rank].device if rank in self._here else str(device)
                found.append(node_pb2.Rank(rank=rank, pid=pid, device=where, resident_bytes=resident))
        for rank, told in sorted(self._there.items()):
            one = node_pb2.Rank(
                rank=rank, pid=told.pid, device=told.device, resident_bytes=told.resident_bytes
            )
            one.host = told.host
            found.append(one)
        if self.shard.hosts > 1:
            for one in found[: self.shard.per_host]:
                one.host = platform.node()
        return found

    def add_plans(self, load: node_pb2.Load) -> None:
        """The times of plans."""
        if self.followers is not None:
            times = self._plan_times
            load.plan_times.CopyFrom(
                node_pb2.Histogram(bounds=PLAN_SECONDS, counts=times.counts, sum=times.seconds)
            )

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
