"""The stream of frames of the live page."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import aclosing
from urllib.parse import urljoin

import httpx
import pytest

from baton.api.page.app import STATIC, PageApp
from baton.api.page.feed import Feed
from baton.api.page.frames import process_json
from baton.api.page.processes import WatchedProcess
from baton.authentication.gateway import GatewayAuthentication
from baton.config import GatewayConfig
from baton.gateway.gateway import Gateway
from baton.v1 import node_pb2


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


def test_tokens_of_rows_with_drafts():
    process = WatchedProcess("decode", "127.0.0.1:1")
    process.load = node_pb2.Load(accepted_drafts=30, drafter="suffix", drafted_places=[20, 5])
    found = process_json(process)
    assert (found["tokens_a_row"], found["drafter"]) == (2.5, "suffix")
    process.load = node_pb2.Load(encoded_images=7, encode_batches=2)
    found = process_json(process)
    assert (found["encoded_images"], found["images_a_batch"]) == (7, 3.5)
    process.load = node_pb2.Load(drafter="suffix", drafted_places=[0, 0])
    assert "tokens_a_row" not in process_json(process)


def test_a_process_that_is_silent_once_is_not_taken_for_lost():
    process = WatchedProcess("tokenizer", "127.0.0.1:1")
    assert process.health == "unknown"
    process.update(node_pb2.NodeState(load=node_pb2.Load(requests=3)))
    process.missed()
    assert (process.health, process.load.requests) == ("silent", 3)
    process.update(node_pb2.NodeState(load=node_pb2.Load()))
    process.missed()
    process.missed()
    assert (
        process.health == "unreachable" and process.load is None and "nothing heard for 5 s" in process.error
    )


async def test_below_a_path_all_that_the_page_names_is_below_it(gateway):
    """As behind a proxy that gives Baton a path: each name in its files is relative to the page."""
    app = PageApp(None, gateway, GatewayAuthentication(GatewayConfig()), "127.0.0.1:1")  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        names = re.findall(r'(?:href|src)="([^"#]+)"', (await http.get("/")).text)
        assert len(names) > 4
        for name in names:
            _, below, path = urljoin("/below/", name).partition("/below")
            assert below and (await http.get(path)).status_code == 200, name
    for script in STATIC.glob("*.js"):
        if script.name != "uplot.js":
            assert not re.findall(r"""["'`](/(?:page|v1)/[^"'`]*)""", script.read_text()), script.name
