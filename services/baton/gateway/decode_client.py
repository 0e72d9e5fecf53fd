"""The gateway's side of one decode node: one stream, many requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.gateway.resume import ResumeAttempts
from baton.gateway.runtime import Cancellable, GatewayRuntime
from baton.rpc.errors import BatonError, failed_precondition, from_status, unavailable
from baton.v1 import decode_pb2, node_pb2


class Liveness:
    """One heartbeat is out at a time. A node that does not answer it for `limit` seconds is silent.

    `tick` is to be called about every `interval` seconds.
    """

    def __init__(self, limit: float) -> None:
        self.interval = limit / 4
        self._limit = limit
        self._asked: float | None = None
        self._ticked: float | None = None

    def reset(self) -> None:
        """A new connection: no heartbeat is out."""
        self._asked = self._ticked = None

    def received(self) -> None:
        """The node has sent something."""
        self._asked = None

    def silent(self, now: float) -> bool:
        return self._asked is not None and now - self._asked > self._limit

    def tick(self, now: float, active: bool) -> bool:
        """Whether to send a heartbeat now. wanted: whether requests wait for the node.

        If the caller itself has paused, unread answers may be pending, so it sends a new heartbeat first.
        """
        paused = self._ticked is not None and now - self._ticked > self._limit / 2
        self._ticked = now
        if paused and self._asked is not None:
            self._asked = now
            return True
        if self._asked is not None or not active:
            return False
        self._asked = now
        return True


_OF_PROMPT = ("prompt_logprobs", "prompt")
"""Kinds of events that come before tokens."""


class TokenSink(Protocol):
    """A request that runs on a decode node. Exactly one of on_finished and on_failed ends its attempt, once.

    The sink decides whether an attempt is the current one.
    """

    @property
    def attempts(self) -> ResumeAttempts | None:
        """None: it is not resumed."""

    @property
    def attempt(self) -> int: ...

    def on_admitted(self) -> None:
        """Only where the attempt's `start` asks for it."""

    def on_prompt(self, prompt: decode_pb2.PromptDone) -> None: ...
    def on_tokens(self, address: str, delta: decode_pb2.TokenDelta) -> None: ...
    def on_finished(self, stats: decode_pb2.RequestStats) -> None: ...
    def on_failed(self, error: BatonError, lost: bool) -> None:
        """The node has failed the request, or (lost) the node is lost or silent."""


class DecodeClient:
    """One decode node. It takes requests once it is connected and its model is known.

    silence: seconds without an answer to a heartbeat after which its requests go to other nodes. accept:
    checks the node's model; raises BatonError if it must not be used. Pure: `runtime` has the clock, timers
    and connections.
    """

    role = "decode"

    def __init__(
        self,
        address: str,
        silence: float,
        accept: Callable[[node_pb2.NodeInfo], None],
        runtime: GatewayRuntime,
    ) -> None:
        self.address = address
        self.info: node_pb2.NodeInfo | None = None
        self.leaving = False
        """Gets no more requests: the node drains or has been removed."""
        self._accept = accept
        self._runtime = runtime
        self._sinks: dict[int, TokenSink] = {}
        self._cancelled: set[int] = set()  # requests whose terminal event the node has not sent yet
        self._prompts: dict[int, decode_pb2.PromptDone] = {}
        """Requests whose prompt's log-probabilities have come in part."""
        self._liveness = Liveness(silence)
        self._ticking: Cancellable | None = None
        self._asking: Cancellable | None = None
        hello = decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=runtime.incarnation))
        self._link = runtime.make_link(address, lambda: hello, self._on_message, self._on_up, self._on_down)

    @property
    def usable(self) -> bool:
        return self.connected and not self.leaving and not self._silent

    @property
    def connected(self) -> bool:
        """Whether it is connected and its model is known."""
        return self._link.connected and self.info is not None

    @property
    def _silent(self) -> bool:
        return self._liveness.silent(self._runtime.clock())

    @property
    def requests(self) -> int:
        """Number of this gateway's requests there."""
        return len(self._sinks)

    @property
    def trouble(self) -> str:
        """Why the node cannot be used; for people."""
        if self.connected:
            return "silent" if self._silent else "draining"
        error = self._link.last_error
        return error.message if error is not None else "not connected yet"

    def start(self) -> None:
        self._link.start()

    async def close(self) -> None:
        """Disconnects; the node cancels what still runs there."""
        self._stop_ticking()
        if self._asking is not None:
            self._asking.cancel()
        await self._link.close()

    def takes(self, request: int) -> bool:
        """Whether the node could take this request now. Not while an earlier attempt may still run there."""
        return self.usable and request not in self._cancelled

    def send(self, start: decode_pb2.DecodeStart, sink: TokenSink) -> bool:
        """Sends the node a request. Returns False if the node is down and nothing was sent."""
        if not self.usable or not self._link.send(decode_pb2.GenerateCommand(start=start)):
            return False
        self._sinks[start.request] = sink
        return True

    def cancel(self, request: int) -> None:
        """Cancels the request; its sink gets nothing more."""
        sink = self._sinks.pop(request, None)
        if sink is not None:
            self._send_cancel(request, sink.attempt)

    def lose(self, error: BatonError) -> None:
        """Fails all requests there as lost, so that they continue elsewhere."""
        lost, self._sinks = self._sinks, {}
        for request, sink in lost.items():
            if self._link.connected:
                self._send_cancel(request, sink.attempt)
            sink.on_failed(error, lost=True)

    def pause(self, request: int, attempt: int, paused: bool) -> None:
        """Pauses or continues a request, as its client stops or resumes reading."""
        pause = decode_pb2.DecodePause(request=request, attempt=attempt, paused=paused)
        self._link.send(decode_pb2.GenerateCommand(pause=pause))

    def _send_cancel(self, request: int, attempt: int) -> None:
        self._cancelled.add(request)
        cancel = decode_pb2.DecodeCancel(request=request, attempt=attempt)
        self._link.send(decode_pb2.GenerateCommand(cancel=cancel))

    # Messages of the node.

    def _on_message(self, message: decode_pb2.StepEvents) -> None:
        self._liveness.received()
        for event in message.events:
            if event.WhichOneof("kind") in _OF_PROMPT:
                sink = self._sinks.get(event.request)
                if sink is not None and sink.attempt == event.attempt:
                    self._on_prompt(event, sink)
        for delta in message.tokens:
            sink = self._sinks.get(delta.request)
            if sink is not None:
                sink.on_tokens(self.address, delta)
            elif delta.request not in self._cancelled:
                # An unknown request: the node gets a cancel, so that it frees what it holds.
                self._runtime.log.warning(
                    "tokens of an unknown request", decode=self.address, request=delta.request
                )
                self._send_cancel(delta.request, delta.attempt)
        for event in message.events:
            if event.WhichOneof("kind") not in _OF_PROMPT:
                self._on_event(event)

    def _on_prompt(self, event: decode_pb2.DecodeEvent, sink: TokenSink) -> None:
        if event.HasField("prompt_logprobs"):
            positions = event.prompt_logprobs.positions
            self._prompts.setdefault(event.request, decode_pb2.PromptDone()).prompt_logprobs.extend(positions)
            return
        done = self._prompts.pop(event.request, None)
        if done is not None:
            done.MergeFrom(event.prompt)
        sink.on_prompt(done or event.prompt)

    def _on_event(self, event: decode_pb2.DecodeEvent) -> None:
        kind = event.WhichOneof("kind")
        if kind == "draining":
            self.leaving = True
            return
        sink = self._sinks.get(event.request)
        if sink is not None and sink.attempt != event.attempt:
            sink = None
        if kind == "admitted":
            if sink is not None:
                sink.on_admitted()
            return
        if kind == "turn":
            if sink is not None:
                if sink.attempts is not None:
                    sink.attempts.has_turn = True
                begin = decode_pb2.DecodeBegin(request=event.request, attempt=event.attempt)
                self._link.send(decode_pb2.GenerateCommand(begin=begin))
            return
        if kind not in ("finished", "failed"):
            self._runtime.log.warning("unexpected event", decode=self.address, kind=kind or "none")
            return
        self._prompts.pop(event.request, None)
        if event.request in self._cancelled:
            self._cancelled.remove(event.request)
            return
        if sink is None:
            # The answer to a late cancel; or an error of the node, which has got a cancel already.
            self._runtime.log.debug("event of an unknown attempt", decode=self.address, request=event.request)
            return
        del self._sinks[event.request]
        if kind == "finished":
            sink.on_finished(event.finished.stats)
        else:
            sink.on_failed(from_status(event.failed), lost=False)

    # The connection.

    def _on_up(self, first: decode_pb2.StepEvents) -> None:
        welcome = first.events[0].welcome if first.events else decode_pb2.DecodeWelcome()
        if not welcome.incarnation:
            raise failed_precondition(f"{self.address} is no decode node: it did not say welcome")
        self.leaving = False
        self._liveness.reset()
        self._tick()
        ask = self._ask(welcome.incarnation)
        self._asking = self._runtime.spawn(ask, f"model of {self.address}")

    async def _ask(self, incarnation: int) -> None:
        try:
            info = await self._runtime.node_info(self.address)
            if info.incarnation != incarnation:
                raise unavailable(f"{self.address} has just been restarted")
            self._accept(info)
            self.info = info
        except BatonError as error:
            self._runtime.log.error("decode node refused", decode=self.address, error=error.message)
            self._link.reset(error)

    def _tick(self) -> None:
        """Sends a heartbeat while requests run there. It checks the step thread; the connection has its
        own pings."""
        now = self._runtime.clock()
        if self._liveness.tick(now, active=bool(self._sinks)):
            heartbeat = decode_pb2.GenerateCommand(heartbeat=decode_pb2.DecodeHeartbeat())
            self._link.send(heartbeat)
        if self._silent and self._sinks:
            text = f"decode node {self.address} has gone silent"
            self._runtime.log.warning(text, requests=self.requests)
            self.lose(unavailable(text, "DECODE_SILENT", 1000))
        self._ticking = self._runtime.after(self._liveness.interval, self._tick)

    def _stop_ticking(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def _on_down(self, error: BatonError) -> None:
        self.info = None
        self._stop_ticking()
        self._liveness.reset()
        if self._asking is not None:
            self._asking.cancel()
        self._cancelled.clear()
        self._prompts.clear()
        ResumeAttempts.node_lost(
            [sink.attempts for sink in self._sinks.values() if sink.attempts is not None]
        )
        self.lose(unavailable(f"decode node {self.address} was lost: {error.message}", "DECODE_LOST", 1000))
