"""A process's entry in etcd: there while the process lives."""

from __future__ import annotations

import asyncio
import socket
from itertools import cycle

import grpc.aio

from baton.config import NodeConfig
from baton.discovery.etcd import BACKOFF_SECONDS, CALL_SECONDS, Etcd, etcd_errors, node_key
from baton.etcd import rpc_pb2 as pb
from baton.etcd import rpc_pb2_grpc as rpc
from baton.rpc.address import join_address
from baton.rpc.client_stream import ClientStream
from baton.rpc.errors import BatonError, invalid, unavailable
from baton.rpc.logs import get_logger
from baton.rpc.tasks import Tasks

LEASE_SECONDS = 10
"""The entry of a process that died without a word goes after so long."""

_log = get_logger()


class Registration:
    """Keeps the entry there until `close`, over all losses of etcd. A process serves whether it is registered
    or not."""

    def __init__(self, etcd: Etcd, role: str, incarnation: int, address: str) -> None:
        self._etcd = etcd
        self._key = node_key(etcd.prefix, role, incarnation)
        self._address = address
        self._tasks = Tasks()
        self._lease: tuple[str, int] | None = None

    def start(self) -> None:
        self._tasks.spawn(self._run(), "etcd registration")

    async def close(self) -> None:
        """Says that the node leaves and removes the entry, if etcd can be reached; else it goes with its
        lease. Idempotent."""
        await self._tasks.close()
        lease, self._lease = self._lease, None
        if lease is None:
            return
        endpoint, number = lease
        leaving = pb.PutRequest(key=self._key.encode(), value=b"", lease=number)
        revoke = pb.LeaseRevokeRequest(ID=number)
        try:
            async with self._etcd.connect(endpoint) as channel:
                with etcd_errors():
                    await rpc.KVStub(channel).Put(leaving, timeout=CALL_SECONDS)
                    await rpc.LeaseStub(channel).LeaseRevoke(revoke, timeout=CALL_SECONDS)
        except BatonError as error:
            text = "entry in etcd not removed; it ends with its lease"
            _log.warning(text, etcd=endpoint, error=error.message)

    async def _run(self) -> None:
        for endpoint in cycle(self._etcd.endpoints):
            try:
                async with self._etcd.connect(endpoint) as channel:
                    await self._hold(channel, endpoint)
            except BatonError as error:
                _log.warning("not registered in etcd", etcd=endpoint, error=error.message)
            await asyncio.sleep(BACKOFF_SECONDS)

    async def _hold(self, channel: grpc.aio.Channel, endpoint: str) -> None:
        """Makes the entry and keeps its lease alive until that fails: raises BatonError. A new lease takes
        the key over from the old one, which then ends with nothing."""
        address = seen_from(self._address, endpoint)
        leases = rpc.LeaseStub(channel)
        with etcd_errors():
            grant = await leases.LeaseGrant(pb.LeaseGrantRequest(TTL=LEASE_SECONDS), timeout=CALL_SECONDS)
            self._lease = endpoint, grant.ID
            entry = pb.PutRequest(key=self._key.encode(), value=address.encode(), lease=grant.ID)
            await rpc.KVStub(channel).Put(entry, timeout=CALL_SECONDS)
            _log.info("registered in etcd", etcd=endpoint, key=self._key, address=address)
            call = ClientStream[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse](leases.LeaseKeepAlive())
            while True:
                await call.write(pb.LeaseKeepAliveRequest(ID=grant.ID))
                async with asyncio.timeout(CALL_SECONDS):
                    answer = await call.read()
                if answer is grpc.aio.EOF or answer.TTL <= 0:
                    raise unavailable("the lease in etcd is gone")
                await asyncio.sleep(LEASE_SECONDS / 3)


def register(config: NodeConfig, role: str, incarnation: int, address: str) -> Registration | None:
    """Begins to register a process at host:port, if an etcd is configured. Raises BatonError."""
    etcd = Etcd.load(config)
    if etcd is None:
        return None
    registration = Registration(etcd, role, incarnation, address)
    registration.start()
    return registration


def seen_from(address: str, peer: str) -> str:
    """The address to write down: that one, or, when it means all interfaces, with the address of the one that
    `peer` (host:port) is reached through. Raises BatonError when there is none."""
    host, _, port = address.rpartition(":")
    if host not in ("0.0.0.0", "[::]"):
        return address
    peer_host, _, peer_port = peer.rpartition(":")
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            peer_host.strip("[]"), int(peer_port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            return join_address(str(probe.getsockname()[0]), int(port))
    except (OSError, ValueError) as error:
        raise invalid("advertise", f"no address to register ({error}); give one with --advertise") from error
