"""The gateway behind nginx and HAProxy, as docs/proxies.md configures them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import httpx
import pytest
from gateway_rig import Stream, gateway, kinds_of
from scripted_decode import ScriptedDecode, saying

from baton.v1 import inference_pb2_grpc
from ports import free_port

PAGE = Path(__file__).resolve().parents[2] / "docs/proxies.md"
PIECES = 30
PLAIN = "server { listen 8080; location / { proxy_pass http://127.0.0.1:8000; } }"
NGINX = """daemon off; pid {folder}/pid; error_log stderr; worker_processes 1; {user} events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {servers}
}}
"""


def documented(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return found


@asynccontextmanager
async def proxied(program: str, text: str, folder: Path, rig):
    """The proxy in front of the gateway; yields its ports for HTTP and gRPC."""
    path = shutil.which(program, path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if path is None:
        pytest.skip(f"needs {program} (Debian: {program})")
    http, other = free_port(), free_port()
    text = text.replace("127.0.0.1:8000", rig.http.removeprefix("http://"))
    text = text.replace("127.0.0.1:50050", rig.node.address)
    text = re.sub(r"(listen |bind :)8080", rf"\g<1>{http}", text)
    text = re.sub(r"(listen |bind :)8443", rf"\g<1>{other}", text)
    file = folder / "configuration"
    if program == "nginx":
        user = "user root;" if os.geteuid() == 0 else ""  # the folder is this user's alone
        file.write_text(NGINX.format(folder=folder, servers=text, user=user))
        command = [path, "-p", str(folder), "-c", str(file)]
    else:
        file.write_text(text)
        command = [path, "-db", "-f", str(file)]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(10):
            while True:
                try:
                    await client.get(f"http://127.0.0.1:{http}/version")
                    break
                except httpx.TransportError:
                    assert process.returncode is None, f"{program} has ended"
                    await asyncio.sleep(0.02)
        yield http, other
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 10)


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


@pytest.mark.parametrize(("program", "text"), CASES, ids=["nginx", "nginx plain", "haproxy"])
async def test_streams_come_piece_by_piece(program, text, tmp_path):
    script = saying(*([40 + number] for number in range(PIECES)), pause=0.02)
    async with (
        ScriptedDecode(script) as node,
        gateway(node) as rig,
        proxied(program, text, tmp_path, rig) as (port, grpc_port),
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
