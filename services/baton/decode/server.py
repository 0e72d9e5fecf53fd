"""The decode process: the shell around decode.core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import grpc.aio

from baton.config import DecodeConfig
from baton.decode.core import DecodeCore, make_core
from baton.decode.peers import PrefillPeers
from baton.decode.stream import DecodeStream, add_output
from baton.decode.types import Key, Output
from baton.handoff.messages import DecodeEffect
from baton.rpc.authentication import ClusterAuthentication
from baton.rpc.errors import BatonError, invalid, unavailable
from baton.rpc.node import run_node
from baton.rpc.validate import check_token_ids
from baton.v1 import decode_pb2, decode_pb2_grpc, node_pb2
from baton.worker.caller_stream import CallerStreams
from baton.worker.convert import check_start, delivered_from, request_from, sampling_from
from baton.worker.node import WorkerNode

HAND_BACK_SECONDS = 2.0
"""How long a stopping node waits until its callers have got the terminal events of requests handed back."""
CONNECT_SECONDS = 10.0
"""How long a starting node waits for the prefill nodes of its own configuration."""

_DRAINING = decode_pb2.DecodeEvent(draining=decode_pb2.DecodeDraining())


class DecodeNode(WorkerNode[DecodeCore], decode_pb2_grpc.DecodeServicer):
    """One engine that decodes, the callers connected to it and the prefill nodes it is connected to."""

    role = "decode"

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self._config = config
        self.streams: CallerStreams[DecodeStream] = CallerStreams(self, self.tasks)
        self.messages = 0
        """Sent to callers by steps."""
        self._peers = PrefillPeers(self, config)

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)
        return [decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name, self.serve_cache(server)]

    def make_core(self) -> DecodeCore:
        return make_core(self._config, self.limits(), self.engine.cache, self._flush, self.observe)

    async def start(self, address: str) -> None:
        await super().start(address)
        for peer in self._config.prefill:
            self._peers.connect(peer)
        await self._peers.wait_connected(CONNECT_SECONDS)

    def info(self) -> node_pb2.NodeInfo:
        info = super().info()
        info.peers.extend(self._peers.describe())
        return info

    async def drain(self, seconds: float) -> int:
        """Callers get `draining`, so that they send no more requests."""
        for stream in self.streams.open:
            stream.send(decode_pb2.StepEvents(events=[_DRAINING]))
        return await super().drain(seconds)

    async def stop(self) -> None:
        await self._hand_back()
        self.streams.close(unavailable("the node is stopping", "STOPPING"))
        await asyncio.sleep(0)
        await self._peers.close()
        await super().stop()

    async def _hand_back(self) -> None:
        """Hands running requests back to their callers, each with its terminal event."""
        if self.core_or_none is None or not self.streams.open:
            return
        self.steps.call(lambda core, now: core.hand_back(now))
        deadline = time.monotonic() + HAND_BACK_SECONDS
        # The step thread does not signal. Its messages must also have left the outboxes.
        while time.monotonic() < deadline and (  # noqa: ASYNC110
            self.core_or_none.requests or self.streams.unsent
        ):
            await asyncio.sleep(0.01)

    def _flush(self, step: int, outputs: list[tuple[Hashable, Output]], effects: list[DecodeEffect]) -> None:
        self.loop.call_soon_threadsafe(self._deliver, step, outputs, effects)

    def _deliver(
        self, step: int, outputs: list[tuple[Hashable, Output]], effects: list[DecodeEffect]
    ) -> None:
        messages: dict[Hashable, decode_pb2.StepEvents] = {}
        for caller, output in outputs:
            message = messages.get(caller)
            if message is None:
                message = messages[caller] = decode_pb2.StepEvents(step=step)
            add_output(message, output, self.page_bytes)
        for caller, message in messages.items():
            assert isinstance(caller, DecodeStream)
            self.messages += 1
            if not caller.send(message):
                self.drop(caller)
        self._peers.perform(effects)

    # --- the service ------------------------------------------------------------------------------------

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[decode_pb2.StepEvents]:
        async with aclosing(self.streams.serve(request_iterator, context, "Decode.Generate")) as messages:
            async for message in messages:
                yield message

    def open(self, hello: decode_pb2.DecodeHello) -> DecodeStream:
        self.require_turning()
        return DecodeStream(hello.incarnation, self._config.message_seconds)

    def welcome(self) -> list[decode_pb2.StepEvents]:
        welcome = decode_pb2.DecodeEvent(welcome=decode_pb2.DecodeWelcome(incarnation=self.incarnation))
        events = [welcome, _DRAINING] if self.draining else [welcome]
        return [decode_pb2.StepEvents(events=[event]) for event in events]

    def several(self, message: decode_pb2.GenerateCommand) -> Sequence[decode_pb2.GenerateCommand]:
        return message.several.commands

    def half_closed(self, stream: DecodeStream) -> None:
        stream.half_closed()

    def drop(self, stream: DecodeStream) -> None:
        self.steps.call(lambda core, now: core.caller_gone(stream, now))

    def obey(self, command: decode_pb2.GenerateCommand, caller: DecodeStream) -> None:
        kind = command.WhichOneof("kind")
        if kind == "start":
            self._start(command.start, caller)
        elif kind == "cancel":
            self._cancel(command.cancel, caller)
        elif kind == "heartbeat":
            self._heartbeat(caller)
        elif kind == "pause":
            self._pause(command.pause, caller)
        else:
            kinds = "start, cancel, heartbeat, pause, or several of these"
            raise invalid("kind", f"each message on Decode.Generate after `hello` sets {kinds}")

    def _cancel(self, cancel: decode_pb2.DecodeCancel, caller: DecodeStream) -> None:
        key = Key(caller, cancel.request)
        if caller.runs(cancel.request, cancel.attempt):
            self.steps.call(lambda core, now: core.cancel(key, now))

    def _heartbeat(self, caller: DecodeStream) -> None:
        """Answers at once while the step thread is within the time that its step may take; else leaves the
        answer to the step thread."""
        if self.stuck(floor=0.0):
            self.steps.call(lambda core, now: self._answer(caller))
        else:
            caller.send(decode_pb2.StepEvents())

    def _answer(self, caller: DecodeStream) -> None:
        self.loop.call_soon_threadsafe(caller.send, decode_pb2.StepEvents())

    def _pause(self, pause: decode_pb2.DecodePause, caller: DecodeStream) -> None:
        key = Key(caller, pause.request)
        if caller.runs(pause.request, pause.attempt):
            self.steps.call(lambda core, now: core.pause(key, pause.paused))

    def _start(self, start: decode_pb2.DecodeStart, caller: DecodeStream) -> None:
        if caller.attempt_of(start.request) is not None:
            text = f"request {start.request} is running on this stream"
            raise invalid("start.request", text, "DUPLICATE_REQUEST")
        n = start.n if start.HasField("n") else 1
        info = self.model_info
        caller.begin(start.request, start.attempt)
        try:
            self._peers.check_room(start.prefill)
            if self.draining:
                raise unavailable("this node is draining; use another decode node", "DRAINING")
            check_start(
                start.token_ids, start.delivered, start.sampling, n, info.vocab_size, info.context_length
            )
            for index, choice in enumerate(start.choices):
                check_token_ids(choice.token_ids, info.vocab_size, f"choices[{index}].token_ids")
            delivered = delivered_from(start, n, info.context_length)
        except BatonError as error:
            caller.refuse(start.request, start.attempt, error)
            return
        room = max(1, info.context_length - len(start.token_ids) + start.delivered)
        params = sampling_from(start.sampling, info.eos_token_ids, room)
        key = Key(caller, start.request)
        request = request_from(start, key, n, delivered, params, self._config.request_seconds)
        candidates = tuple(dict.fromkeys(start.prefill)) or self._config.prefill
        for address in candidates:
            self._peers.connect(address)
        attempt, gateway = start.attempt, caller.incarnation
        local = start.local_prefill_tokens if start.HasField("local_prefill_tokens") else None
        self.steps.call(lambda core, now: core.start(key, gateway, attempt, request, candidates, now, local))

    def problems(self, load: node_pb2.Load) -> Iterator[node_pb2.Problem]:
        yield from super().problems(load)
        overdue = self.core_or_none.handoffs.overdue if self.core_or_none is not None else []
        if overdue:
            text = f"a copy of pages from {', '.join(overdue)} has been running for more than "
            text += f"{self._config.pull_seconds:g} s"
            alone = not self._peers.usable - set(overdue)
            yield node_pb2.Problem(reason="PULL_STUCK", message=text, stops_serving=alone)
        lost = self._peers.lost()
        if lost:
            text = f"prompts are not handed off to {'; '.join(lost)}"
            yield node_pb2.Problem(reason="PREFILL_LOST", message=text)

    def load(self) -> node_pb2.Load:
        load = super().load()
        core = self.core_or_none
        if core is not None:
            load.requests = core.requests
            load.handing_off = core.handoffs.active
            load.pulls = core.handoffs.pulls
            load.pulled_pages = core.handoffs.counters.pulled_pages
            load.pulled_bytes = core.handoffs.counters.pulled_pages * self.page_bytes
            # Copied in one call, because the step thread may add reasons meanwhile.
            load.handoff_retry_reasons.update(dict(core.handoffs.counters.retries))
            load.handoff_retries = sum(load.handoff_retry_reasons.values())
            load.messages = self.messages
            load.MergeFrom(node_pb2.Load(**asdict(core.counters)))
            load.local_prefills = core.scheduler.local_prompts
            load.paused = core.paused
            load.first_token_ms = int(1000 * core.overload.first_token.value)
            load.wait_ms = int(1000 * core.overload.wait)
            pull = self._peers.pull_meter.cost
            if pull is not None:
                load.pull_cost.CopyFrom(node_pb2.PullCost(fixed=pull.fixed, token=pull.token))
        return load


async def serve(
    config: DecodeConfig, *, ready: asyncio.Event | None = None, stop: asyncio.Event | None = None
) -> int:
    """Runs the process until it is stopped. Returns its exit code."""
    node = DecodeNode(config)
    return await run_node(
        node, config, authentication=ClusterAuthentication(node.cluster), ready=ready, stop=stop
    )
