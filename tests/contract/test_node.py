"""run_node against stock clients: health, reflection, metrics, drain, signals and failures to start."""

import asyncio
import gc
import os
import signal
import socket
import sys
import urllib.request

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from baton.config import GatewayConfig, NodeConfig
from baton.rpc import health
from baton.rpc.channel import open_channel
from baton.rpc.errors import failed_precondition, from_rpc_error, invalid
from baton.rpc.health import INTERVAL_SECONDS
from baton.rpc.metrics import SECONDS
from baton.rpc.node import run_node
from baton.tracing.recorder import Recorder
from baton.v1 import node_pb2, node_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class EchoNode(tokenizer_pb2_grpc.TokenizerServicer):
    """A node whose one call tells how many bytes arrived."""

    role = "tokenizer"

    def __init__(self):
        self.recorder = Recorder(8)
        self.loaded = asyncio.Event()
        self.running = 0
        self.idle = asyncio.Event()
        self.stopped = 0

    def add_services(self, server):
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self, server)
        return ["baton.v1.Tokenizer"]

    async def start(self, address):
        self.address = address
        await self.loaded.wait()

    async def drain(self, seconds):
        if self.running:
            try:
                await asyncio.wait_for(self.idle.wait(), seconds)
            except TimeoutError:
                return self.running
        return 0

    async def stop(self):
        self.stopped += 1

    def info(self):
        return node_pb2.NodeInfo(incarnation=7)

    def load(self):
        return node_pb2.Load(
            requests=self.running,
            steps=3,
            pages=node_pb2.PageCounts(total=9, free=4),
            handoff_retry_reasons={"PEER_LOST": 2},
        )

    async def Encode(self, request, context):
        size = sum(len(entry.text) for entry in request.inputs)
        return tokenizer_pb2.EncodeResponse(results=[tokenizer_pb2.EncodeResult(token_ids=[size])])


class Running:
    """A node served by run_node in this process."""

    def __init__(self, node, config):
        self.node = node
        self.ready, self.stop = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(run_node(node, config, ready=self.ready, stop=self.stop))

    async def bound(self):
        async with asyncio.timeout(30):
            while not hasattr(self.node, "address"):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return self.node.address

    async def started(self):
        self.node.loaded.set()
        await asyncio.wait_for(self.ready.wait(), 60)
        return self.node.address

    async def end(self):
        self.stop.set()
        return await asyncio.wait_for(self.task, 30)


@pytest.fixture
async def running():
    it = Running(EchoNode(), NodeConfig(drain_seconds=1.0))
    yield it
    it.node.idle.set()
    assert await it.end() == 0
    assert it.node.stopped == 1


async def check(channel, service=""):
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=30)).status


def encode(*texts):
    return tokenizer_pb2.EncodeRequest(inputs=[tokenizer_pb2.EncodeInput(text=text) for text in texts])


async def test_health_follows_the_nodes_life(running):
    async with open_channel(await running.bound()) as channel:
        watched = []

        async def watch():
            request = health_pb2.HealthCheckRequest(service="baton.v1.Tokenizer")
            async for answer in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=20):
                watched.append(answer.status)

        first, second = asyncio.create_task(watch()), asyncio.create_task(watch())
        for service in ("", "baton.v1.Tokenizer", "baton.v1.Node"):
            assert await check(channel, service) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await tokenizer_pb2_grpc.TokenizerStub(channel).Encode(encode("x"), timeout=30)
        error = from_rpc_error(refused.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
        assert error.retry_after_ms is not None
        first.cancel()  # a watcher that leaves does not silence the other
        await running.started()
        for service in ("", "baton.v1.Tokenizer", "baton.v1.Node"):
            assert await check(channel, service) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await check(channel, "no.such.Service")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        stub = node_pb2_grpc.NodeStub(channel)
        assert (await stub.Drain(node_pb2.DrainRequest(timeout_ms=100), timeout=30)).drained
        assert await check(channel) == NOT_SERVING
        assert (await stub.GetLoad(node_pb2.GetLoadRequest(), timeout=30)).draining
        async with asyncio.timeout(30):
            while watched[-1] != NOT_SERVING or SERVING not in watched:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        second.cancel()


async def test_strangers_hold_no_more_than_so_many_watches(running, monkeypatch):
    monkeypatch.setattr(health, "MAX_WATCHERS", 2)
    async with open_channel(await running.started()) as channel:

        def watch():
            return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)

        first, second = watch(), watch()
        assert (await first.read()).status == (await second.read()).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await watch().read()
        assert from_rpc_error(refused.value).reason == "TOO_MANY_WATCHERS"
        assert await check(channel) == SERVING
        first.cancel()
        async with asyncio.timeout(30):  # the place is free again as soon as the node has noticed
            while True:
                try:
                    await watch().read()
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)


async def test_a_node_that_cannot_say_how_it_is_serves_no_more(running):
    async with open_channel(await running.started()) as channel:
        well = running.node.load

        def ill():
            raise KeyError("a counter")

        async def turned(status):
            async with asyncio.timeout(30):
                while await check(channel) != status:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

        info = await node_pb2_grpc.NodeStub(channel).GetInfo(node_pb2.GetInfoRequest(), timeout=30)
        url = f"http://{info.http_address}/health"
        running.node.load = ill
        await asyncio.sleep(1.5 * INTERVAL_SECONDS)
        assert await check(channel) == SERVING, "once or twice may be chance"
        await turned(NOT_SERVING)
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            await asyncio.to_thread(urllib.request.urlopen, url, timeout=30)
        assert b"the load is not known: KeyError" in refused.value.read()
        running.node.load = well
        await turned(SERVING)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_names_every_service_and_describes_it(running, version):
    v1 = "grpc.reflection.v1.ServerReflection"
    async with open_channel(await running.started()) as channel:
        ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = ask(
            iter(
                [
                    reflection_pb2.ServerReflectionRequest(list_services=""),
                    reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.Tokenizer"),
                    reflection_pb2.ServerReflectionRequest(file_containing_symbol=v1),
                ]
            ),
            timeout=5,
        )
        answers = [answer async for answer in call]
        assert {service.name for service in answers[0].list_services_response.service} == {
            "baton.v1.Tokenizer",
            "baton.v1.Node",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            v1,
        }
        assert answers[1].file_descriptor_response.file_descriptor_proto
        (described,) = answers[2].file_descriptor_response.file_descriptor_proto
        described = descriptor_pb2.FileDescriptorProto.FromString(described)
        assert described.package == "grpc.reflection.v1" and described.service[0].name == "ServerReflection"


async def test_info_and_metrics(running):
    address = await running.started()
    async with open_channel(address) as channel:
        info = await node_pb2_grpc.NodeStub(channel).GetInfo(node_pb2.GetInfoRequest(), timeout=30)
    assert (info.role, info.incarnation, info.pid, info.address) == ("tokenizer", 7, os.getpid(), address)

    def scrape():
        with urllib.request.urlopen(f"http://{info.http_address}/metrics", timeout=30) as answer:
            return answer.read().decode()

    text = await asyncio.to_thread(scrape)
    assert 'baton_steps_total{model="",role="tokenizer"} 3.0' in text
    assert 'baton_pages{model="",role="tokenizer",state="free"} 4.0' in text
    assert 'baton_handoff_retry_reasons_total{model="",reason="PEER_LOST",role="tokenizer"} 2.0' in text
    no_numbers = {"pages", "problems", "handoff_retry_reasons", "borrow_failures", "plan_times"}
    no_numbers |= {"disk_faults", "drafter", "drafted_places", "accepted_places"}
    for_routing = {"step_cost", "pull_cost", "borrow_cost", "encode_cost"}
    for_routing |= {"host_token_seconds", "step_tokens", "keys"}
    names = {f.name for f in node_pb2.Load.DESCRIPTOR.fields} - no_numbers - for_routing
    names = {f"{SECONDS[n][0]}_seconds" if n in SECONDS else n for n in names}
    assert not [n for n in names if f"baton_{n}{{" not in text and f"baton_{n}_total{{" not in text]


async def test_a_message_beyond_the_limit_fails_alone():
    it = Running(EchoNode(), GatewayConfig(http_port=None, max_message_bytes=2**20))
    async with open_channel(await it.started(), 2**30) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Encode(encode("x" * 2**21), timeout=20)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await stub.Encode(encode("x" * 1000), timeout=30)).results[0].token_ids == [1000]
        state = channel.get_state()
        assert state is grpc.ChannelConnectivity.READY  # the same connection all along
    assert await it.end() == 0


class RefusingNode(EchoNode):
    """Ends each stream at its first message."""

    async def Detokenize(self, requests, context):
        async for _ in requests:
            raise invalid("items", "never these")
        yield tokenizer_pb2.DetokenizeResponse()


async def test_a_stream_that_ends_early_leaves_no_open_generator():
    """One that is left is closed by a finalizer of the garbage collector: see rpc.garbage."""
    it = Running(RefusingNode(), NodeConfig())
    async with open_channel(await it.started()) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        gc.collect()
        gc.disable()
        try:
            for _ in range(50):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    async for _ in stub.Detokenize(iter([tokenizer_pb2.DetokenizeRequest()]), timeout=10):
                        pass
                assert from_rpc_error(refused.value).field == "items"
            left = [type(each) for each in gc.get_objects()]
        finally:
            gc.enable()
    assert not [kind for kind in left if kind.__name__ == "async_generator" and "cython" in kind.__module__]
    assert await it.end() == 0


async def test_drain_waits_for_running_requests_and_not_for_ever():
    it = Running(EchoNode(), NodeConfig(drain_seconds=0.3))
    address = await it.started()
    it.node.running = 1
    it.stop.set()
    async with open_channel(address) as channel:
        assert await check(channel) == NOT_SERVING
    assert await asyncio.wait_for(it.task, 30) == 0
    assert it.node.stopped == 1


def told(capsys):
    """What is on stderr beside the log."""
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("timestamp="))


async def test_a_port_that_is_taken(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        node = EchoNode()
        assert await run_node(node, NodeConfig(port=port), stop=asyncio.Event()) == 2
        line = f"cannot bind 127.0.0.1:{port}: the port is in use; choose another with"
        assert told(capsys) == f"baton tokenizer: {line} --port\n"
        assert await run_node(node, NodeConfig(http_port=port), stop=asyncio.Event()) == 2
        assert told(capsys) == f"baton tokenizer: {line} --http-port\n"
    assert node.stopped == 0  # it was never started


@pytest.mark.parametrize(
    ("host", "words"), [("no-such-host.invalid", "host name is unknown"), ("192.0.2.1", "no interface")]
)
async def test_a_host_that_is_not_here(capsys, host, words):
    assert await run_node(EchoNode(), NodeConfig(host=host), stop=asyncio.Event()) == 2
    err = told(capsys)
    assert words in err
    assert err.count("\n") == 1


async def test_a_node_that_cannot_start(capsys):
    class Broken(EchoNode):
        async def start(self, address):
            raise failed_precondition("the model is broken; fetch it again")

    node = Broken()
    assert await run_node(node, NodeConfig(), stop=asyncio.Event()) == 2
    assert told(capsys) == "baton tokenizer: the model is broken; fetch it again\n"
    assert node.stopped == 1


PROCESS = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from test_node import EchoNode
from baton.config import NodeConfig
from baton.rpc.node import run_node, run_process

async def main():
    node = EchoNode()
    node.loaded.set()
    node.running = {running}
    return await run_node(node, NodeConfig(drain_seconds=60.0))

sys.exit(run_process(main()))
"""


async def start_process(running):
    folder = os.path.dirname(__file__)  # noqa: PTH120
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS.format(folder=folder, running=running),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    line = (await asyncio.wait_for(process.stdout.readline(), 120)).decode()
    assert line.startswith("ready role=tokenizer address=127.0.0.1:")
    assert line.endswith(f" pid={process.pid}\n")
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_an_idle_process(number):
    process = await start_process(running=0)
    process.send_signal(number)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert out == b""  # the ready line was the only one
    assert b"Traceback" not in err


async def test_a_second_signal_ends_the_drain():
    process = await start_process(running=1)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 1.0)
    process.send_signal(signal.SIGTERM)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert b"remaining=1" in err
