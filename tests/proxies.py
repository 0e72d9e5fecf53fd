"""nginx and HAProxy in front of gateways, as docs/proxies.md configures them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from ports import free_port

PAGE = Path(__file__).resolve().parents[1] / "docs/proxies.md"
NGINX = """daemon off; pid {folder}/pid; error_log stderr; worker_processes 1; {user} events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {servers}
}}
"""
_SERVER = re.compile(r"^( *server gateway) 127\.0\.0\.1:(8000|50050)(.*)$", re.MULTILINE)
"""HAProxy's line for one gateway."""


def documented(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return found


def program(name: str) -> str | None:
    """Its path; None: it is not installed."""
    return shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")


@asynccontextmanager
async def proxy(
    path: str, text: str, folder: Path, gateways: Sequence[tuple[str, str]]
) -> AsyncIterator[tuple[int, int]]:
    """The proxy runs, with the configuration `text`; yields its ports for HTTP and gRPC. path: the program.
    gateways: addresses for HTTP and gRPC; HAProxy has a line for each, nginx knows the first."""
    http, other = free_port(), free_port()

    def servers(line: re.Match[str]) -> str:
        addresses = [at_http if line[2] == "8000" else at_grpc for at_http, at_grpc in gateways]
        return "\n".join(f"{line[1]}{n} {address}{line[3]}" for n, address in enumerate(addresses))

    text = _SERVER.sub(servers, text)
    text = text.replace("127.0.0.1:8000", gateways[0][0]).replace("127.0.0.1:50050", gateways[0][1])
    text = re.sub(r"(listen |bind :)8080", rf"\g<1>{http}", text)
    text = re.sub(r"(listen |bind :)8443", rf"\g<1>{other}", text)
    file = folder / "configuration"
    if path.endswith("nginx"):
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
                    assert process.returncode is None, f"{path} has ended"
                    await asyncio.sleep(0.02)
        yield http, other
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 10)
