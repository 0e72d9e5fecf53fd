"""Many requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from baton.client import AsyncClient, Completion

SECONDS = 120.0
"""Any batch of requests in these tests must have ended by then."""


async def ask(address: str, requests: Sequence[dict[str, Any]], seconds: float = SECONDS) -> list[Completion]:
    """All at once, over one connection; the answers in the order of the requests."""
    async with AsyncClient(address) as client, asyncio.timeout(seconds):
        return list(await asyncio.gather(*(client.generate(**request) for request in requests)))


def greedy(prompt: list[int], count: int, **options: Any) -> dict[str, Any]:
    return {"token_ids": prompt, "max_tokens": count, "temperature": 0.0, "ignore_eos": True, **options}
