"""What rank 0 and its followers say to each other besides plans: plain data, checked as it is read."""

from __future__ import annotations

import msgspec

from baton.authentication.cluster import ClusterCredentials
from baton.config import WorkerConfig
from baton.layers.tensor_parallel import Shard


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a follower."""

    shard: Shard
    rendezvous: str | tuple[str, int] | None
    """The communicators' store: the path of a file whose descriptor all inherit, or host and port. None: rank
    0 is on another host; it joins it there."""
    parent: int
    """The process that starts it."""
    config: WorkerConfig
    address: str = "127.0.0.1"
    """Address of this host for other ranks' connections."""
    cluster: ClusterCredentials | None = None
    """Credentials to join rank 0 with."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """A follower has loaded its libraries."""


class Meet(msgspec.Struct, frozen=True, tag=True):
    """All ranks of all hosts are there and have loaded their libraries: now they meet, which has a time
    limit."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The shard is there."""

    fingerprint: str


class MakePool(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 asks for a pool and a runner over it."""

    pages: int
    page_size: int
    context: int
    segment: str | None
    """Path of the one that holds the pool, which all ranks of a host share. None: make it. On a GPU each rank
    has its own."""
    tap: tuple[int, ...] = ()
    """Hidden states that rank 0's drafter reads: see HiddenTap.layers. The others' layers then compute the
    same tokens."""
    drafts: int = 0
    """Most drafts of a row."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The pool is there."""

    pid: int
    host: str
    device: str
    resident_bytes: int
    segment: str | None
    """That it has made."""
    part: bytes = b""
    """On a GPU: its part of the pages, a CudaIpcPart."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 ends as it was asked. Without it, it has been killed."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A follower's last answer: why it could not do what it was asked."""

    message: str


Message = Setup | Started | Meet | Loaded | MakePool | Ready | End | Failed
