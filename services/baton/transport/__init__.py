"""How KV pages travel: the owner of a pool publishes endpoints, a receiver opens one and pulls pages. `base`
is the interface and `registry` chooses; `shm` (a `segment` in /dev/shm) and `grpc` (from a `page_source`) do
it. A transport knows nothing of requests or leases."""

from baton.transport.base import Receiver, TransportError
from baton.transport.registry import Opened, check_kinds, offered, open_receiver
from baton.transport.segment import Segment, SegmentError, reap_orphans

__all__ = [
    "Opened",
    "Receiver",
    "Segment",
    "SegmentError",
    "TransportError",
    "check_kinds",
    "offered",
    "open_receiver",
    "reap_orphans",
]
