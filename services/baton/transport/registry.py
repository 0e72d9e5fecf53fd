"""Which transports there are, what an owner offers, and which offer a receiver takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.transport.base import Receiver, TransportError
from baton.transport.grpc import GrpcReceiver
from baton.transport.segment import Segment
from baton.transport.shm import ShmReceiver, shm_endpoint
from baton.v1 import common_pb2 as pb

KINDS = ("shm", "grpc")
"""Best first."""


@dataclass(frozen=True, slots=True)
class Opened:
    receiver: Receiver
    reason: str
    """One line for the log: what was chosen, and why nothing better."""


def check_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """The kinds to use, best first; all for none. Raises ValueError for an unknown one."""
    chosen = tuple(kinds) or KINDS
    for kind in chosen:
        if kind not in KINDS:
            raise ValueError(f"unknown transport {kind!r}: use {', '.join(KINDS)}")
    return chosen


def offered(
    segment: Segment | None,
    page_bytes: int,
    num_pages: int,
    kinds: Sequence[str] = (),
    address: str = "",
) -> list[pb.Endpoint]:
    """Endpoints of a pool, best first: `shm` when it lies in a segment, `grpc` at `address` (of a PageSource;
    empty: where Prefill is served)."""
    endpoints = []
    for kind in check_kinds(kinds):
        if kind == "shm" and segment is not None:
            endpoints.append(pb.Endpoint(shm=shm_endpoint(segment)))
        elif kind == "grpc":
            grpc = pb.GrpcEndpoint(address=address, page_bytes=page_bytes, num_pages=num_pages)
            endpoints.append(pb.Endpoint(grpc=grpc))
    return endpoints


def open_receiver(
    endpoints: Iterable[pb.Endpoint],
    local_pages: memoryview,
    local_page_bytes: int,
    kinds: Sequence[str] = (),
    peer_address: str = "",
) -> Opened:
    """Opens the first of our `kinds` that the peer offers and that can be opened. On an event loop.

    `peer_address`: where the peer's Prefill is served. Raises TransportError that names every reason.
    """
    by_kind = {endpoint.WhichOneof("kind"): endpoint for endpoint in endpoints}
    reasons = []
    for kind in check_kinds(kinds):
        if kind not in by_kind:
            reasons.append(f"{kind}: not offered")
            continue
        try:
            receiver = _open(kind, by_kind[kind], local_pages, local_page_bytes, peer_address)
        except TransportError as error:
            reasons.append(f"{kind}: {error}")
        else:
            return Opened(receiver, "; ".join([f"{kind} chosen", *reasons]))
    raise TransportError(f"no common transport ({'; '.join(reasons)})")


def _open(
    kind: str, endpoint: pb.Endpoint, local_pages: memoryview, local_page_bytes: int, peer_address: str
) -> Receiver:
    if kind == "shm":
        return ShmReceiver(endpoint.shm, local_pages, local_page_bytes)
    grpc = endpoint.grpc
    address = grpc.address or peer_address
    if not address:
        raise TransportError("the peer names no address")
    if grpc.page_bytes != local_page_bytes:
        raise TransportError(f"the peer's pages have {grpc.page_bytes} bytes, not {local_page_bytes}")
    return GrpcReceiver(address, local_pages, local_page_bytes, grpc.num_pages)
