"""Finds and registers nodes in etcd, over its gRPC API.

A node is one key, PREFIX/ROLE/INCARNATION, whose value is host:port (`etcdctl get --prefix /baton/`).
The key belongs to a lease that the node keeps alive. A node that leaves empties the value before it removes
the key. A key that disappears without that has expired, and its node may still work.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle

import grpc
import grpc.aio

from baton.authentication.private_files import read_private, read_public
from baton.config import NodeConfig
from baton.etcd import rpc_pb2 as pb
from baton.etcd import rpc_pb2_grpc as rpc
from baton.rpc.address import is_loopback, join_address
from baton.rpc.channel import open_channel
from baton.rpc.client_stream import ClientStream
from baton.rpc.errors import BatonError, failed_precondition, from_rpc_error, invalid, unavailable
from baton.rpc.logs import get_logger
from baton.rpc.tasks import Tasks

CALL_SECONDS = 5.0
SILENCE_SECONDS = 900.0
"""etcd reports progress to a watcher at least every 10 minutes."""
BACKOFF_SECONDS = 1.0
HOLD_SECONDS = 30.0
"""A node whose key has expired is dropped after this time: the node or etcd may be slow."""

Changed = Callable[[list[str], Collection[str]], None]
"""Called with the addresses of all nodes, and of those that have announced that they leave."""

_log = get_logger()


@dataclass(frozen=True, slots=True)
class Etcd:
    """An etcd cluster and how to connect to it."""

    endpoints: tuple[str, ...]
    """host:port of its members."""
    prefix: str
    credentials: grpc.ChannelCredentials | None = None
    """TLS; None: none."""
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def load(cls, config: NodeConfig) -> Etcd | None:
        """None if none is configured. Raises BatonError for files that cannot be used, and if the password
        would be sent to another machine in clear."""
        if not config.etcd:
            return None
        user, file = config.etcd_user, config.etcd_password_file
        if bool(user) != bool(file):
            raise failed_precondition("--etcd-user and --etcd-password-file: give both")
        if bool(config.etcd_cert) != bool(config.etcd_key):
            raise failed_precondition("--etcd-cert and --etcd-key: give both")
        if config.etcd_cert and not config.etcd_ca:
            raise failed_precondition("--etcd-cert needs --etcd-ca too: the CA of etcd's certificate")
        far = [each for each in config.etcd if not is_loopback(each.rpartition(":")[0])]
        if user and far and not (config.etcd_ca or config.insecure):
            text = f"the password for etcd would be sent to {far[0]} in clear"
            raise failed_precondition(f"{text}; give --etcd-ca for TLS, or --insecure")
        credentials = None
        if config.etcd_ca:
            cert = read_public(config.etcd_cert, "--etcd-cert") if config.etcd_cert else None
            key = read_private(config.etcd_key, "--etcd-key") if config.etcd_key else None
            credentials = grpc.ssl_channel_credentials(read_public(config.etcd_ca, "--etcd-ca"), key, cert)
        password = read_private(file, "--etcd-password-file").decode(errors="replace").strip() if file else ""
        return cls(config.etcd, config.etcd_prefix, credentials, user, password)

    @contextlib.asynccontextmanager
    async def connect(self, endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
        """A connection to a member, authenticated if there is a user. Raises BatonError."""
        # etcd closes connections that send pings more often than every 5 s; these send one every 10 s.
        metadata: tuple[tuple[str, str], ...] = ()
        if self.user:
            login = pb.AuthenticateRequest(name=self.user, password=self.password)
            with etcd_errors():
                async with open_channel(endpoint, credentials=self.credentials) as channel:
                    answer = await rpc.AuthStub(channel).Authenticate(login, timeout=CALL_SECONDS)
            metadata = (("token", answer.token),)
        async with open_channel(endpoint, credentials=self.credentials, metadata=metadata) as channel:
            yield channel


def role_prefix(prefix: str, role: str) -> str:
    return f"{prefix.rstrip('/')}/{role}/"


def node_key(prefix: str, role: str, incarnation: int) -> str:
    return f"{role_prefix(prefix, role)}{incarnation:016x}"


def range_end(prefix: bytes) -> bytes:
    """The first key after all with this prefix, which does not end with 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


@contextlib.contextmanager
def etcd_errors() -> Iterator[None]:
    """Turns every error of a connection to etcd into a BatonError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except TimeoutError as error:
        raise unavailable("etcd does not answer") from error
    except UnicodeDecodeError as error:
        raise unavailable(f"a key or value in etcd is not Baton's ({error}); choose --etcd-prefix") from error


async def watch(etcd: Etcd, role: str, changed: Changed) -> None:
    """Calls `changed` with the nodes of a role, at once and after each change, until cancelled. The endpoints
    are tried in turn; while none can be reached nothing changes."""
    for endpoint in cycle(etcd.endpoints):
        try:
            async with etcd.connect(endpoint) as channel:
                async for nodes, leaving in _snapshots(channel, role_prefix(etcd.prefix, role)):
                    changed(sorted(set(nodes.values())), leaving)
        except BatonError as error:
            _log.warning("etcd lost", etcd=endpoint, node_role=role, error=error.message)
        await asyncio.sleep(BACKOFF_SECONDS)


async def _snapshots(
    channel: grpc.aio.Channel, prefix: str
) -> AsyncIterator[tuple[Mapping[str, str], set[str]]]:
    """Yields key -> address of all nodes, at once and after each change, with the addresses that have just
    announced that they leave. Ends by raising BatonError."""
    key = prefix.encode()
    end = range_end(key)
    with etcd_errors():
        found = await rpc.KVStub(channel).Range(pb.RangeRequest(key=key, range_end=end), timeout=CALL_SECONDS)
        nodes = {pair.key.decode(): pair.value.decode() for pair in found.kvs if pair.value}
        yield nodes, set()
        call = ClientStream[pb.WatchRequest, pb.WatchResponse](rpc.WatchStub(channel).Watch())
        create = pb.WatchCreateRequest(
            key=key, range_end=end, start_revision=found.header.revision + 1, progress_notify=True
        )
        await call.write(pb.WatchRequest(create_request=create))
        while True:
            async with asyncio.timeout(SILENCE_SECONDS):
                answer = await call.read()
            if answer is grpc.aio.EOF:
                raise unavailable("etcd closed the watch")
            if answer.canceled:
                # For instance because the revision was compacted. The next Range starts afresh.
                raise unavailable(f"etcd ended the watch: {answer.cancel_reason or 'revisions compacted'}")
            if answer.events:
                events = [_event(event) for event in answer.events]
                leaving = {nodes[key] for key, address in events if address == "" and key in nodes}
                nodes = apply_events(nodes, events)
                yield nodes, leaving


def apply_events(nodes: Mapping[str, str], events: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """The nodes (key -> address) after the events. An event is a key and its address; None: the key is gone;
    "": the node leaves."""
    after = dict(nodes)
    for key, address in events:
        if not address:
            after.pop(key, None)
        else:
            after[key] = address
    return after


def _event(event: pb.Event) -> tuple[str, str | None]:
    gone = event.type == pb.Event.DELETE
    return event.kv.key.decode(), None if gone else event.kv.value.decode()


LEASE_SECONDS = 10
"""The key of a process that died expires after this time."""


class Registration:
    """Keeps a node's key in etcd until `close`, and writes it again after etcd was lost. A process serves
    whether it is registered or not."""

    def __init__(self, etcd: Etcd, role: str, incarnation: int, address: str) -> None:
        self._etcd = etcd
        self._key = node_key(etcd.prefix, role, incarnation)
        self._address = address
        self._tasks = Tasks()
        self._lease: tuple[str, int] | None = None

    def start(self) -> None:
        self._tasks.spawn(self._run(), "etcd registration")

    async def close(self) -> None:
        """Announces that the node leaves and removes the key. If etcd cannot be reached the key expires with
        its lease. Idempotent."""
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
            _log.warning("key in etcd not removed; it expires", etcd=endpoint, error=error.message)

    async def _run(self) -> None:
        for endpoint in cycle(self._etcd.endpoints):
            try:
                async with self._etcd.connect(endpoint) as channel:
                    await self._hold(channel, endpoint)
            except BatonError as error:
                _log.warning("not registered in etcd", etcd=endpoint, error=error.message)
            await asyncio.sleep(BACKOFF_SECONDS)

    async def _hold(self, channel: grpc.aio.Channel, endpoint: str) -> None:
        """Writes the key and keeps its lease alive until that fails, then raises BatonError. The key moves to
        the new lease if it had another."""
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
    """Starts to register a process at host:port; None if no etcd is configured. Raises BatonError."""
    etcd = Etcd.load(config)
    if etcd is None:
        return None
    registration = Registration(etcd, role, incarnation, address)
    registration.start()
    return registration


def seen_from(address: str, peer: str) -> str:
    """The address to register. For a wildcard address the host is that of the interface through which
    `peer` (host:port) is reached. Raises BatonError if there is none."""
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
