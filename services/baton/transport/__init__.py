"""How KV pages travel: the owner of a pool publishes endpoints, a receiver opens one and pulls pages. `base`
is the interface, `registry` chooses; `cuda_ipc` (memory of GPUs, by `cuda_copy`), `shm` (a `segment` in
/dev/shm), `nixl` (by a `nixl_agent`) and `grpc` (from a `page_source`) do it. A pool's bytes are a page
store: `pages` on the host, `cuda_pages` on a GPU. A transport knows nothing of requests or leases."""

from baton.transport.base import EndpointRefused, PageStore, Receiver, Refusal, TransportError
from baton.transport.pages import HostPages
from baton.transport.registry import Opened, check_kinds, offered, open_receiver, share_gpu
from baton.transport.segment import Segment, SegmentError, reap_orphans

__all__ = [
    "EndpointRefused",
    "HostPages",
    "Opened",
    "PageStore",
    "Receiver",
    "Refusal",
    "Segment",
    "SegmentError",
    "TransportError",
    "check_kinds",
    "offered",
    "open_receiver",
    "reap_orphans",
    "share_gpu",
]
