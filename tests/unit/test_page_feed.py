"""The stream of frames of the live page."""

from __future__ import annotations

import json
from contextlib import aclosing

import pytest

from baton.config import GatewayConfig
from baton.gateway.gateway import Gateway
from baton.gateway.page.feed import Feed


def refuse(address):
    raise AssertionError(f"{address} is dialled")


@pytest.fixture
def gateway() -> Gateway:
    return Gateway(GatewayConfig(), refuse)


async def test_a_page_that_opens_later_gets_what_is_then(gateway):
    feed = Feed(gateway, "127.0.0.1:1", False)
    for tokens in (0, 7):
        gateway.metrics.output_tokens.value += tokens
        async with aclosing(feed.follow()) as frames:
            found = json.loads(await anext(frames))
        assert found["whole"] and found["totals"]["output_tokens"] == tokens
    await feed.close()
