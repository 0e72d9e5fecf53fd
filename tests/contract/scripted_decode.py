"""A decode node that follows a script: for what the real one cannot be made to do, such as sending garbage,
answering never, or dying in mid-sentence. Speaks the real contract; computes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from baton.rpc.address import new_incarnation
from baton.rpc.channel import server_options
from baton.rpc.errors import BatonError, cancelled, to_status
from baton.rpc.outbox import Outbox
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc
from ports import free_port

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH


@dataclass
class Running:
    """A request that the script answers."""

    start: decode_pb2.DecodeStart
    send: Callable[[decode_pb2.StepEvents], Awaitable[None]]

    async def tokens(self, ids: Sequence[int], *, choice: int = 0, finish: int = 0, logprobs=()) -> None:
        delta = decode_pb2.TokenDelta(
            request=self.start.request,
            attempt=self.start.attempt,
            choice=choice,
            token_ids=ids,
            finish_reason=finish,
            logprobs=logprobs,
        )
        await self.send(decode_pb2.StepEvents(step=1, tokens=[delta]))

    async def admitted(self) -> None:
        """Only if the start asks for it."""
        if self.start.announce_admission:
            await self.event(admitted=decode_pb2.DecodeAdmitted())

    async def prompt(self, cached: int = 0, logprobs=()) -> None:
        done = decode_pb2.PromptDone(cached_tokens=cached, prompt_logprobs=logprobs)
        await self.event(prompt=done)

    async def finished(self, **stats) -> None:
        stats = decode_pb2.RequestStats(prompt_tokens=len(self.start.token_ids), **stats)
        await self.event(finished=decode_pb2.DecodeFinished(stats=stats))

    async def failed(self, error: BatonError) -> None:
        await self.event(failed=to_status(error))

    async def event(self, **kind) -> None:
        event = decode_pb2.DecodeEvent(request=self.start.request, attempt=self.start.attempt, **kind)
        await self.send(decode_pb2.StepEvents(events=[event]))


Script = Callable[[Running], Awaitable[None]]


class ScriptedDecode(decode_pb2_grpc.DecodeServicer, node_pb2_grpc.NodeServicer):
    """script: what happens to each request; it ends early when the request is cancelled."""

    def __init__(
        self, script: Script, *, fingerprint: str = "f", name: str = "scripted", context: int = 256, **model
    ) -> None:
        self.script = script
        self.starts: list[decode_pb2.DecodeStart] = []
        self.cancels: list[int] = []
        self.cancelling_messages = 0
        """Messages that cancelled something."""
        self.pauses: list[tuple[int, bool]] = []
        self.paused_attempts: list[int] = []
        self.address = ""
        self.mute = False
        """Heartbeats are left unanswered, as by a step thread that hangs."""
        self.running: dict[int, asyncio.Task[None]] = {}
        self.log: decode_pb2.DecodeLog | None = None
        """Of a request whose gateway is gone."""
        self.taken: list[tuple[int, int]] = []
        self._incarnation = new_incarnation()
        self._model = node_pb2.ModelInfo(
            name=name,
            context_length=context,
            **{
                "vocab_size": 4096,
                "fingerprint": fingerprint,
                "eos_token_ids": [0],
                "grammars": True,
                "embedding_size": 1024,
                **model,
            },
        )

    async def __aenter__(self) -> ScriptedDecode:
        await self.serve(free_port())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def serve(self, port: int) -> None:
        self._server = grpc.aio.server(options=server_options())
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self._server)
        node_pb2_grpc.add_NodeServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def die(self) -> None:
        for task in list(self.running.values()):
            task.cancel()
        await self._server.stop(None)

    async def GetInfo(self, request, context) -> node_pb2.NodeInfo:
        return node_pb2.NodeInfo(
            role="decode", incarnation=self._incarnation, address=self.address, model=self._model
        )

    async def TakeLog(self, request, context) -> decode_pb2.DecodeLog:
        self.taken.append((request.gateway, request.request))
        if self.log is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no log")
        return self.log

    async def Generate(self, requests, context) -> None:
        # A write that is cancelled would break the stream, so that scripts only fill this box.
        box: Outbox[decode_pb2.StepEvents] = Outbox(None)
        writing = asyncio.create_task(self._write(box, context))
        try:
            await self._read(requests, box)
        finally:
            writing.cancel()

    async def _write(self, box, context) -> None:
        async for message in box:
            await context.write(message)

    async def _read(self, requests, box) -> None:
        async def send(message: decode_pb2.StepEvents) -> None:
            box.put(message)

        async for message in requests:
            commands = message.several.commands or (message,)
            self.cancelling_messages += any(command.HasField("cancel") for command in commands)
            for command in commands:
                await self._obey(command, send)

    async def _obey(self, command, send) -> None:
        kind = command.WhichOneof("kind")
        if kind == "hello":
            welcome = decode_pb2.DecodeWelcome(incarnation=self._incarnation)
            await send(decode_pb2.StepEvents(events=[decode_pb2.DecodeEvent(welcome=welcome)]))
        elif kind == "start":
            self.starts.append(command.start)
            running = Running(command.start, send)
            task = asyncio.create_task(self._run(running))
            self.running[command.start.request] = task
        elif kind == "heartbeat":
            if not self.mute:
                await send(decode_pb2.StepEvents())
        elif kind == "pause":
            self.pauses.append((command.pause.request, command.pause.paused))
            self.paused_attempts.append(command.pause.attempt)
        else:
            await self._cancel(command.cancel, send)

    async def _cancel(self, cancel, send) -> None:
        self.cancels.append(cancel.request)
        task = self.running.pop(cancel.request, None)
        if task is not None:
            task.cancel()
            event = decode_pb2.DecodeEvent(
                request=cancel.request, attempt=cancel.attempt, failed=to_status(cancelled("cancelled"))
            )
            await send(decode_pb2.StepEvents(events=[event]))

    async def _run(self, running: Running) -> None:
        try:
            await self.script(running)
        finally:
            self.running.pop(running.start.request, None)


def saying(*pieces: Sequence[int], finish: int = LENGTH, pause: float = 0.0, cached: int = 0) -> Script:
    """Answers every choice with these tokens, one message a piece."""

    async def script(running: Running) -> None:
        await running.prompt(cached=cached)
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            for choice in range(running.start.n or 1):
                await running.tokens(piece, choice=choice, finish=finish if last else 0)
            await asyncio.sleep(pause)
        await running.finished(cached_tokens=cached)

    return script


async def silent(running: Running) -> None:
    """Never answers."""
    await asyncio.Event().wait()


async def endless(running: Running) -> None:
    """A token every 0.2 s, until cancelled: longer than any test waits for it."""
    await running.prompt()
    for token in range(100_000):
        await running.tokens([40 + token % 50])
        await asyncio.sleep(0.2)
