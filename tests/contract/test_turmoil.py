"""Nodes that leave, hang or fail while others serve: what still can be served is, and health says so."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

import grpc
import grpc.aio
from gateway_rig import Stream, gateway, ids_of, tokenizer, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_decode import Running, ScriptedDecode, saying, silent
from test_node import EchoNode
from test_node import Running as Served

from baton.config import NodeConfig
from baton.demo import model_path
from baton.rpc.channel import open_channel
from baton.rpc.errors import from_status, unavailable
from baton.rpc.health import HealthServicer
from baton.tokenizer import hf_tokenizer
from baton.v1 import common_pb2, node_pb2, node_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

VOCABULARY = hf_tokenizer.load(model_path()).vocabulary


class HangingTokenizer(tokenizer_pb2_grpc.TokenizerServicer, node_pb2_grpc.NodeServicer):
    """Takes prompts and answers never."""

    def __init__(self) -> None:
        self.asked = 0

    async def __aenter__(self) -> str:
        self._server = grpc.aio.server()
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self, self._server)
        node_pb2_grpc.add_NodeServicer_to_server(self, self._server)
        health = HealthServicer()
        health.add_to(self._server, [])
        health.set_all(True)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def GetInfo(self, request, context) -> node_pb2.NodeInfo:
        model = node_pb2.ModelInfo(name="scripted", vocab_size=4096, vocabulary_hash=VOCABULARY.hash)
        return node_pb2.NodeInfo(role="tokenizer", incarnation=1, model=model)

    async def Encode(self, request, context) -> None:
        self.asked += 1
        await asyncio.Event().wait()

    async def Vocabulary(self, request, context):
        for part in VOCABULARY.parts():
            yield part


async def test_a_prompt_at_a_tokenizer_that_is_removed_goes_to_another():
    hanging = HangingTokenizer()
    async with (
        ScriptedDecode(saying([50, 51])) as node,
        tokenizer() as good,
        hanging as address,
        gateway(node, tokenizer_address=address, resume_wait_seconds=5.0) as rig,
    ):
        stream = Stream(rig)
        await stream.start(text="x")
        await until(lambda: hanging.asked)
        rig.node.gateway.nodes.add("tokenizer", good)
        rig.node.gateway.nodes.remove("tokenizer", address)
        events = await stream.until_end()
        assert ids_of(events) == [50, 51] and events[-1].WhichOneof("kind") == "finished"
        await rig.idle()


async def health(rig) -> tuple[bool, bool]:
    """Over gRPC, and over HTTP."""

    def http() -> bool:
        try:
            with urllib.request.urlopen(f"{rig.http}/health", timeout=30) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            return error.code != 503

    async with open_channel(rig.node.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    return answer.status == health_pb2.HealthCheckResponse.SERVING, await asyncio.to_thread(http)


async def test_one_hop_that_fails_is_no_end_of_service():
    """Probes name one prefill node each; requests name all, and go on to the next."""
    wedged = {"127.0.0.1:1"}

    async def script(running: Running) -> None:
        if wedged & set(running.start.prefill):
            await running.failed(unavailable("wedged", "TEST"))
        else:
            await saying([50, 51])(running)

    async with ScriptedDecode(silent) as node:
        node.script = script
        async with gateway(node, prefill=("127.0.0.1:1", "127.0.0.1:2"), probe_every=0.05) as rig:
            failures = rig.node.gateway._prober.failures
            await until(lambda: len(rig.node.gateway._prober.failures) == 1 and len(node.starts) > 4)
            await asyncio.sleep(0.7)  # health follows within 0.5 s
            assert await health(rig) == (True, True), failures
            wedged.add("127.0.0.1:2")
            async with asyncio.timeout(30):
                while await health(rig) != (False, False):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)


async def test_health_is_told_again_after_a_load_that_could_not_be():
    node = EchoNode()
    told = node.load
    problems: list[node_pb2.Problem] = []

    def load() -> node_pb2.Load:
        load = told()
        load.problems.extend(problems)
        return load

    def broken() -> node_pb2.Load:
        raise RuntimeError("dictionary changed size during iteration")

    node.load = load
    it = Served(node, NodeConfig(http_port=None))
    async with open_channel(await it.started()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        node.load = broken
        await asyncio.sleep(0.7)
        problems.append(node_pb2.Problem(reason="TEST", stops_serving=True))
        node.load = load
        async with asyncio.timeout(30):
            while (await stub.Check(health_pb2.HealthCheckRequest())).status == 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert await it.end() == 0


async def test_what_is_too_much_is_refused_before_it_is_looked_at():
    """One message of the allowed size must not hold up the gateway, or be multiplied in it."""
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        stream = Stream(rig)
        role = tokenizer_pb2.ChatMessage(role="x" * 8_000_000)
        wrong = {
            "sampling.stop": {"text": "x", "n": 16, "sampling": {"stop": [""] * 1_000_000}},
            "tokens.token_ids": {"tokens": {"token_ids": [1] * 3_000_000}},
            "chat.messages": {"chat": {"messages": [tokenizer_pb2.ChatMessage()] * 1_000_000}},
            "chat.messages ": {"chat": {"messages": [role]}},
        }
        loop = asyncio.get_running_loop()
        for field, fields in wrong.items():
            await stream.start(**fields)
            began = loop.time()
            answer = await stream.next()
            rejected = answer.WhichOneof("kind") == "rejected"
            error = from_status(answer.rejected.status if rejected else answer.failed)
            assert error.field.removeprefix("start.") == field.strip(), error.message
            assert loop.time() - began < 2.0, field
        body = {"model": "scripted", "prompt": ["x"] * 256, "stop": ["x"] * 500_000}
        assert await post(f"{rig.http}/v1/completions", body) == 400
        await rig.idle()


async def post(url: str, body: dict[str, object]) -> int:
    def ask() -> int:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    return await asyncio.to_thread(ask)


def until_paused(node: ScriptedDecode):
    entry = common_pb2.TokenLogprob(token_id=50, logprob=-1.5)
    large = common_pb2.PositionLogprobs(chosen=entry, top=[entry] * 20)

    async def script(running: Running) -> None:
        await running.prompt()
        while not node.pauses:
            await running.tokens([50] * 20, logprobs=[large] * 20)
            await asyncio.sleep(0.001)
        await silent(running)

    return script


async def test_a_paused_request_is_paused_elsewhere_and_fails_there():
    """Its node dies; at the other one it stays paused, and nobody holds anything of it in the end."""
    nodes = ScriptedDecode(silent, context=100_000), ScriptedDecode(silent, context=100_000)
    settings = {"max_unread_tokens": 400, "slow_reader_seconds": 4.0}
    async with nodes[0], nodes[1], gateway(*nodes, **settings) as rig:
        for node in nodes:
            node.script = until_paused(node)
        stream = Stream(rig)
        await stream.start(text="x", sampling={"max_tokens": 60_000, "logprobs": 20})
        await until(lambda: any(node.pauses for node in nodes), 30)
        first, second = nodes if nodes[0].pauses else nodes[::-1]
        await first.die()
        await until(lambda: second.pauses)
        assert second.pauses == [(second.starts[0].request, True)]
        assert second.starts[0].attempt == 1 and second.paused_attempts == [1]
        await until(lambda: second.cancels)
        await rig.idle()
        assert rig.node.authentication._anonymous._requests == 0
        events = await stream.until_end()
        error = from_status(events[-1].failed)
        assert error.reason == "SLOW_READER" and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(second.starts) == 1 and not second.running
        stream.call.cancel()
        await until(lambda: rig.node.authentication._anonymous._streams == 0)
