"""The transports: which endpoints an owner offers, and which one a receiver takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.rpc.channel import Dial, open_channel
from baton.transport.base import PageStore, Receiver, TransportError, check_page_bytes
from baton.transport.grpc import GrpcReceiver
from baton.transport.shm import Segment, ShmReceiver, segment_endpoint
from baton.v1 import common_pb2 as pb

KINDS = ("cuda_ipc", "shm", "nixl", "grpc")
"""Best first."""
DEFAULT_KINDS = ("cuda_ipc", "shm", "grpc")
"""Without `nixl`: it listens on a port of UCX, which neither TLS nor the cluster secret protects."""


@dataclass(frozen=True, slots=True)
class Opened:
    receiver: Receiver
    reason: str
    """One line for the log: the chosen transport, and why no better one."""


def check_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """The kinds to use, best first; DEFAULT_KINDS for none. Raises ValueError for an unknown one."""
    chosen = tuple(kinds) or DEFAULT_KINDS
    for kind in chosen:
        if kind not in KINDS:
            raise ValueError(f"unknown transport {kind!r}: use {', '.join(KINDS)}")
    return chosen


def offered(
    pages: PageStore,
    segment: Segment | None = None,
    cuda_ipc: pb.CudaIpcEndpoint | None = None,
    kinds: Sequence[str] = (),
    address: str = "",
    nixl: pb.NixlEndpoint | None = None,
) -> list[pb.Endpoint]:
    """Endpoints of a pool, best first: `cuda_ipc` when its memory has been exported, `shm` when it lies in a
    segment, `nixl` when an agent has registered it, `grpc` at `address` (of a PageSource; empty: where
    Prefill is served)."""
    endpoints = []
    for kind in check_kinds(kinds):
        if kind == "cuda_ipc" and cuda_ipc is not None:
            endpoints.append(pb.Endpoint(cuda_ipc=cuda_ipc))
        elif kind == "shm" and segment is not None:
            endpoints.append(pb.Endpoint(shm=segment_endpoint(segment)))
        elif kind == "nixl" and nixl is not None:
            endpoints.append(pb.Endpoint(nixl=nixl))
        elif kind == "grpc":
            grpc = pb.GrpcEndpoint(address=address, page_bytes=pages.page_bytes, num_pages=pages.num_pages)
            endpoints.append(pb.Endpoint(grpc=grpc))
    return endpoints


def share_gpu(ours: Iterable[pb.Endpoint], theirs: Iterable[pb.Endpoint]) -> bool:
    """Whether two pools lie on the same GPU; False if one has no `cuda_ipc` endpoint."""
    one, other = ({e.cuda_ipc.device_uuid for e in each if e.HasField("cuda_ipc")} for each in (ours, theirs))
    return bool(one & other - {""})


async def open_receiver(
    endpoints: Iterable[pb.Endpoint],
    local: PageStore,
    kinds: Sequence[str] = (),
    peer_address: str = "",
    busy: Callable[[], bool] = lambda: False,
    dial: Dial = open_channel,
) -> Opened:
    """Opens the first of our `kinds` that the peer offers and that can be opened.

    `peer_address`: where the peer's Prefill is served. `busy`: whether steps run on the local pool's GPU;
    asked in other threads. `dial`: opens connections. Raises TransportError that names every reason.
    """
    by_kind = {endpoint.WhichOneof("kind"): endpoint for endpoint in endpoints}
    reasons = []
    for kind in check_kinds(kinds):
        if kind not in by_kind:
            reasons.append(f"{kind}: not offered")
            continue
        try:
            receiver = await _open(kind, by_kind[kind], local, peer_address, busy, dial)
        except TransportError as error:
            reasons.append(f"{kind}: {error}")
        else:
            return Opened(receiver, "; ".join([f"{kind} chosen", *reasons]))
    raise TransportError(f"no common transport ({'; '.join(reasons)})")


async def _open(
    kind: str,
    endpoint: pb.Endpoint,
    local: PageStore,
    peer_address: str,
    busy: Callable[[], bool],
    dial: Dial,
) -> Receiver:
    if kind == "cuda_ipc":
        # Imported late: it imports torch, which nothing else here needs.
        from baton.transport.cuda_ipc import CudaIpcReceiver

        return await CudaIpcReceiver.open(endpoint.cuda_ipc, local, busy)
    if kind == "nixl":
        # Imported late: nixl may not be installed.
        from baton.transport.nixl import NixlReceiver

        return await NixlReceiver.open(endpoint.nixl, local)
    if kind == "shm":
        return ShmReceiver(endpoint.shm, local)
    grpc = endpoint.grpc
    address = grpc.address or peer_address
    if not address:
        raise TransportError("the peer names no address")
    check_page_bytes(grpc.page_bytes, local)
    return GrpcReceiver(address, local, grpc.num_pages, dial=dial, pool=grpc.pool)
