"""What an answer's usage tells of drafts."""

from __future__ import annotations

from typing import Any

from baton.v1 import inference_pb2


def draft_usage(usage: inference_pb2.Usage) -> dict[str, Any]:
    """Fields beside those that the APIs know: `baton`, where there were drafts."""
    if not usage.drafted_tokens:
        return {}
    drafts = {"drafted_tokens": usage.drafted_tokens, "accepted_drafts": usage.accepted_drafts}
    return {"baton": drafts}
