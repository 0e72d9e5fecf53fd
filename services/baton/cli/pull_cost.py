"""What a pull costs between two processes of this machine, for `baton bench profile`."""

from __future__ import annotations

import contextlib

import torch

from baton.cli.deployment import visible_gpus
from baton.cli.kv_owner import owner
from baton.cli.kv_rates import Method, Rate, measure, open_method
from baton.kvcache.pool import KvLayout
from baton.plan.profile import PullCost
from baton.rpc.ids import new_incarnation
from baton.transport.registry import DEFAULT_KINDS
from baton.worker.published import make_pool

PAGES = (4, 128)
"""A short prompt and a long one: what does not grow with the bytes is the latency."""
REPEATS = 9
SEEING = ("shm", "cuda_ipc")
"""Transports whose receivers see the owner's generations."""


async def pull_cost(layout: KvLayout, device: torch.device, transport: str) -> PullCost:
    """transport: empty: what two workers of this host would use. Raises TransportError, SegmentError or
    ChildError."""
    kind = transport or ("shm" if device.type == "cpu" else "cuda_ipc")
    pages = 2 * max(PAGES) + 1
    gpus = visible_gpus() if device.type == "cuda" else []
    gpu = (gpus[1] if len(gpus) > 1 else gpus[0]) if gpus else ""
    _, published = make_pool(layout, pages, device, DEFAULT_KINDS, new_incarnation())
    with contextlib.closing(published):
        async with owner(layout, pages, device.type, gpu) as endpoints:
            method = Method(kind)
            receiver = await open_method(method, endpoints, published.pages)
            try:
                rates = [
                    await measure(
                        method,
                        receiver,
                        published.pages,
                        count * layout.page_size,
                        layout.page_size,
                        REPEATS,
                        lambda: None,
                    )
                    for count in PAGES
                ]
            finally:
                await receiver.close()
    return line(rates[0], rates[1], kind)


def line(short: Rate, long: Rate, kind: str) -> PullCost:
    """Through two measured pulls."""
    per_byte = max(0.0, (long.seconds - short.seconds) / (long.bytes - short.bytes))
    latency = max(0.0, short.seconds - per_byte * short.bytes)
    rate = 1.0 / per_byte if per_byte else float("inf")
    return PullCost(latency, rate, kind in SEEING, kind)
