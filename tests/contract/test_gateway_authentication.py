"""Who may use a gateway: API keys, their limits and TLS, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
from gateway_rig import Stream, gateway, kinds_of, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_decode import ScriptedDecode, endless, saying

import certificates
from baton.api.server import serve
from baton.authentication import api_keys
from baton.authentication.api_keys import ApiKeys, Limits
from baton.authentication.cluster import HEADER
from baton.client import AsyncClient, BatonError, Client
from baton.config import GatewayConfig
from baton.gateway.gateway import Gateway
from baton.rpc import http_server
from baton.rpc.channel import open_channel
from baton.rpc.errors import from_rpc_error, from_status
from baton.v1 import inference_pb2, node_pb2, node_pb2_grpc

ALICE, BOB, SECRET = "alice-0123456789abcdef", "bob-0123456789abcdef", "c0ffee" * 8
BODY = {"model": "scripted", "prompt": "hello", "max_tokens": 2}


def private(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def key_file(folder: Path, text: str = f"# clients\n{ALICE} name=alice\n") -> str:
    return private(folder / "keys", text)


def bearer(key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key is not None else ()


async def ask(address: str, key: str | None, **options) -> str:
    async with AsyncClient(address, api_key=key or "", **options) as client:
        return (await client.generate("hello", max_tokens=2)).text


async def post(rig, key: str | None, body=None, **options) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.post(f"{rig.http}/v1/completions", json=body or BODY, headers=headers, **options)


async def test_who_has_no_key_gets_nothing(tmp_path):
    async with (
        ScriptedDecode(saying([40, 41])) as decode,
        gateway(decode, api_keys=key_file(tmp_path)) as rig,
    ):
        for key in (None, "", "x", ALICE[:-1], ALICE[:-1] + "x", ALICE + "x", ALICE.upper(), BOB):
            reason = "INVALID_API_KEY" if key else "MISSING_API_KEY"
            with pytest.raises(BatonError) as refused:
                await ask(rig.node.address, key)
            assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)
            with pytest.raises(grpc.aio.AioRpcError) as listed:
                await rig.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer(key))
            assert from_rpc_error(listed.value).reason == reason
            if key == "":
                continue  # HTTP clients refuse to send an empty value
            answer = await post(rig, key)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.json()["error"]["code"] == reason.lower()
        assert decode.starts == []
        assert await ask(rig.node.address, ALICE)
        assert (await post(rig, ALICE)).status_code == 200
        with Client(rig.node.address, api_key=ALICE) as client:
            assert await asyncio.to_thread(lambda: client.generate("hello", max_tokens=2).text)
            assert await asyncio.to_thread(lambda: client.models()[0].name) == "scripted"
        await rig.idle()


async def test_two_keys_at_once_are_none(tmp_path):
    """Else which of them counts would depend on who looks: the interceptor or the servicer."""
    pairs = [(ALICE, BOB), (BOB, ALICE), (ALICE, ALICE), (ALICE, ""), ("", ALICE)]
    async with (
        ScriptedDecode(saying([40])) as decode,
        gateway(decode, api_keys=key_file(tmp_path)) as rig,
    ):
        for pair in pairs:
            metadata = tuple(("authorization", f"Bearer {key}".strip()) for key in pair)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rig.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, pair
            async with httpx.AsyncClient(trust_env=False) as http:
                answer = await http.get(f"{rig.http}/v1/models", headers=list(metadata))
                assert answer.status_code == 401, pair
        assert await ask(rig.node.address, ALICE)


async def test_what_stays_open_tells_nothing(tmp_path):
    files = {"api_keys": key_file(tmp_path), "cluster_secret_file": private(tmp_path / "secret", SECRET)}
    async with ScriptedDecode(saying([40])) as decode, gateway(decode, **files) as rig:
        async with open_channel(rig.node.address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            node = node_pb2_grpc.NodeStub(channel)
            # A client's key neither looks at the deployment nor drains it.
            for metadata in (bearer(None), bearer(ALICE), ((HEADER, SECRET[:-1] + "x"),)):
                for call in (node.GetInfo(node_pb2.GetInfoRequest(), metadata=metadata),
                             node.SetRole(node_pb2.SetRoleRequest(role="decode"), metadata=metadata),
                             node.Drain(node_pb2.DrainRequest(timeout_ms=1), metadata=metadata)):  # fmt: skip
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call
                    assert from_rpc_error(refused.value).reason == "CLUSTER_SECRET"
            info = await node.GetInfo(node_pb2.GetInfoRequest(), metadata=((HEADER, SECRET),))
            assert info.peers
        async with httpx.AsyncClient(base_url=rig.http, trust_env=False) as http:
            for path in ("/health", "/ping"):
                assert (await http.get(path)).json() == {"status": "serving"}
            for path in ("/v1/models", "/openapi.json", "/docs", "/nowhere"):
                assert (await http.get(path)).status_code == 401
            for key in (None, ALICE, SECRET[:-1] + "x"):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                assert (await http.get("/metrics", headers=headers)).status_code == 401
            basic = {"Authorization": f"Basic {SECRET}"}
            assert (await http.get("/metrics", headers=basic)).status_code == 401
            metrics = await http.get("/metrics", headers={"Authorization": f"Bearer {SECRET}"})
            assert "baton_requests" in metrics.text


async def test_open_metrics_open_nothing_else(tmp_path):
    """An endpoint picker has neither a key nor a token."""
    options = {"api_keys": key_file(tmp_path), "cluster_secret_file": private(tmp_path / "secret", SECRET)}
    async with (
        ScriptedDecode(saying([40])) as decode,
        gateway(decode, open_metrics=True, **options) as rig,
        httpx.AsyncClient(trust_env=False, base_url=rig.http) as http,
    ):
        assert "vllm:num_requests_waiting" in (await http.get("/metrics")).text
        for path in ("/traces", "/v1/models", "/"):
            assert (await http.get(path)).status_code == 401


async def test_keys_change_while_the_gateway_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(api_keys, "CHECK_SECONDS", 0.0)
    path = key_file(tmp_path)
    async with ScriptedDecode(saying([40])) as decode, gateway(decode, api_keys=path) as rig:
        stream = rig.stub.Generate(metadata=bearer(ALICE))
        await stream.write(start("a"))
        assert await ended(stream, "a") == "finished"
        replace(path, f"{BOB}\n")
        assert await ask(rig.node.address, BOB)
        with pytest.raises(BatonError):  # INTERNAL to a client that is still sending
            await ask(rig.node.address, ALICE)
        # The stream that is open from before starts nothing more.
        await stream.write(start("b"))
        event = await ended(stream, "b")
        assert event == "KEY_WITHDRAWN"
        stream.cancel()
        # A file that is wrong, or that everybody can read, changes nothing.
        for text, mode in (("short\n", 0o600), ("", 0o600), (f"{ALICE}\n", 0o644)):
            replace(path, text, mode)
            assert await ask(rig.node.address, BOB)
            with pytest.raises(BatonError):
                await ask(rig.node.address, ALICE)
        monkeypatch.setattr(api_keys, "CHECK_SECONDS", 1000.0)
        replace(path, f"{ALICE}\n")
        with pytest.raises(BatonError):
            await ask(rig.node.address, ALICE)  # nobody has looked
        rig.node.reload()  # what SIGHUP does
        assert await ask(rig.node.address, ALICE)


def replace(path: str, text: str, mode: int = 0o600) -> None:
    """As a tool does that writes files whole."""
    new = Path(private(Path(path + ".new"), text))
    new.chmod(mode)
    new.rename(path)


def start(id: str, **fields) -> inference_pb2.GenerateRequest:
    made = inference_pb2.GenerateStart(id=id, text="hello", **fields)
    return inference_pb2.GenerateRequest(start=made)


async def ended(stream, id: str) -> str:
    """How request `id` ended: "finished", or the reason."""
    while True:
        event = await asyncio.wait_for(stream.read(), 10)
        kind = event.WhichOneof("kind")
        if event.id == id and kind == "finished":
            return "finished"
        if event.id == id and kind == "failed":
            return from_status(event.failed).reason


async def test_limits_of_a_key(tmp_path):
    text = f"{ALICE} name=alice requests=2 streams=3 prompt_tokens=4\n{BOB}\n"
    async with (
        ScriptedDecode(endless) as decode,
        gateway(decode, api_keys=key_file(tmp_path, text)) as rig,
    ):
        streams = [rig.stub.Generate(metadata=bearer(ALICE)) for _ in range(3)]
        for number, stream in enumerate(streams):
            await stream.write(start(str(number)))
            if number < 2:
                await until(lambda number=number: len(decode.running) == number + 1)
        assert await ended(streams[2], "2") == "KEY_REQUESTS"
        over = await post(rig, ALICE)
        assert over.status_code == 429 and over.json()["error"]["code"] == "key_requests"
        assert int(over.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            call = rig.stub.Generate(metadata=bearer(ALICE))
            await call.write(start("x"))
            await call.read()
        error = from_rpc_error(refused.value)
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "KEY_STREAMS")
        other = rig.stub.Generate(metadata=bearer(BOB))  # one key's use is not another's
        await other.write(start("y"))
        await until(lambda: len(decode.running) == 3)
        for stream in (*streams, other):
            stream.cancel()
        await rig.idle()
        # What has ended no longer counts.
        again = rig.stub.Generate(metadata=bearer(ALICE))
        await again.write(start("z"))
        await until(lambda: len(decode.running) == 1)
        long = inference_pb2.GenerateStart(id="long", text="one two three four five six seven eight nine")
        await again.write(inference_pb2.GenerateRequest(start=long))
        assert await ended(again, "long") == "PROMPT_TOO_LONG"
        again.cancel()
        await rig.idle()
        too_long = await post(rig, ALICE, {**BODY, "prompt": "one two three four five six seven eight nine"})
        assert too_long.status_code == 400 and too_long.json()["error"]["param"] == "prompt"


async def test_limits_without_keys():
    limits = {"max_prompt_tokens": 4, "max_header_bytes": 4096, "max_message_bytes": 4096}
    async with ScriptedDecode(saying([40])) as decode, gateway(decode, **limits) as rig:
        stream = Stream(rig)
        await stream.start("a", text="one two three four five six seven eight nine")
        event = (await stream.until_end("a"))[-1]
        assert "4 are allowed" in event.failed.message
        stream.call.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=(("x-large", "y" * 8000),))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await post(rig, None, {**BODY, "prompt": "x" * 5000})).status_code == 413
        async with httpx.AsyncClient(base_url=rig.http, trust_env=False) as http:
            for size in (5000, 7500):
                large = await http.get("/v1/models", headers={"x-large": "y" * size})
                assert large.status_code == 431, large.text
                assert large.json()["error"]["code"] == "headers_too_large"
            too_large = await http.get("/v1/models", headers={"x-large": "y" * 40000})
            assert too_large.status_code in (400, 431)  # 400 where it does not come in one piece
            assert (await http.get("/v1/models", headers={"x-large": "y" * 2000})).status_code == 200


async def test_a_connection_holds_so_many_streams():
    async with (
        ScriptedDecode(endless) as decode,
        gateway(decode, max_streams_per_connection=2) as rig,
    ):
        streams = []
        for number in range(2):
            streams.append(rig.stub.Generate())
            await streams[number].write(start(str(number)))
        await until(lambda: len(decode.running) == 2)
        streams.append(rig.stub.Generate())  # only now: calls are held back in the order in which they begin
        writing = asyncio.ensure_future(streams[2].write(start("2")))
        await asyncio.sleep(0.3)
        assert len(decode.running) == 2
        streams[0].cancel()
        await until(lambda: len(decode.starts) == 3, 10)  # the third was held back, not refused
        await writing
        for stream in streams:
            stream.cancel()
        await rig.idle()


async def test_streams_and_connections_do_not_idle_for_ever(monkeypatch):
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 0.4)
    async with (
        ScriptedDecode(saying([40], [41], pause=0.4)) as decode,
        gateway(decode, idle_seconds=0.5) as rig,
    ):
        stream = Stream(rig)
        await stream.start("a", text="hello")
        assert kinds_of(await stream.until_end("a"))[-1] == "finished"  # longer than that, but not idle
        with pytest.raises(grpc.aio.AioRpcError) as idle:
            await asyncio.wait_for(stream.call.read(), 10)
        error = from_rpc_error(idle.value)
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE")
        host, _, port = rig.node.info().http_address.rpartition(":")
        for sent in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        async with httpx.AsyncClient(base_url=rig.http, trust_env=False) as http:
            answer = await http.post("/v1/completions", json=BODY)  # answers after longer than that
            assert answer.status_code == 200


async def test_no_second_request_behind_two_lengths():
    """Content-Length and chunked: a proxy that goes by the first takes what follows for the body."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    body = b"0\r\n\r\n" + hidden
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with ScriptedDecode(saying([40])) as decode, gateway(decode) as rig:
        host, _, port = rig.node.info().http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        received = await asyncio.wait_for(reader.read(), 5)  # closed behind the answer
        writer.close()
        assert received.startswith(b"HTTP/1.1 400") and received.count(b"HTTP/1.1") == 1
        assert b"Transfer-Encoding" in received


def test_too_many_pings_close_the_connection_and_no_other(tmp_path):
    """Raw HTTP/2: no client library would send them."""

    async def scenario() -> None:
        async with ScriptedDecode(saying([40])) as decode, gateway(decode) as rig:
            received = await asyncio.to_thread(flood, rig.node.address)
            assert b"too_many_pings" in received
            stream = Stream(rig)
            await stream.start("a", text="hello")
            assert kinds_of(await stream.until_end("a"))[-1] == "finished"

    asyncio.run(scenario())


def flood(address: str) -> bytes:
    host, _, port = address.rpartition(":")
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"
    received = b""
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        with contextlib.suppress(ConnectionError):  # closed in the middle: what came before is still there
            for _ in range(200):
                connection.sendall(ping)
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                received += piece
    return received


async def test_tls(tmp_path, monkeypatch):
    pem = certificates.make(tmp_path / "pem")
    other = certificates.make(tmp_path / "other")
    files = {"tls_cert": pem.cert, "tls_key": pem.key, "api_keys": key_file(tmp_path)}
    async with ScriptedDecode(saying([40])) as decode, gateway(decode, **files) as rig:
        assert await ask(rig.node.address, ALICE, tls_ca=pem.ca)
        monkeypatch.setenv("BATON_API_KEY", ALICE)
        monkeypatch.setenv("BATON_TLS_CA", pem.ca)
        with Client(rig.node.address) as client:
            assert await asyncio.to_thread(lambda: client.generate("hello", max_tokens=2).text)
        for ca in ("", other.ca):
            with pytest.raises(BatonError) as refused:
                await ask(rig.node.address, ALICE, tls_ca=ca)
            assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        url = rig.http.replace("http://", "https://")
        headers = {"Authorization": f"Bearer {ALICE}"}
        trust = ssl.create_default_context(cafile=pem.ca)
        async with httpx.AsyncClient(base_url=url, verify=trust, headers=headers, trust_env=False) as http:
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        async with httpx.AsyncClient(trust_env=False) as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"{rig.http}/health")
    monkeypatch.setenv("BATON_TLS_CA", str(tmp_path / "absent"))
    with pytest.raises(BatonError, match="cannot read the CA file"):
        AsyncClient("127.0.0.1:1")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"host": "0.0.0.0"}, "--api-keys"),
        ({"api_keys": "absent"}, "cannot read"),
        ({"tls_cert": "pem/cert.pem"}, "--tls-key"),
        ({"tls_cert": "pem/cert.pem", "tls_key": "other/key.pem"}, "belong to each other"),
        ({"open_metrics": True, "metrics_token_file": "token"}, "leave --metrics-token-file out"),
    ],
)
async def test_what_a_gateway_does_not_start_with(tmp_path, monkeypatch, capsys, files, words):
    monkeypatch.chdir(tmp_path)
    certificates.make(tmp_path / "pem")
    certificates.make(tmp_path / "other")
    private(tmp_path / "token", SECRET)
    config = GatewayConfig(**{"http_port": None, **files})
    try:
        assert await serve(config, stop=asyncio.Event()) == 2
        said = capsys.readouterr().err
    except BatonError as error:
        said = error.message
    assert words in said


LIMITS = Limits(requests=7, streams=8, prompt_tokens=9)


async def test_the_key_file(tmp_path):
    hashed = "sha256:" + hashlib.sha256(BOB.encode()).hexdigest()
    keys = ApiKeys(
        key_file(tmp_path, f"\n  # text\n{ALICE} name=alice requests=0 streams=2\n{hashed} name=bob\n"),
        LIMITS,
    )
    alice, bob = keys.find(ALICE), keys.find(BOB)
    assert (alice.name, alice.limits) == ("alice", Limits(0, 2, 9))
    assert (bob.name, bob.limits) == ("bob", LIMITS)
    assert keys.find(hashed) is None and keys.find("") is None and keys.find("#") is None
    assert keys.find("ключ" * 8) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("short\n", "line 1: a key must have 16"),
        (f"{ALICE}\n{ALICE}\n", "line 2: the key of an earlier line"),
        (f"{ALICE} request=1\n", "name=NAME"),
        (f"{ALICE} requests=-1\n", "name=NAME"),
        (f"{ALICE} {BOB}\n", "name=NAME"),
        ("sha256:zz\n", "64 hexadecimal"),
        ("schlüssel-0123456789\n", "printable ASCII"),
    ],
)
def test_key_files_that_are_wrong(tmp_path, text, words):
    with pytest.raises(BatonError) as wrong:
        ApiKeys(key_file(tmp_path, text), LIMITS)
    assert (
        words in wrong.value.message and ALICE not in wrong.value.message and BOB not in wrong.value.message
    )


def test_a_key_file_that_everybody_can_read(tmp_path):
    path = Path(key_file(tmp_path))
    path.chmod(0o644)
    with pytest.raises(BatonError, match="chmod 600"):
        ApiKeys(str(path), LIMITS)


@pytest.mark.parametrize("limited", ["key", "gateway"])
async def test_a_call_of_several_prompts_starts_no_more_than_may_run(tmp_path, limited):
    """One after the other, if need be."""
    text = f"{ALICE} requests={1 if limited == 'key' else 0}\n"
    options = {"max_requests": 1} if limited == "gateway" else {}
    body = {**BODY, "prompt": ["one", "two", "three"], "n": 2}
    async with (
        ScriptedDecode(saying([40], [41])) as decode,
        gateway(decode, api_keys=key_file(tmp_path, text), **options) as rig,
    ):
        answer = await post(rig, ALICE, body)
        assert answer.status_code == 200, answer.text
        assert [each["index"] for each in answer.json()["choices"]] == [*range(6)]
        assert len(decode.starts) == 3
        streamed = await post(rig, ALICE, {**body, "stream": True})
        assert "data: [DONE]" in streamed.text and '"index":5' in streamed.text
        await rig.idle()
    async with (
        ScriptedDecode(endless) as decode,
        gateway(decode, api_keys=key_file(tmp_path, text), **options) as rig,
    ):
        waiting = asyncio.create_task(post(rig, ALICE, body))
        await until(lambda: len(decode.running) == 1)
        other = await post(rig, ALICE)
        assert other.status_code == 429, other.text
        waiting.cancel()  # and with it what has not begun
        await rig.idle()
        assert len(decode.starts) == 1


async def test_a_call_of_several_prompts_waits_for_its_turn(monkeypatch):
    """Another call of the key may have taken what its first prompt has left."""
    async with ScriptedDecode(saying([40])) as decode, gateway(decode) as rig:
        free = asyncio.get_running_loop().time() + 0.5
        monkeypatch.setattr(Gateway, "has_room", lambda *_: asyncio.get_running_loop().time() > free)
        answer = await post(rig, None, {**BODY, "prompt": ["one", "two"]})
        assert answer.status_code == 200, answer.text
        assert asyncio.get_running_loop().time() > free
        await rig.idle()
