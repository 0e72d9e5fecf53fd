"""How KV pages travel. The owner of a pool publishes endpoints; a receiver opens one and pulls pages.
`base` is the interface, `registry` chooses, and `shm` (a file in /dev/shm), `cuda_ipc` (memory of GPUs, by
`cuda_copy`), `nixl` and `grpc` are the transports. A pool's bytes are a page store: on the host (`base`) or
on a GPU (`cuda_pages`). A transport knows nothing of requests or leases."""

from baton.transport.base import EndpointRefused, HostPages, PageStore, Receiver, TransportError
from baton.transport.registry import Opened, check_kinds, offered, open_receiver, share_gpu
from baton.transport.shm import Segment, SegmentError, reap_orphans

__all__ = [
    "EndpointRefused",
    "HostPages",
    "Opened",
    "PageStore",
    "Receiver",
    "Segment",
    "SegmentError",
    "TransportError",
    "check_kinds",
    "offered",
    "open_receiver",
    "reap_orphans",
    "share_gpu",
]
