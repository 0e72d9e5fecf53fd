"""The gateway behind nginx and HAProxy, as docs/proxies.md configures them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import httpx
import pytest
from gateway_rig import Stream, gateway, kinds_of
from scripted_decode import ScriptedDecode, saying

from baton.v1 import inference_pb2_grpc
from proxies import documented, program, proxy

PIECES = 30
PLAIN = "server { listen 8080; location / { proxy_pass http://127.0.0.1:8000; } }"


@asynccontextmanager
async def proxied(name: str, text: str, folder: Path, rig):
    path = program(name)
    if path is None:
        pytest.skip(f"needs {name} (Debian: {name})")
    async with proxy(path, text, folder, [(rig.http.removeprefix("http://"), rig.node.address)]) as ports:
        yield ports


async def pieces(port: int, path: str, body: dict) -> int:
    """In how many pieces a stream comes."""
    url = f"http://127.0.0.1:{port}/v1/{path}"
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        body = {"model": "scripted", "stream": True, **body}
        async with http.stream("POST", url, json=body) as answer:
            assert answer.status_code == 200
            return len([piece async for piece in answer.aiter_raw()])


CASES = [
    ("nginx", documented("nginx")),
    ("nginx", PLAIN),
    ("haproxy", documented("haproxy")),
]


@pytest.mark.parametrize(("name", "text"), CASES, ids=["nginx", "nginx plain", "haproxy"])
async def test_streams_come_piece_by_piece(name, text, tmp_path):
    script = saying(*([40 + number] for number in range(PIECES)), pause=0.02)
    async with (
        ScriptedDecode(script) as node,
        gateway(node) as rig,
        proxied(name, text, tmp_path, rig) as (port, grpc_port),
    ):
        user = [{"role": "user", "content": "Hi"}]
        assert await pieces(port, "completions", {"prompt": "x", "max_tokens": 99}) > PIECES / 2
        assert await pieces(port, "messages", {"messages": user, "max_tokens": 99}) > PIECES / 2
        if text is PLAIN:
            return
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            large = {"model": "scripted", "prompt": "word " * 2**20}
            answer = await http.post(f"http://127.0.0.1:{port}/v1/completions", json=large)
            assert answer.json()["error"]["code"] == "context_length_exceeded"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            rig.stub = inference_pb2_grpc.InferenceStub(channel)
            stream = Stream(rig)
            for id in "ab":  # the client's side stays open meanwhile
                await stream.start(id, text="x")
                events = await stream.until_end(id)
                assert kinds_of(events) == ["accepted", "delta", "finished"]
                assert len(events) > PIECES / 2
