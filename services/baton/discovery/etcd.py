"""Finding nodes in etcd, over its own gRPC API.

A node is one key, PREFIX + ROLE/INCARNATION, whose value is host:port: `etcdctl get --prefix /baton/` shows
them all. The key belongs to a lease that the node keeps alive, and goes with it. A node that leaves says so:
it empties the value first. A key that goes without that has expired, and its node may still work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle

import grpc
import grpc.aio

from baton.config import NodeConfig
from baton.discovery.members import apply_events
from baton.etcd import rpc_pb2 as pb
from baton.etcd import rpc_pb2_grpc as rpc
from baton.rpc.address import is_loopback
from baton.rpc.authentication import read_private, read_public
from baton.rpc.channel import open_channel
from baton.rpc.client_stream import ClientStream
from baton.rpc.errors import BatonError, failed_precondition, from_rpc_error, unavailable
from baton.rpc.logs import get_logger

CALL_SECONDS = 5.0
SILENCE_SECONDS = 900.0
"""etcd says something at least every 10 minutes to a watcher that asks for it."""
BACKOFF_SECONDS = 1.0
HOLD_SECONDS = 30.0
"""A node whose entry has expired is taken as gone only after so long: perhaps it, or etcd, was slow."""

Heard = Callable[[list[str], Collection[str]], None]
"""Gets the addresses of all nodes, and of those that said that they leave."""

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
        """None: none is configured. Raises BatonError for files that cannot be used, and for a password that
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
        """A connection to a member, logged in as the user if there is one. Raises BatonError."""
        # etcd closes connections that ping oftener than every 5 s; these do so every 10 s.
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
    """The first key after all that begin with `prefix` (which does not end with 0xff)."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


@contextlib.contextmanager
def etcd_errors() -> Iterator[None]:
    """Whatever ends a conversation with etcd is a BatonError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except TimeoutError as error:
        raise unavailable("etcd does not answer") from error
    except UnicodeDecodeError as error:
        raise unavailable(f"a key or value in etcd is not Baton's ({error}); choose --etcd-prefix") from error


async def watch(etcd: Etcd, role: str, heard: Heard) -> None:
    """Hands on the addresses of all nodes of a role, at once and after each change, until cancelled. While no
    etcd can be reached all stays as it was; the endpoints are tried in turn."""
    for endpoint in cycle(etcd.endpoints):
        try:
            async with etcd.connect(endpoint) as channel:
                async for nodes, leaving in _snapshots(channel, role_prefix(etcd.prefix, role)):
                    heard(sorted(set(nodes.values())), leaving)
        except BatonError as error:
            _log.warning("etcd lost", etcd=endpoint, role=role, error=error.message)
        await asyncio.sleep(BACKOFF_SECONDS)


async def _snapshots(
    channel: grpc.aio.Channel, prefix: str
) -> AsyncIterator[tuple[Mapping[str, str], set[str]]]:
    """Key -> address, of all nodes now and after each change, and who has just said that it leaves. Ends by
    raising BatonError."""
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
                # Among the reasons: the revision is gone (compacted). The next Range starts afresh.
                raise unavailable(f"etcd ended the watch: {answer.cancel_reason or 'revisions compacted'}")
            if answer.events:
                events = [_event(event) for event in answer.events]
                leaving = {nodes[key] for key, address in events if address == "" and key in nodes}
                nodes = apply_events(nodes, events)
                yield nodes, leaving


def _event(event: pb.Event) -> tuple[str, str | None]:
    gone = event.type == pb.Event.DELETE
    return event.kv.key.decode(), None if gone else event.kv.value.decode()
