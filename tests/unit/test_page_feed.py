"""The stream of frames of the live page."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import httpx
import pytest

from baton.config import GatewayConfig
from baton.gateway.authentication import GatewayAuthentication
from baton.gateway.gateway import Gateway
from baton.gateway.page.app import PageApp
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


async def test_the_answer_to_head_ends(gateway):
    app = PageApp(None, gateway, GatewayAuthentication(GatewayConfig()), "127.0.0.1:1")  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app)
    async with (
        asyncio.timeout(10),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        for path in ("/", "/page/events", "/page/page.js"):
            answer = await http.head(path)
            assert (answer.status_code, "script-src 'self'" in answer.headers["content-security-policy"]) == (
                200,
                True,
            )
        assert (await http.post("/page/events")).status_code == 405
        assert (await http.get("/page/events", headers={"host": "example.org"})).status_code == 403
