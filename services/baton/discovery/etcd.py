"""Finding nodes in etcd, over its own gRPC API.

A node is one key, PREFIX + ROLE/INCARNATION, whose value is host:port: `etcdctl get --prefix /baton/` shows
them all. The key belongs to a lease that the node keeps alive, and goes with it. A node that leaves says so:
it empties the value first. A key that goes without that has expired, and its node may still work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from itertools import cycle

import grpc.aio

from baton.discovery.members import apply_events
from baton.etcd import rpc_pb2 as pb
from baton.etcd import rpc_pb2_grpc as rpc
from baton.rpc.channel import client_options
from baton.rpc.client_stream import ClientStream
from baton.rpc.errors import BatonError, from_rpc_error, unavailable
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


def open_etcd(endpoint: str) -> grpc.aio.Channel:
    """A connection to host:port of an etcd."""
    # etcd closes connections that ping oftener than every 5 s; these do so every 10 s.
    return grpc.aio.insecure_channel(endpoint, options=client_options())


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


async def watch(endpoints: Sequence[str], prefix: str, role: str, heard: Heard) -> None:
    """Hands on the addresses of all nodes of a role, at once and after each change, until cancelled. While no
    etcd can be reached all stays as it was; the endpoints are tried in turn."""
    for endpoint in cycle(endpoints):
        try:
            async with open_etcd(endpoint) as channel:
                async for nodes, leaving in _snapshots(channel, role_prefix(prefix, role)):
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
