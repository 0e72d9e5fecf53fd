"""A decode node that computes nothing: each step gives every running request the same token.

    python -m gateway_load.source --step-seconds 0.005 --message-seconds 0.005 --vocabulary 4096 --token 67

It implements baton.v1.Decode and sends messages as a real node does (`decode.stream`: one message a step,
unsent ones merge), but schedules nothing.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from baton.rpc.address import new_incarnation
from baton.rpc.channel import server_options
from baton.rpc.errors import cancelled, to_status
from baton.rpc.node import run_process
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc
from baton.worker.decode.stream import DecodeStream

MOST_LATE = 0.1
"""Seconds of delayed steps that are caught up at most."""


class Source(decode_pb2_grpc.DecodeServicer, node_pb2_grpc.NodeServicer):
    def __init__(self, step_seconds: float, message_seconds: float, vocabulary: int, token: int) -> None:
        self._step_seconds = step_seconds
        self._message_seconds = message_seconds
        self._token = token
        self._incarnation = new_incarnation()
        self._model = node_pb2.ModelInfo(
            name="source", context_length=2**20, vocab_size=vocabulary, fingerprint="source"
        )
        self._running: dict[DecodeStream, dict[int, int]] = {}  # request -> tokens left

    async def GetInfo(self, request: node_pb2.GetInfoRequest, context: Any) -> node_pb2.NodeInfo:
        return node_pb2.NodeInfo(role="decode", incarnation=self._incarnation, model=self._model)

    async def Generate(self, requests: Any, context: Any) -> AsyncIterator[decode_pb2.StepEvents]:
        caller = DecodeStream((await anext(aiter(requests))).hello.incarnation, self._message_seconds)
        self._running[caller] = {}
        reading = asyncio.create_task(self._read(requests, caller))
        try:
            welcome = decode_pb2.DecodeWelcome(incarnation=self._incarnation)
            yield decode_pb2.StepEvents(events=[decode_pb2.DecodeEvent(welcome=welcome)])
            async for message in caller.messages():
                yield message
        finally:
            reading.cancel()
            del self._running[caller]

    async def _read(self, commands: Any, caller: DecodeStream) -> None:
        running = self._running[caller]
        async for message in commands:
            for command in message.several.commands or (message,):
                self._obey(command, caller, running)

    def _obey(
        self, command: decode_pb2.GenerateCommand, caller: DecodeStream, running: dict[int, int]
    ) -> None:
        kind = command.WhichOneof("kind")
        if kind == "start":
            caller.begin(command.start.request, command.start.attempt)
            running[command.start.request] = command.start.sampling.max_tokens
            event = decode_pb2.DecodeEvent(request=command.start.request, prompt=decode_pb2.PromptDone())
            caller.send(decode_pb2.StepEvents(events=[event]))
        elif kind == "heartbeat":
            caller.send(decode_pb2.StepEvents())
        elif kind == "cancel" and running.pop(command.cancel.request, None) is not None:
            event = decode_pb2.DecodeEvent(request=command.cancel.request)
            event.failed.CopyFrom(to_status(cancelled("cancelled")))
            caller.send(decode_pb2.StepEvents(events=[event]))

    async def step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            for caller, running in self._running.items():
                if running:
                    caller.send(self._step(running))
            due = max(due + self._step_seconds, loop.time() - MOST_LATE)
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _step(self, running: dict[int, int]) -> decode_pb2.StepEvents:
        """A token for each request; a request with its last token ends."""
        message = decode_pb2.StepEvents(step=1)
        for request, left in list(running.items()):
            delta = message.tokens.add(request=request, token_ids=(self._token,))
            running[request] = left - 1
            if left == 1:
                del running[request]
                delta.finish_reason = common_pb2.FINISH_REASON_LENGTH
                message.events.add(request=request).finished.SetInParent()
        return message


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--message-seconds", type=float, required=True)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--token", type=int, required=True)
    args = parser.parse_args()
    source = Source(args.step_seconds, args.message_seconds, args.vocabulary, args.token)
    server = grpc.aio.server(options=server_options())
    decode_pb2_grpc.add_DecodeServicer_to_server(source, server)
    node_pb2_grpc.add_NodeServicer_to_server(source, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready 127.0.0.1:{port}", flush=True)
    await source.step_forever()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_process(main()))
