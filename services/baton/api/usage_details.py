"""What an answer's usage tells beside the fields that the APIs know: images, drafts, and where cached tokens
were."""

from __future__ import annotations

from typing import Any

from baton.v1 import inference_pb2


def baton_usage(usage: inference_pb2.Usage) -> dict[str, Any]:
    """`baton`, where there were images, drafts or cached tokens that were not in the KV pool."""
    details = usage_details(usage)
    return {"baton": details} if details else {}


def usage_details(usage: inference_pb2.Usage) -> dict[str, Any]:
    """`cached_tokens` adds up to the APIs' field of this name; `image_tokens` are some of the prompt's."""
    details: dict[str, Any] = {}
    if usage.image_tokens:
        details["image_tokens"] = usage.image_tokens
    if usage.drafted_tokens:
        details |= {"drafted_tokens": usage.drafted_tokens, "accepted_drafts": usage.accepted_drafts}
    if usage.HasField("cached_tiers"):
        tiers = usage.cached_tiers
        each = {"host": tiers.host_tokens, "disk": tiers.disk_tokens, "peer": tiers.peer_tokens}
        details["cached_tokens"] = {"gpu": max(0, usage.cached_tokens - sum(each.values())), **each}
    return details


def add_usage_details(total: inference_pb2.Usage, usage: inference_pb2.Usage) -> None:
    """Adds to `total` what `usage_details` tells of."""
    total.image_tokens += usage.image_tokens
    total.cached_tokens += usage.cached_tokens
    total.drafted_tokens += usage.drafted_tokens
    total.accepted_drafts += usage.accepted_drafts
    if usage.HasField("cached_tiers"):
        total.cached_tiers.host_tokens += usage.cached_tiers.host_tokens
        total.cached_tiers.disk_tokens += usage.cached_tiers.disk_tokens
        total.cached_tiers.peer_tokens += usage.cached_tiers.peer_tokens
