"""The gateway's side of one decode node: one stream, many requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc.aio

from baton.rpc.channel import Dial, open_channel
from baton.rpc.errors import BatonError, failed_precondition, from_rpc_error, from_status, unavailable
from baton.rpc.link import Link
from baton.rpc.logs import get_logger
from baton.v1 import decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc

_log = get_logger("baton.gateway")


class TokenSink(Protocol):
    """A request that runs on a decode node. on_finished and on_failed are terminal: one of them, once."""

    attempt: int

    def on_prompt(self, prompt: decode_pb2.PromptDone) -> None: ...
    def on_tokens(self, delta: decode_pb2.TokenDelta) -> None: ...
    def on_finished(self, stats: decode_pb2.RequestStats) -> None: ...
    def on_failed(self, error: BatonError) -> None:
        """The node has failed the request, or the node is lost."""


class DecodeNode:
    """One decode node. It takes requests once it is connected and has said what it serves.

    accept: judges the model that the node serves; raises BatonError when it must not be used.
    after_step: called when all events of one message have been handed out.
    """

    def __init__(
        self,
        address: str,
        incarnation: int,
        accept: Callable[[node_pb2.NodeInfo], None],
        after_step: Callable[[], None],
        dial: Dial = open_channel,
    ) -> None:
        self.address = address
        self.info: node_pb2.NodeInfo | None = None
        self.incarnation = 0
        self._accept = accept
        self._after_step = after_step
        self._dial = dial
        self._sinks: dict[int, TokenSink] = {}
        self._cancelled: dict[int, int] = {}  # request: attempt; the node still owes their terminal event
        self._asking: asyncio.Task[None] | None = None
        hello = decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=incarnation))
        self._link = Link[decode_pb2.GenerateCommand, decode_pb2.StepEvents](
            address,
            lambda channel: decode_pb2_grpc.DecodeStub(channel).Generate,
            hello=lambda: hello,
            on_message=self._on_message,
            on_up=self._on_up,
            on_down=self._on_down,
            dial=dial,
        )

    @property
    def usable(self) -> bool:
        return self._link.connected and self.info is not None

    @property
    def requests(self) -> int:
        """Requests that run there for this gateway."""
        return len(self._sinks)

    @property
    def trouble(self) -> str:
        """Why the node cannot be used; for people."""
        error = self._link.last_error
        return error.message if error is not None else "not connected yet"

    def start(self) -> None:
        self._link.start()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await self._link.close()

    def send(self, start: decode_pb2.DecodeStart, sink: TokenSink) -> bool:
        """Gives the node a request. False: the node is down, and nothing was sent."""
        if not self.usable or not self._link.send(decode_pb2.GenerateCommand(start=start)):
            return False
        self._sinks[start.request] = sink
        return True

    def cancel(self, request: int) -> None:
        """The gateway is done with the request; nothing about it is handed out any more."""
        sink = self._sinks.pop(request, None)
        if sink is not None:
            self._cancelled[request] = sink.attempt
            self._send_cancel(request, sink.attempt)

    def _send_cancel(self, request: int, attempt: int) -> None:
        cancel = decode_pb2.DecodeCancel(request=request, attempt=attempt)
        self._link.send(decode_pb2.GenerateCommand(cancel=cancel))

    def _on_message(self, message: decode_pb2.StepEvents) -> None:
        for event in message.events:
            if event.WhichOneof("kind") == "prompt" and (sink := self._sinks.get(event.request)):
                sink.on_prompt(event.prompt)
        for delta in message.tokens:
            sink = self._sinks.get(delta.request)
            if sink is not None:
                sink.on_tokens(delta)
            elif delta.request not in self._cancelled:
                self._refuse(delta.request)
        for event in message.events:
            if event.WhichOneof("kind") != "prompt":
                self._on_event(event)
        self._after_step()

    def _on_event(self, event: decode_pb2.DecodeEvent) -> None:
        kind = event.WhichOneof("kind")
        if kind not in ("finished", "failed"):
            _log.warning("unexpected event", decode=self.address, kind=kind or "none")
            return
        if self._cancelled.pop(event.request, None) is not None:
            return
        sink = self._sinks.get(event.request)
        if sink is None or sink.attempt != event.attempt:
            # An answer to a cancel that came too late; or a node in error, which has been told by then.
            _log.debug("event of an unknown attempt", decode=self.address, request=event.request)
            return
        del self._sinks[event.request]
        if kind == "finished":
            sink.on_finished(event.finished.stats)
        else:
            sink.on_failed(from_status(event.failed))

    def _refuse(self, request: int) -> None:
        """Tokens of a request that nobody here knows: told to stop, so that it frees what it holds."""
        _log.warning("tokens of an unknown request", decode=self.address, request=request)
        self._cancelled[request] = 0
        self._send_cancel(request, 0)

    def _on_up(self, first: decode_pb2.StepEvents) -> None:
        welcome = first.events[0].welcome if first.events else decode_pb2.DecodeWelcome()
        if not welcome.incarnation:
            raise failed_precondition(f"{self.address} is no decode node: it did not say welcome")
        self.incarnation = welcome.incarnation
        self._asking = asyncio.get_running_loop().create_task(self._ask(welcome.incarnation))

    async def _ask(self, incarnation: int) -> None:
        try:
            async with self._dial(self.address) as channel:
                stub = node_pb2_grpc.NodeStub(channel)
                info = await stub.GetInfo(node_pb2.GetInfoRequest(), timeout=10.0)
            if info.incarnation != incarnation:
                raise unavailable(f"{self.address} has just been restarted")
            self._accept(info)
            self.info = info
        except grpc.aio.AioRpcError as error:
            self._link.reset(from_rpc_error(error))
        except BatonError as error:
            _log.error("decode node refused", decode=self.address, error=error.message)
            self._link.reset(error)

    def _on_down(self, error: BatonError) -> None:
        self.info = None
        self.incarnation = 0
        if self._asking is not None:
            self._asking.cancel()
        lost, self._sinks = self._sinks, {}
        self._cancelled.clear()
        for sink in lost.values():
            sink.on_failed(
                unavailable(f"decode node {self.address} was lost: {error.message}", "DECODE_LOST", 1000)
            )
        self._after_step()
