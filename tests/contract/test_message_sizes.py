"""No message is larger than the 4 MiB that stock gRPC clients read: every method of every service."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from gateway_rig import gateway, tokenizer
from google.protobuf import descriptor_pool
from scripted_decode import LENGTH, ScriptedDecode, silent

from baton.config import GatewayConfig
from baton.engine.plan import Logprobs
from baton.gateway.cache_view import CacheView
from baton.gateway.decode_client import DecodeClient
from baton.gateway.gateway import Gateway
from baton.handoff.messages import AttemptName, FirstSampled
from baton.kvcache.kv_events import TreeLog
from baton.rpc.errors import from_rpc_error, from_status
from baton.rpc.message_size import MAX_ANSWER_BYTES
from baton.rpc.tasks import Tasks
from baton.tokenizer import service
from baton.tracing.recorder import EventKind
from baton.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    embed_pb2,
    inference_pb2,
    inference_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    trace_pb2,
    trace_pb2_grpc,
)
from baton.worker.cache_service import CacheServicer
from baton.worker.caller_stream import CallerStreams
from baton.worker.decode.stream import DecodeStream, add_output
from baton.worker.decode.types import PromptOutput, TokensOutput
from baton.worker.embedder import check as check_embed
from baton.worker.handoff_messages import events_from
from baton.worker.lease_stream import LeaseStream
from baton.worker.prefill.shell import PrefillShell

BOUNDED = {
    "Inference.ListModels": "one model",
    "Node.GetInfo": "ranks and peers, a few hundred at most",
    "Node.GetLoad": "counters",
    "Node.Watch": "a load, and at most 65,536 cells of a map",
    "Node.Drain": "two numbers",
    "Node.SetRole": "three numbers",
    "PageSource.Fetch": "pieces of 1 MiB",
    "Cache.Lend": "the pages of one prompt",
    "Decode.TakeLog": "a larger log is not handed out: unit/test_kept_logs.py",
}
"""Methods whose answers cannot be large."""
PROMPT = 12_500
"""Tokens: their log-probabilities with 20 alternatives have 4.5 MB."""
TOP = tuple((token, -1.0) for token in range(100_000, 100_020))


@asynccontextmanager
async def stock(address):
    """A connection with no options at all."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


@asynccontextmanager
async def serving(add, servicer):
    server = grpc.aio.server()
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with stock(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


@asynccontextmanager
async def stock_gateway(script=silent):
    async with (
        ScriptedDecode(script, context=40_000) as node,
        gateway(node, max_unread_tokens=100_000) as rig,
        stock(rig.node.address) as channel,
    ):
        yield rig, channel


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    error = from_rpc_error(raised.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "ANSWER_TOO_LARGE"), error
    return error


def position(number):
    top = [{"token_id": token, "logprob": -1.0} for token in range(2000, 2020)]
    return common_pb2.PositionLogprobs(chosen={"token_id": number % 4000, "logprob": -number}, top=top)


async def large_answer(running):
    """Log-probabilities of prompt and output; of a prompt with two tokens, a word."""
    count = len(running.start.token_ids)
    await running.prompt(logprobs=[common_pb2.PositionLogprobs(), *map(position, range(1, count))])
    if count > 2:
        await running.tokens([40] * PROMPT, logprobs=[position(i) for i in range(PROMPT)])
    last = [position(0)] if running.start.sampling.HasField("logprobs") else ()
    await running.tokens([41], logprobs=last, finish=LENGTH)
    await running.finished()


SAMPLING = {"logprobs": 20, "prompt_logprobs": 20}


def start_of(id="", tokens=PROMPT, sampling=SAMPLING):
    return inference_pb2.GenerateStart(id=id, tokens={"token_ids": [40] * tokens}, sampling=sampling)


def check_whole(deltas):
    prompt = [each for delta in deltas for each in delta.prompt_logprobs]
    assert [each.chosen.logprob for each in prompt] == [-i for i in range(PROMPT)]
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    output = [each.chosen.logprob for delta in deltas for each in delta.logprobs]
    assert output == [-i for i in range(PROMPT)] + [0]
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [LENGTH]
    assert deltas[-1].finish_reason


async def generate():
    async with stock_gateway(large_answer) as (_, channel):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(timeout=60)
        for id, count in (("large", PROMPT), ("small", 2)):
            await call.write(inference_pb2.GenerateRequest(start=start_of(id, count)))
        await call.done_writing()
        events = [event async for event in call]
        ends = {event.id for event in events if event.WhichOneof("kind") == "finished"}
        assert ends == {"large", "small"}
        check_whole([e.delta for e in events if e.id == "large" and e.WhichOneof("kind") == "delta"])


async def stream():
    async with stock_gateway(large_answer) as (_, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        events = [e async for e in stub.Stream(inference_pb2.StreamRequest(start=start_of()), timeout=60)]
        check_whole([event.delta for event in events if event.WhichOneof("kind") == "delta"])


async def complete():
    async with stock_gateway(large_answer) as (rig, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        error = await refusal(stub.Complete(inference_pb2.CompleteRequest(start=start_of()), timeout=60))
        assert error.field == "start" and "use Inference.Stream" in error.message
        await rig.idle()


async def embed():
    async with stock_gateway() as (_, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        inputs = [inference_pb2.EmbedInput(tokens={"token_ids": [5]})] * 1100
        error = await refusal(stub.Embed(inference_pb2.EmbedRequest(inputs=inputs), timeout=10))
        assert error.field == "inputs" and "send at most 952 at a time" in error.message
        # With less of each they fit, and are given to a node: the scripted one computes none.
        few = inference_pb2.EmbedRequest(inputs=inputs, dimensions=64, timeout_ms=1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Embed(few, timeout=10)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def embed_at_a_node():
    info = node_pb2.ModelInfo(embedding_size=16_384, context_length=8, vocab_size=9)
    prompts = [embed_pb2.EmbedPrompt(token_ids=[1])] * 64
    check_embed(embed_pb2.EmbedPrompts(prompts=prompts[:59]), info)
    with pytest.raises(Exception, match="send at most 59 at a time"):
        check_embed(embed_pb2.EmbedPrompts(prompts=prompts), info)


class Callers:
    """A worker whose steps have yielded all this before its caller reads."""

    def __init__(self, stream, welcome):
        self.stream, self._welcome = stream, welcome
        self.streams = CallerStreams(self, Tasks())

    def open(self, hello):
        return self.stream

    def welcome(self):
        return self._welcome

    def half_closed(self, stream):
        stream.close()

    def drop(self, stream):
        pass

    async def Generate(self, requests, context):
        async for message in self.streams.serve(requests, context, "a stream"):
            yield message

    Run = Generate
    Embed = TakeLog = None  # of other methods' tests


async def decode():
    waiting = DecodeStream(7)
    for request in (1, 2):
        waiting.begin(request, 0)
        logprobs = tuple(Logprobs(token, -float(token), TOP) for token in range(1, PROMPT))
        steps = [PromptOutput(request, 0, 3, logprobs)]
        steps += [TokensOutput(request, 0, 0, t, Logprobs(t, -1.0, TOP), None) for t in range(PROMPT)]
        message = decode_pb2.StepEvents(step=1)
        for output in steps:
            add_output(message, output, 1)
        assert waiting.send(message)
    welcome = decode_pb2.DecodeEvent(welcome=decode_pb2.DecodeWelcome(incarnation=1))
    callers = Callers(waiting, [decode_pb2.StepEvents(events=[welcome])])
    received = {1: Received(), 2: Received()}
    peer = DecodeClient("a:1", 10.0, lambda info: None, Gateway(GatewayConfig()))
    peer._sinks = dict(received)
    async with serving(decode_pb2_grpc.add_DecodeServicer_to_server, callers) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(timeout=60)
        await call.write(decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=7)))
        await call.done_writing()
        async for message in call:
            if not message.events or not message.events[0].HasField("welcome"):
                peer._on_message(message)
    for each in received.values():
        assert each.tokens == list(range(PROMPT)) and each.logprobs == each.tokens
        assert each.prompt == list(range(PROMPT)) and each.cached == 3
    assert not peer._prompts


class Received:
    """A request, as a gateway's connection tells it."""

    attempt = 0

    def __init__(self):
        self.tokens, self.logprobs, self.prompt, self.cached = [], [], [], 0

    def on_prompt(self, prompt):
        assert not self.prompt and not self.tokens
        self.prompt = [each.chosen.token_id for each in prompt.prompt_logprobs]
        self.cached = prompt.cached_tokens

    def on_tokens(self, address, delta):
        self.tokens += delta.token_ids
        self.logprobs += [each.chosen.token_id for each in delta.logprobs]


async def prefill():
    waiting, names = LeaseStream(7), [AttemptName(1, number, 0, 0) for number in range(2)]
    shell = SimpleNamespace(drop=None)
    logprobs = tuple(Logprobs(token, -1.0, TOP) for token in range(1, PROMPT))
    for name in names:
        PrefillShell._deliver(shell, {waiting: [FirstSampled(name, ((5, None),), 3, logprobs)]})
    welcome = prefill_pb2.PrefillEvent(welcome=prefill_pb2.PrefillWelcome(incarnation=1))
    callers = Callers(waiting, [prefill_pb2.PrefillResponse(events=[welcome])])
    found, parts = [], {}
    async with serving(prefill_pb2_grpc.add_PrefillServicer_to_server, callers) as channel:
        call = prefill_pb2_grpc.PrefillStub(channel).Run(timeout=60)
        await call.write(prefill_pb2.PrefillRequest(hello=prefill_pb2.PrefillHello(incarnation=7)))
        await call.done_writing()
        async for message in call:
            found += events_from(message, 200_000, parts)
    assert [each.name for each in found] == names and not parts
    for first in found:
        assert [each.token for each in first.prompt_logprobs] == list(range(1, PROMPT))
        assert first.cached_tokens == 3 and first.tokens == ((5, None),)


async def watch_cache():
    log = TreeLog(16)
    log.sequence = 900_000
    held = {row: (row + 1).to_bytes(8, "little") for row in range(350_000)}
    for tier in log._digests:
        tier.held.update(held)
    node = SimpleNamespace(
        incarnation=3,
        role="prefill",
        requests=0,
        observed=0.0,
        load=node_pb2.Load,
        loop=asyncio.get_running_loop(),
        steps=SimpleNamespace(call=lambda what: None),
        layout=SimpleNamespace(page_size=16),
    )
    servicer = CacheServicer(node)
    servicer._log = log
    servicer._follow = lambda: log
    view = CacheView()
    async with serving(cache_pb2_grpc.add_CacheServicer_to_server, servicer) as channel:
        call = cache_pb2_grpc.CacheStub(channel).Watch(cache_pb2.WatchRequest(), timeout=30)
        while view.sequence != log.sequence:
            view.apply(await call.read(), 0.0)
        assert len(view) == 700_000
        servicer.close()


@asynccontextmanager
async def stock_tokenizer():
    async with tokenizer() as address, stock(address) as channel:
        yield channel, tokenizer_pb2_grpc.TokenizerStub(channel)


async def encode():
    async with stock_tokenizer() as (_, stub):
        request = tokenizer_pb2.EncodeRequest(inputs=[tokenizer_pb2.EncodeInput(text="q~" * 150_000)])
        size = (await stub.Encode(request, timeout=60)).ByteSize()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service, "MAX_ANSWER_BYTES", size // 2)  # megabytes would take seconds
            error = await refusal(stub.Encode(request, timeout=60))
            assert error.field == "inputs" and "max_answer_bytes" in error.message
            request.max_answer_bytes = size + 16
            assert (await stub.Encode(request, timeout=60)).results


async def decode_text():
    async with stock_tokenizer() as (_, stub):
        sequences = [tokenizer_pb2.TokenSequence(token_ids=[1000] * 500_000)] * 3
        error = await refusal(stub.Decode(tokenizer_pb2.DecodeRequest(sequences=sequences), timeout=60))
        assert error.field == "sequences" and "Detokenize" in error.message


async def detokenize():
    async with stock_tokenizer() as (_, stub):
        call = stub.Detokenize(timeout=60)
        item = tokenizer_pb2.DetokenizeItem
        items = [item(id=id, token_ids=[1000] * 300_000, finish=True) for id in range(4)]
        huge = item(id=9, token_ids=[1000] * 2_000_000)
        await call.write(tokenizer_pb2.DetokenizeRequest(items=items))
        await call.write(tokenizer_pb2.DetokenizeRequest(items=[huge]))
        await call.done_writing()
        answers = [answer async for answer in call]
        *outputs, failed = [output for answer in answers for output in answer.outputs]
        assert len(answers) > 2 and [output.id for output in outputs] == [0, 1, 2, 3]
        assert len({output.text for output in outputs}) == 1 and len(outputs[0].text) > 600_000
        assert from_status(failed.error).reason == "ANSWER_TOO_LARGE" and failed.finished


async def vocabulary():
    async with stock_tokenizer() as (_, stub):
        parts = [p async for p in stub.Vocabulary(tokenizer_pb2.VocabularyRequest(), timeout=30)]
        assert max(len(part.tokens) for part in parts) <= 4096


def record(recorder, gateway, requests):
    for request in range(1, requests + 1):
        recorder.add(EventKind.RECEIVED, gateway, request)
        for _ in range(30_000 // requests):
            recorder.add(EventKind.RETRIED, gateway, request, text="x" * 200)


async def recent():
    async with stock_gateway() as (rig, channel):
        record(rig.node.recorder, 7, 3)
        names = [trace_pb2.RequestName(gateway=7, request=request) for request in (1, 2, 3)]
        stub = node_pb2_grpc.NodeStub(channel)
        error = await refusal(stub.Recent(trace_pb2.RecentRequest(requests=names), timeout=30))
        assert error.field == "requests"
        one = await stub.Recent(trace_pb2.RecentRequest(requests=names[:1]), timeout=30)
        assert len(one.events) == 10_001


async def traces():
    async with stock_gateway() as (rig, channel):
        record(rig.node.recorder, rig.node.gateway.incarnation, 8)
        stub = trace_pb2_grpc.TracesStub(channel)
        found = await stub.GetTraces(trace_pb2.GetTracesRequest(gateway_only=True), timeout=30)
        ids = [trace.id for trace in found.traces] + list(found.left_out)
        assert len(found.traces) >= 2 and found.left_out and len(set(ids)) == 8
        again = trace_pb2.GetTracesRequest(gateway_only=True, ids=found.left_out[:2])
        assert len((await stub.GetTraces(again, timeout=30)).traces) == 2


CASES = {
    "Inference.Generate": generate,
    "Inference.Stream": stream,
    "Inference.Complete": complete,
    "Inference.Embed": embed,
    "Decode.Generate": decode,
    "Decode.Embed": embed_at_a_node,
    "Prefill.Run": prefill,
    "Prefill.Embed": embed_at_a_node,
    "Cache.Watch": watch_cache,
    "Tokenizer.Encode": encode,
    "Tokenizer.Decode": decode_text,
    "Tokenizer.Detokenize": detokenize,
    "Tokenizer.Vocabulary": vocabulary,
    "Node.Recent": recent,
    "Traces.GetTraces": traces,
}


STREAMS = ("Inference.Generate", "Decode.Generate", "Prefill.Run")
"""Those of `make test`."""


def test_every_method_is_here():
    pool, methods = descriptor_pool.Default(), set()
    for name in ("cache", "decode", "inference", "node", "prefill", "tokenizer", "trace"):
        for found in pool.FindFileByName(f"baton/v1/{name}.proto").services_by_name.values():
            methods |= {f"{found.name}.{method.name}" for method in found.methods}
    assert methods == {*CASES, *BOUNDED}
    assert MAX_ANSWER_BYTES + 2**17 < 4 * 2**20


@pytest.mark.parametrize(
    "method",
    [pytest.param(each, marks=() if each in STREAMS else pytest.mark.thorough) for each in CASES],
)
async def test_a_stock_client_reads_every_answer(method):
    await CASES[method]()
