"""Who may call a process of a deployment: the cluster secret, mutual TLS, which addresses may be bound."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry
from test_node import EchoNode, Running, encode

import certificates
from baton.authentication.cluster import (
    HEADER,
    ClusterAuthentication,
    ClusterCredentials,
    ClusterTls,
    check_address,
)
from baton.cli.health import check
from baton.config import NodeConfig
from baton.rpc import http_server
from baton.rpc.address import is_loopback
from baton.rpc.channel import open_channel
from baton.rpc.errors import BatonError, from_rpc_error
from baton.rpc.http_server import HttpServer, listen, metrics_app
from baton.rpc.node import run_node
from baton.transport import HostPages
from baton.transport.grpc import GrpcReceiver, PageSourceServicer
from baton.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    tokenizer_pb2_grpc,
)

SECRET = "c0ffee" * 8
PAGE = 64


class Everything(
    EchoNode,
    prefill_pb2_grpc.PrefillServicer,
    decode_pb2_grpc.DecodeServicer,
    cache_pb2_grpc.CacheServicer,
):
    """All internal services behind one interceptor; what gets in is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def add_services(self, server):
        super().add_services(server)
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)
        cache_pb2_grpc.add_CacheServicer_to_server(self, server)
        self.pages = bytearray(range(PAGE)) * 2
        pages = PageSourceServicer(HostPages(memoryview(self.pages), PAGE))
        prefill_pb2_grpc.add_PageSourceServicer_to_server(pages, server)
        names = ("Tokenizer", "Prefill", "PageSource", "Decode", "Cache")
        return [f"baton.v1.{name}" for name in names]

    async def set_role(self, role, seconds):
        return node_pb2.SetRoleResponse()

    async def Run(self, requests, context):
        async for message in requests:
            self.seen.append(message.WhichOneof("kind"))
            yield prefill_pb2.PrefillResponse()

    async def Generate(self, requests, context):
        async for message in requests:
            self.seen.append(message.WhichOneof("kind"))
            yield decode_pb2.StepEvents()

    async def Watch(self, request, context):
        self.seen.append("watch")
        yield cache_pb2.CacheUpdate()


def secret_file(folder: Path, secret: str = SECRET) -> str:
    path = folder / "secret"
    path.write_text(secret + "\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture
async def guarded(tmp_path):
    it = Running(Everything(), NodeConfig(cluster_secret_file=secret_file(tmp_path), drain_seconds=0.1))
    await it.started()
    yield it
    assert await it.end() == 0


def calls(channel):
    """One call of each internal service, by name."""
    release = prefill_pb2.PrefillRequest(release=prefill_pb2.LeaseRelease())
    hello = decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=1))
    fetch = prefill_pb2.FetchRequest(id=1, page_ids=[0])
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    node = node_pb2_grpc.NodeStub(channel)
    return {
        "Tokenizer": lambda **o: tokenizer_pb2_grpc.TokenizerStub(channel).Encode(encode("x"), **o),
        "Prefill": lambda **o: first(prefill_pb2_grpc.PrefillStub(channel).Run(iter([release]), **o)),
        "PageSource": lambda **o: first(prefill_pb2_grpc.PageSourceStub(channel).Fetch(iter([fetch]), **o)),
        "Decode": lambda **o: first(decode_pb2_grpc.DecodeStub(channel).Generate(iter([hello]), **o)),
        "Cache": lambda **o: first(cache_pb2_grpc.CacheStub(channel).Watch(cache_pb2.WatchRequest(), **o)),
        "GetInfo": lambda **o: node.GetInfo(node_pb2.GetInfoRequest(), **o),
        "GetLoad": lambda **o: node.GetLoad(node_pb2.GetLoadRequest(), **o),
        "Drain": lambda **o: node.Drain(node_pb2.DrainRequest(timeout_ms=1), **o),
        "SetRole": lambda **o: node.SetRole(node_pb2.SetRoleRequest(role="decode"), **o),
        "reflection": lambda **o: first(
            reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([listing]), **o)
        ),
    }


async def first(call):
    return await call.read()


async def refusal(call, metadata):
    """How the call fails. A client of grpc.aio that is still sending when its stream ends may say INTERNAL,
    and nothing of why; it asks again."""
    for _ in range(5):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(timeout=10, metadata=metadata)
        if refused.value.details() != "Internal error from Core":
            break
    return from_rpc_error(refused.value)


@pytest.mark.parametrize(
    "given", [None, "", "c0ffee", SECRET[:-1], SECRET[:-1] + "x", SECRET + "x", SECRET.upper()]
)
async def test_strangers_reach_no_internal_service(guarded, given):
    metadata = ((HEADER, given),) if given is not None else ()
    async with open_channel(guarded.node.address) as channel:
        for name, call in calls(channel).items():
            error = await refusal(call, metadata)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "CLUSTER_SECRET"), name
            assert SECRET not in error.message and "--cluster-secret-file" in error.message
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING  # the Drain has had no effect
    assert guarded.node.seen == []


async def test_two_secrets_at_once_are_none(guarded):
    async with open_channel(guarded.node.address) as channel:
        for pair in ((SECRET, SECRET), (SECRET, "x"), ("x", SECRET), ("", SECRET), (SECRET, "")):
            metadata = tuple((HEADER, each) for each in pair)
            error = await refusal(calls(channel)["GetInfo"], metadata)
            assert error.reason == "CLUSTER_SECRET", pair


async def test_who_knows_the_secret_reaches_all_of_them(guarded):
    cluster = ClusterCredentials(SECRET)
    async with cluster.dial(guarded.node.address) as channel:
        for call in calls(channel).values():
            await call(timeout=10)
    assert guarded.node.seen == ["release", "hello", "watch"]


async def test_the_page_transport_shows_the_secret(guarded):
    for cluster, works in ((ClusterCredentials(SECRET), True), (ClusterCredentials(), False)):
        local = bytearray(2 * PAGE)
        pages = HostPages(memoryview(local), PAGE)
        receiver = GrpcReceiver(guarded.node.address, pages, 2, dial=cluster.dial)
        if works:
            await receiver.pull([(0, 1)])
        else:
            with pytest.raises(Exception, match="UNAUTHENTICATED"):
                await receiver.pull([(0, 1)])
        assert bool(any(local)) is works
        await receiver.close()


def tls_of(*paths: str) -> ClusterTls:
    """Of the PEM files of a CA, a chain and its key."""
    return ClusterTls(*(Path(path).read_bytes() for path in paths))


async def test_mutual_tls(tmp_path):
    ours, theirs = certificates.make(tmp_path / "ours"), certificates.make(tmp_path / "theirs")
    config = NodeConfig(cluster_cert=ours.cert, cluster_key=ours.key, cluster_ca=ours.ca, drain_seconds=0.1)
    it = Running(Everything(), config)
    address = await it.started()
    # One of our CA; none; one of another CA; one of ours by somebody who trusts another CA.
    async with ClusterCredentials.load(config).dial(address) as channel:
        for call in calls(channel).values():
            await call(timeout=10)
    mixed = [tls_of(ours.ca, theirs.cert, theirs.key), tls_of(theirs.ca, ours.cert, ours.key)]
    for stranger in (ClusterCredentials(SECRET), *(ClusterCredentials(SECRET, tls) for tls in mixed)):
        async with stranger.dial(address) as channel:
            for name in ("Prefill", "GetInfo"):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await calls(channel)[name](timeout=5)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert it.node.seen == ["release", "hello", "watch"]
    assert await it.end() == 0


async def test_a_health_probe_shows_the_certificate_of_its_environment(tmp_path, monkeypatch):
    pem = certificates.make(tmp_path, "baton.cluster")
    files = {"cluster_cert": pem.cert, "cluster_key": pem.key, "cluster_ca": pem.ca}
    names = {**files, "cluster_tls_name": "baton.cluster"}
    it, plain = Running(EchoNode(), NodeConfig(**files)), Running(EchoNode(), NodeConfig())
    for each in (it, plain):
        await each.started()
    with pytest.raises(grpc.aio.AioRpcError):
        await check(it.node.address, "", 5.0)
    for name, value in names.items():
        monkeypatch.setenv(f"BATON_{name.upper()}", value)
    for each in (it, plain):  # such as a gateway whose TLS ends elsewhere
        assert await check(each.node.address, "", 5.0) == "SERVING"
        assert await each.end() == 0


async def test_a_certificate_for_one_name_serves_all(tmp_path):
    pem = certificates.make(tmp_path, "baton.cluster")
    files = {"cluster_cert": pem.cert, "cluster_key": pem.key, "cluster_ca": pem.ca}
    it = Running(EchoNode(), NodeConfig(**files, drain_seconds=0.1))
    address = await it.started()
    for name, works in (("baton.cluster", True), ("", False)):
        async with ClusterCredentials.load(NodeConfig(**files, cluster_tls_name=name)).dial(
            address
        ) as channel:
            call = tokenizer_pb2_grpc.TokenizerStub(channel).Encode(encode("x"), timeout=5)
            if works:
                await call
            else:
                with pytest.raises(grpc.aio.AioRpcError):
                    await call
    assert await it.end() == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_a_reachable_address_needs_a_secret_or_a_word(capsys, monkeypatch, tmp_path, host):
    node = EchoNode()
    assert await run_node(node, NodeConfig(host=host), stop=asyncio.Event()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--cluster-secret-file" in err and "--insecure" in err
    # That it would go on: asked without binding, so that the test opens no port to others.
    secret = secret_file(tmp_path)
    in_clear = NodeConfig(cluster_secret_file=secret, cluster_secret_in_clear=True)
    for config in (in_clear, NodeConfig(insecure=True)):
        guard = ClusterAuthentication(ClusterCredentials.load(config))
        check_address(host, guard, config.insecure)
    with pytest.raises(BatonError):
        check_address(host, ClusterAuthentication(ClusterCredentials()), False)
    with pytest.raises(BatonError, match="--cluster-secret-in-clear"):
        check_address(host, ClusterAuthentication(ClusterCredentials(SECRET)), False)


def test_the_secret_leaves_this_machine_over_tls_only():
    tls = ClusterTls(b"ca", b"cert", b"key")
    ours = ("127.0.0.1:1", "127.8.9.1:1", "localhost:1", "[::1]:1")
    others = ("10.0.0.1:1", "node.example.org:1", "0.0.0.0:1", "[fd00::1]:1", "localhost.example.org:1", ":1")
    sent = ((HEADER, SECRET),)
    for address in (*ours, *others):
        expected = sent if address in ours else ()
        assert ClusterCredentials(SECRET).metadata(address, encrypted=False) == expected, address
        assert ClusterCredentials(SECRET, tls).metadata(address, encrypted=True) == sent
        assert ClusterCredentials(SECRET, secret_in_clear=True).metadata(address, encrypted=False) == sent
        assert ClusterCredentials().metadata(address, encrypted=True) == ()


async def test_the_secret_is_not_sent_to_another_machine(guarded):
    """The process has another name here, which could be another machine's."""
    port = guarded.node.address.rpartition(":")[2]
    address = f"ipv4:127.0.0.1:{port}"  # no loopback address by its looks
    for cluster, works in (
        (ClusterCredentials(SECRET), False),
        (ClusterCredentials(SECRET, secret_in_clear=True), True),
    ):
        async with cluster.dial(address) as channel:
            if works:
                await calls(channel)["GetInfo"](timeout=10)
            else:
                assert (await refusal(calls(channel)["GetInfo"], ())).reason == "CLUSTER_SECRET"


def test_what_is_loopback():
    for host in ("127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"):
        assert is_loopback(host), host
    for host in ("", "0.0.0.0", "::", "10.0.0.1", "192.0.2.1", "no-such-host.invalid"):
        assert not is_loopback(host), host


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "cannot read"),
        (lambda path: path.write_text(SECRET) and path.chmod(0o604), "chmod 600"),
        (lambda path: path.write_text("short") and path.chmod(0o600), "16 or more"),
        (lambda path: path.write_text("ä" * 40) and path.chmod(0o600), "ASCII"),
        (lambda path: path.write_text(SECRET + "\n" + SECRET) and path.chmod(0o600), "one line"),
    ],
)
async def test_secret_files_that_cannot_be_used(tmp_path, capsys, make, words):
    path = tmp_path / "secret"
    make(path)
    config = NodeConfig(cluster_secret_file=str(path))
    assert await run_node(EchoNode(), config, stop=asyncio.Event()) == 2
    err = capsys.readouterr().err
    assert words in err and str(path) in err and SECRET not in err and err.count("\n") == 1


async def test_half_of_what_mutual_tls_needs(capsys, tmp_path):
    pem = certificates.make(tmp_path)
    assert await run_node(EchoNode(), NodeConfig(cluster_cert=pem.cert), stop=asyncio.Event()) == 2
    assert "--cluster-key and --cluster-ca" in capsys.readouterr().err


def well() -> tuple[bool, list[str]]:
    return True, []


async def test_metrics_beyond_loopback_take_the_secret(tmp_path):
    def scrape(port: int, scheme: str = "http", context=None, **headers: str) -> int:
        request = urllib.request.Request(f"{scheme}://127.0.0.1:{port}/metrics", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=5, context=context) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    async with served(metrics_app(CollectorRegistry(), well, SECRET)) as port:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": SECRET}):
            assert await asyncio.to_thread(scrape, port, **given) == 401
        assert await asyncio.to_thread(scrape, port, Authorization=f"Bearer {SECRET}") == 200
    pem = certificates.make(tmp_path)
    tls = tls_of(pem.ca, pem.cert, pem.key).ssl_context(server=True)
    async with served(metrics_app(CollectorRegistry(), well), tls) as port:
        known, unknown = (ssl.create_default_context(cafile=pem.ca) for _ in range(2))
        known.load_cert_chain(pem.cert, pem.key)
        assert await asyncio.to_thread(scrape, port, "https", known) == 200
        with pytest.raises(OSError):
            await asyncio.to_thread(scrape, port, "https", unknown)
        assert await asyncio.to_thread(scrape, port, "https", known) == 200


@asynccontextmanager
async def served(app, tls=None):
    server = HttpServer(app, [listen("127.0.0.1", 0)], tls, keep_alive=False)
    server.start()
    try:
        yield server.port
    finally:
        await server.stop()


async def test_slow_clients_of_metrics_are_left_and_hold_no_thread(monkeypatch):
    """They send nothing, or their headers byte by byte."""
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 1)

    async def left(port: int, text: bytes) -> float:
        started = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            for byte in text:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.2)
            assert await reader.read() == b""
        writer.close()
        return time.monotonic() - started

    async with served(metrics_app(CollectorRegistry(), well)) as port, asyncio.timeout(20):
        threads = threading.active_count()
        texts = (b"", b"GET /metrics HTTP/1.1\r\nHost: x" + b"y" * 60)
        ends = asyncio.gather(*(left(port, text) for text in texts * 10))
        await asyncio.sleep(0.5)
        assert threading.active_count() <= threads
        assert max(await ends) < 10


def test_secrets_do_not_show():
    tls = ClusterTls(b"ca", b"cert", b"-key-")
    assert SECRET not in repr(ClusterCredentials(SECRET, tls)) and "-key-" not in repr(
        ClusterCredentials(SECRET, tls)
    )
