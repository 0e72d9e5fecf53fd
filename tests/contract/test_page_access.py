"""The live page over HTTP: who sees it, what its answers forbid browsers to do, and that it rests unseen."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_rig import Rig, gateway, until
from prometheus_client import CollectorRegistry
from scripted_decode import ScriptedDecode, saying

from baton.api.page import app, feed
from baton.rpc.http_server import metrics_app

KEY, SECRET = "alice-0123456789abcdef", "c0ffee" * 8
PATHS = ("/", "/page/page.js", "/page/events", "/page/requests/none", "/page/no-such-file")


def private(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with ScriptedDecode(saying([40, 41])) as decode, gateway(decode) as found:
        yield found


def client(rig: Rig, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=rig.http, headers=headers, trust_env=False, timeout=10)


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


async def status(http: httpx.AsyncClient, path: str, **headers: str) -> int:
    async with http.stream("GET", path, headers=headers) as answer:
        return answer.status_code


async def frames(http: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    async with http.stream("GET", "/page/events") as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


async def test_the_loopback_needs_no_key_but_an_address(rig):
    async with client(rig) as http:
        assert [await status(http, path) for path in PATHS] == [200, 200, 200, 404, 404]
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example"):
            assert await status(http, "/", host=host) == 403, host
            assert await status(http, "/traces", host=host) == 403, host
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000", "10.0.0.1"):
            assert await status(http, "/", host=host) == 200, host
            assert await status(http, "/traces", host=host) == 200, host


API = ("/v1/models", "/metrics", "/health", "/openapi.json", "/no-such-path")
EVIL = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example")


async def test_on_the_loopback_http_answers_to_names_that_are_allowed_alone(rig):
    body = {"model": "scripted", "prompt": "a"}
    async with client(rig) as http:
        for host in EVIL:
            assert [await status(http, path, host=host) for path in API] == [403] * len(API), host
            answer = await http.post("/v1/completions", json=body, headers={"host": host})
            assert answer.status_code == 403 and "--allowed-hosts" in answer.text
        for host in ("localhost", "LOCALHOST:8000", "[::1]:8000"):
            assert await status(http, "/v1/models", host=host) == 200, host
    async with (
        ScriptedDecode(saying([40])) as decode,
        gateway(decode, allowed_hosts=("Chat.example",)) as named,
        client(named) as http,
    ):
        assert await status(http, "/v1/models", host="chat.example:8000") == 200
        assert await status(http, "/", host="chat.example") == 200
        assert await status(http, "/v1/models", host="evil.example") == 403


async def test_metrics_of_workers_on_the_loopback_too():
    def asking(*hosts: str) -> httpx.AsyncClient:
        made = metrics_app(CollectorRegistry(), lambda: (True, []), hosts=hosts)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=made), base_url="http://127.0.0.1")

    async with asking() as local, asking("*") as reachable:
        for path in ("/metrics", "/health"):
            for host in EVIL:
                assert await status(local, path, host=host) == 403
                assert await status(reachable, path, host=host) == 200
            assert await status(local, path) == 200


async def test_with_keys_it_is_for_operators(tmp_path):
    files = {
        "api_keys": private(tmp_path / "keys", KEY + "\n"),
        "cluster_secret_file": private(tmp_path / "secret", SECRET + "\n"),
    }
    async with ScriptedDecode(saying([40])) as decode, gateway(decode, **files) as rig, client(rig) as http:
        for path in PATHS:
            for refused in (
                "",
                f"Bearer {KEY}",
                "Bearer x",
                basic(KEY),
                basic(""),
                "Basic !",
                f"Basic {SECRET}",
            ):
                async with http.stream("GET", path, headers={"authorization": refused}) as answer:
                    assert answer.status_code == 401, (path, refused)
                    assert answer.headers["www-authenticate"].startswith("Basic realm=")
            expected = 404 if path.endswith(("file", "none")) else 200
            for accepted in (f"Bearer {SECRET}", basic(SECRET)):
                assert await status(http, path, authorization=accepted) == expected, path
        # The operator's password is no key of the API.
        assert await status(http, "/v1/models", authorization=basic(SECRET)) == 401


async def test_with_keys_and_without_a_secret_it_is_closed(tmp_path):
    keys = private(tmp_path / "keys", KEY + "\n")
    async with (
        ScriptedDecode(saying([40])) as decode,
        gateway(decode, api_keys=keys) as rig,
        client(rig) as http,
    ):
        answer = await http.get("/", headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 403 and "--cluster-secret-file" in answer.text


async def test_every_answer_forbids_all_that_the_page_does_not_need(rig):
    async with client(rig) as http:
        for path in PATHS:
            async with http.stream("GET", path) as answer:
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
                assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await http.post("/")).status_code == 405
        page = (await http.get("/")).text
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", page), "the policy would refuse it"
    assert not re.search(r"""(src|href)=["'](?!page/|#)""", page), "from elsewhere"
    for script in app.STATIC.glob("*.js"):
        assert not re.search(r"innerHTML|insertAdjacentHTML|outerHTML|document\.write", script.read_text()), (
            script
        )


async def test_a_file_is_sent_once(rig):
    async with client(rig) as http:
        first = await http.get("/page/page.css")
        again = await http.get("/page/page.css", headers={"if-none-match": first.headers["etag"]})
        assert (first.status_code, again.status_code, again.content) == (200, 304, b"")


async def test_a_page_gets_everything_then_what_is_new_and_nothing_runs_after_it(rig):
    page = rig.node._page.feed
    async with client(rig) as http:
        stream = frames(http)
        async with asyncio.timeout(10):
            first = await anext(stream)
            second, third = await anext(stream), await anext(stream)
        assert first["whole"] and not second["whole"] and not third["whole"]
        assert third["at"] - second["at"] >= 0.9 * feed.FRAME_SECONDS, "no more often than that"
        assert {each["role"] for each in third["processes"]} == {"gateway", "tokenizer", "decode"}
        assert page._collecting
        await stream.aclose()
    await until(lambda: not page._collecting and not list(page._processes))


async def test_pages_that_miss_a_frame_share_what_they_get(rig, monkeypatch):
    page = rig.node._page.feed
    made: list[int] = []
    encode = page._encode

    def counted(*, whole: bool) -> bytes:
        made.append(page._number if whole else -1)
        return encode(whole=whole)

    monkeypatch.setattr(page, "_encode", counted)
    async with client(rig) as http:
        slow = [page.follow() for _ in range(4)]
        for each in slow:
            assert json.loads(await anext(each))["whole"]
        async with asyncio.timeout(10):
            watching = frames(http)
            for _ in range(4):
                await anext(watching)
        for each in slow:  # none of them has read for some frames
            assert json.loads(await anext(each))["whole"]
            await each.aclose()
        await watching.aclose()
    whole = [number for number in made if number >= 0]
    assert len(whole) == len(set(whole)) < 8, "made once for all"


async def test_open_pages_are_few(rig, monkeypatch):
    monkeypatch.setattr(feed, "MAX_PAGES", 1)
    async with client(rig) as http, http.stream("GET", "/page/events") as first:
        await anext(first.aiter_lines())
        async with http.stream("GET", "/page/events") as second:
            text = "\n".join([line async for line in second.aiter_lines()])
        assert "event: refused" in text and "1 pages are open already" in text
