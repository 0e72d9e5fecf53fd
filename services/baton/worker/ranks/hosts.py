"""A worker on several hosts: what its configuration must be, and the process that keeps the ranks of a host
other than rank 0's.

That process serves nothing. It starts its host's ranks, which join rank 0, and ends with them.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import msgspec

from baton.authentication.cluster import ClusterCredentials
from baton.config import WorkerConfig
from baton.layers.tensor_parallel import Shard
from baton.rpc import logs
from baton.rpc.address import is_loopback, split_address
from baton.rpc.errors import BatonError, failed_precondition, invalid
from baton.transport import reap_orphans
from baton.worker.model import device_of, sized
from baton.worker.ranks.channel import Channel, ChannelError
from baton.worker.ranks.followers import END_SECONDS, EXIT_FAILED, FollowerError, Followers
from baton.worker.ranks.messages import Setup
from baton.worker.ranks.rendezvous import JOIN_SECONDS, PAGES, PLANS, RETRY_SECONDS, Join, join, versions

EXIT_REFUSED, EXIT_BROKEN = 2, 70
"""Exit codes of all processes: it could not start; a rank was lost."""
NAME_SECONDS = 30.0
"""How long rank 0 waits until its own host's name is known. Others wait for it, and for its name, when they
join."""
ALIKE = (
    "model_impl",
    "load_format",
    "device",
    "dtype",
    "quantization",
    "quantize_head",
    "tp",
    "ep",
    "nnodes",
    "kv_dtype",
    "prefill_attention",
    "decode_attention",
    "max_rows",
    "token_budget",
    "context_length",
)
"""What all hosts must be given the same of. Their checkpoints are compared when they are loaded."""

_log = logs.get_logger()


def check_hosts(config: WorkerConfig) -> None:
    """Raises BatonError."""
    if config.nnodes == 1:
        if config.master or config.node_rank:
            raise invalid("nnodes", "--master and --node-rank are for --nnodes of 2 or more")
        return
    if config.nnodes < 1 or config.tp % config.nnodes:
        raise invalid("nnodes", f"--nnodes {config.nnodes} must divide --tp {config.tp}")
    if not 0 <= config.node_rank < config.nnodes:
        raise invalid(
            "node_rank", f"--node-rank must be from 0 to {config.nnodes - 1} with --nnodes {config.nnodes}"
        )
    if set(config.transports) - {"grpc"}:
        raise invalid(
            "transports", "pages of a worker on several hosts travel over grpc alone; use --transports grpc"
        )
    host, _ = _master(config)
    cluster = ClusterCredentials.load(config)
    if not (cluster.secret or cluster.tls or config.insecure or is_loopback(host)):
        raise failed_precondition(
            "--nnodes: the hosts know each other by --cluster-secret-file; give all the same, or "
            "certificates by --cluster-ca and its like, or --insecure on a network that you trust",
            "INSECURE",
        )


def _master(config: WorkerConfig) -> tuple[str, int]:
    """Host and port of --master. Raises BatonError."""
    if not config.master:
        raise invalid(
            "master", "--nnodes needs --master HOST:PORT: where rank 0's host is reached by the others"
        )
    try:
        return split_address(config.master)
    except ValueError as error:
        raise invalid("master", f"--master: {error}") from None


def master_address(config: WorkerConfig) -> tuple[str, int, str]:
    """Host and port of --master, and the address that the host has here. Blocks while the name is not known:
    that of a pod is a while after its start. Raises BatonError."""
    host, port = _master(config)
    deadline = time.monotonic() + NAME_SECONDS
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return host, port, str(found[0][4][0])
        except OSError as error:
            if time.monotonic() > deadline:
                text = f"--master: the host {host!r} is not known here: {error.strerror}; name this host"
                raise invalid("master", text) from None
        time.sleep(RETRY_SECONDS)


def settings_of(config: WorkerConfig) -> dict[str, Any]:
    """See Join."""
    return versions() | {"--" + name.replace("_", "-"): getattr(config, name) for name in ALIKE}


def join_master(setup: Setup) -> tuple[Channel, Channel | None, Setup]:
    """A follower comes to rank 0: its channel for plans, the first of a host's for pages, and what it needs
    now. Raises JoinError."""
    shard, config, cluster = setup.shard, setup.config, setup.cluster
    assert cluster is not None
    host, port = split_address(config.master)
    settings = settings_of(config)
    plans = join(host, port, cluster, Join(shard.rank, PLANS, settings, cluster.secret))
    pages = None
    if shard.first_of_host:
        pages = join(host, port, cluster, Join(shard.rank, PAGES, settings, cluster.secret)).channel
    joined = msgspec.structs.replace(setup, rendezvous=plans.store, address=plans.own_address)
    return plans.channel, pages, joined


def serve_host(config: WorkerConfig, role: str) -> int:
    """Keeps the ranks of host --node-rank until they end. Returns the exit code: 0 if rank 0 ended as it was
    asked. On SIGTERM it waits for that; the second one ends the ranks at once."""
    try:
        logs.configure(role, config.log_level, config.log_format)
        check_hosts(config)
        return _Host(config, role).run()
    except (BatonError, FollowerError, ValueError) as error:
        print(f"baton {role}: {getattr(error, 'message', error)}", file=sys.stderr, flush=True)
        return EXIT_REFUSED


class _Host:
    def __init__(self, config: WorkerConfig, role: str) -> None:
        self._config, self._role = sized(config, device_of(config.device)), role
        shard = Shard(0, config.tp, config.nnodes, config.ep)
        first = config.node_rank * shard.per_host
        self._shards = [replace(shard, rank=rank) for rank in range(first, first + shard.per_host)]
        self._events: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
        """What, rank, exit code. A signal's handler puts into it, in the thread that takes from it."""

    def run(self) -> int:
        """Raises FollowerError and BatonError."""
        cluster = ClusterCredentials.load(self._config)
        reap_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._events.put(("signal", 0, 0)))
        followers = Followers(self._shards, self._config, cluster=cluster)
        try:
            _log.info("ranks of this host join rank 0", master=self._config.master, ranks=len(self._shards))
            followers.watch(lambda rank, code: self._events.put(("ended", rank, code)))
            for rank, channel in followers.channels.items():
                threading.Thread(target=self._await_ready, args=(rank, channel), daemon=True).start()
            return self._await_end(followers)
        finally:
            followers.close()
            reap_orphans()  # of a rank that was killed

    def _await_ready(self, rank: int, channel: Channel) -> None:
        try:
            channel.receive(None)
            self._events.put(("ready", rank, 0))
        except ChannelError:
            return  # it has ended, which is noticed elsewhere

    def _await_end(self, followers: Followers) -> int:
        ready: set[int] = set()
        codes: dict[int, int] = {}
        deadline = float("inf")
        stopping = 0
        while len(codes) < len(self._shards):
            left = deadline - time.monotonic()
            try:
                what, rank, code = self._events.get(timeout=max(0.0, min(left, JOIN_SECONDS)))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    followers.kill()
                    break
                continue
            if what == "ready":
                ready.add(rank)
                if len(ready) == len(self._shards):
                    names = ",".join(str(each.rank) for each in self._shards)
                    print(f"ready role={self._role} ranks={names} pid={os.getpid()}", flush=True)
            elif what == "ended":
                codes[rank] = code
                if code:
                    _log.warning("a rank of this host has ended", rank=rank, exit_code=code)
                deadline = min(deadline, time.monotonic() + END_SECONDS)
            else:
                stopping += 1
                _log.info("waiting until rank 0 ends" if stopping == 1 else "ending the ranks of this host")
                wait = self._config.drain_seconds + END_SECONDS if stopping == 1 else 0.0
                deadline = min(deadline, time.monotonic() + wait)
        if len(codes) == len(self._shards) and not any(codes.values()):
            return 0
        return (
            EXIT_REFUSED if EXIT_FAILED in codes.values() and len(ready) < len(self._shards) else EXIT_BROKEN
        )
