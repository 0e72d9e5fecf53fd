"""Timelines of this gateway's requests: asks the processes that had to do with them for their events."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from baton.rpc.channel import Dial
from baton.rpc.errors import from_rpc_error, invalid_field
from baton.rpc.message_size import MAX_ANSWER_BYTES
from baton.rpc.outbox import byte_size
from baton.rpc.trace_messages import event_to, events_from
from baton.tracing.recorder import Event, EventKind, Recorder
from baton.tracing.timeline import timeline
from baton.tracing.timeline_parts import Recorded, Timeline, TimelinePhase, TimelineProcess, parse_id
from baton.v1 import node_pb2_grpc, trace_pb2, trace_pb2_grpc

TRACES = trace_pb2.DESCRIPTOR.services_by_name["Traces"].full_name
MAX_TRACES = 256
DEFAULT_TRACES = 20
ASK_SECONDS = 2.0
"""A process that does not answer within this time is left out."""
MAX_PEERS = 64
"""Connections that are kept open for the next question."""
OFFSET_SECONDS = 10.0
"""A measured offset is used for this long: meanwhile clocks drift by less than a millisecond."""
PINGS = 3

TraceName = tuple[int, int]
"""Gateway incarnation and request number."""


@dataclass(slots=True)
class _Peer:
    """A connection to another process, and the offset of its clock to this one's."""

    channel: grpc.aio.Channel
    incarnation: int = 0
    offset: float = 0.0
    measured: float = float("-inf")
    questions: int = 0
    """Under way."""


class Traces:
    """Used on the event loop. Nothing is asked of other processes until somebody wants to see a request."""

    def __init__(self, incarnation: int, recorder: Recorder, dial: Dial) -> None:
        self._incarnation = incarnation
        self._recorder = recorder
        self._dial = dial
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    async def close(self) -> None:
        peers, self._peers = self._peers, OrderedDict()
        await asyncio.gather(*(peer.channel.close() for peer in peers.values()))

    def recent(self, limit: int = DEFAULT_TRACES, slowest: bool = False) -> list[TraceName]:
        """Running and recent requests whose begin is still recorded: the latest, or those that took longest,
        first."""
        found, now = self._recorder.requests(), self._recorder.clock()
        names = list(reversed(found))
        if slowest:
            took = {name: (now if end is None else end) - begin for name, (begin, end) in found.items()}
            names.sort(key=took.__getitem__, reverse=True)
        return names[:limit]

    async def timelines(
        self, names: Collection[TraceName], gateway_only: bool = False
    ) -> tuple[list[Timeline], list[str]]:
        """Timelines of those that this gateway remembers, in the order of `names`; and the processes that
        did not answer."""
        gateway_events: dict[TraceName, list[Event]] = {name: [] for name in names}
        for event in self._recorder.of(names):
            gateway_events[event.gateway, event.request].append(event)
        others: dict[TraceName, list[Recorded]] = {name: [] for name in names}
        missing: list[str] = []
        if not gateway_only:
            first = _asked(gateway_events, (EventKind.TOKENIZING, "tokenizer"), (EventKind.SENT, "decode"))
            for process, recorded in await self._ask_all(first, missing):
                _sort(others, process, *recorded)
            for further in ((EventKind.SENT, "prefill"), (EventKind.ENCODE_ASKED, "encode")):
                of_workers = {
                    name: [event for each in found for event in each.events] for name, found in others.items()
                }
                for process, recorded in await self._ask_all(_asked(of_workers, further), missing):
                    _sort(others, process, *recorded)
        now = self._recorder.clock()
        found: list[Timeline] = []
        for name in names:
            each = timeline(gateway_events[name], others[name], now)
            if each is not None:
                found.append(each)
            await asyncio.sleep(0)  # each may have thousands of events
        return found, sorted(missing)

    async def _ask_all(
        self, asked: dict[TimelineProcess, set[TraceName]], missing: list[str]
    ) -> list[tuple[TimelineProcess, tuple[list[Event], float]]]:
        """Events and clock offset of each process that answers; adds the others to `missing`."""

        async def ask(process: TimelineProcess, names: set[TraceName]) -> tuple[list[Event], float] | None:
            try:
                async with asyncio.timeout(ASK_SECONDS):
                    return await self._ask(process.address, names)
            except grpc.aio.AioRpcError as error:
                why = from_rpc_error(error).message
            except TimeoutError:
                why = f"no answer within {ASK_SECONDS:g} s"
            missing.append(f"{process.role} {process.address}: {why}")
            return None

        answers = await asyncio.gather(*(ask(process, names) for process, names in asked.items()))
        return [
            (process, answer) for process, answer in zip(asked, answers, strict=True) if answer is not None
        ]

    async def _ask(self, address: str, names: set[TraceName]) -> tuple[list[Event], float]:
        peer = self._peers.pop(address, None) or _Peer(self._dial(address))
        self._peers[address] = peer
        peer.questions += 1
        try:
            return await self._ask_peer(peer, names)
        finally:
            peer.questions -= 1
            await self._close_idle()

    async def _ask_peer(self, peer: _Peer, names: set[TraceName]) -> tuple[list[Event], float]:
        stub = node_pb2_grpc.NodeStub(peer.channel)
        asked = [trace_pb2.RequestName(gateway=gateway, request=number) for gateway, number in names]
        answer = await stub.Recent(trace_pb2.RecentRequest(requests=asked), timeout=ASK_SECONDS)
        now = time.monotonic()
        if peer.incarnation != answer.incarnation or now - peer.measured > OFFSET_SECONDS:
            peer.offset = await self._offset(stub)
            peer.incarnation, peer.measured = answer.incarnation, now
        return events_from(answer.events), peer.offset

    async def _offset(self, stub: Any) -> float:
        """What is to be added to the process's clock. Of several questions the one that took the least time
        counts: the error is at most half of it."""
        least, offset = float("inf"), 0.0
        for _ in range(PINGS):
            before = self._recorder.clock()
            answer = await stub.Recent(trace_pb2.RecentRequest(), timeout=ASK_SECONDS)
            after = self._recorder.clock()
            if after - before < least:
                least, offset = after - before, (before + after) / 2 - answer.clock_us / 1e6
        return offset

    async def _close_idle(self) -> None:
        """Down to MAX_PEERS; those first that have not been asked for the longest time."""
        while len(self._peers) > MAX_PEERS:
            idle = next((address for address, peer in self._peers.items() if not peer.questions), None)
            if idle is None:
                return
            await self._peers.pop(idle).channel.close()


def _asked(
    events: dict[TraceName, list[Event]], *kinds: tuple[EventKind, str]
) -> dict[TimelineProcess, set[TraceName]]:
    """Processes that events of these kinds name, by what they are, with the requests that they got."""
    found: dict[TimelineProcess, set[TraceName]] = {}
    for name, of_name in events.items():
        for event in of_name:
            for kind, role in kinds:
                if event.kind is kind and event.text:
                    found.setdefault(TimelineProcess(role, event.text), set()).add(name)
    return found


def _sort(
    others: dict[TraceName, list[Recorded]], process: TimelineProcess, events: Iterable[Event], offset: float
) -> None:
    by_name: dict[TraceName, list[Event]] = {}
    for event in events:
        by_name.setdefault((event.gateway, event.request), []).append(event)
    for name, of_name in by_name.items():
        if name in others:
            others[name].append(Recorded(process, of_name, offset))


class TracesServicer(trace_pb2_grpc.TracesServicer):
    def __init__(self, traces: Traces) -> None:
        self._traces = traces

    async def GetTraces(
        self, request: trace_pb2.GetTracesRequest, context: Any
    ) -> trace_pb2.GetTracesResponse:
        return _fitting(await answer(self._traces, request))


async def answer(traces: Traces, request: trace_pb2.GetTracesRequest) -> trace_pb2.GetTracesResponse:
    """Raises BatonError."""
    limit = request.limit if request.HasField("limit") else DEFAULT_TRACES
    for field, count in (("ids", len(request.ids)), ("limit", limit)):
        if count > MAX_TRACES:
            raise invalid_field(field, f": at most {MAX_TRACES} traces at a time, not {count}")
    if request.ids:
        names = [name for id in dict.fromkeys(request.ids) if (name := parse_id(id)) is not None]
    else:
        names = traces.recent(limit, request.slowest)
    found, missing = await traces.timelines(names, request.gateway_only)
    response = trace_pb2.GetTracesResponse(missing=missing)
    for each in found:
        response.traces.append(to_message(each))
        await asyncio.sleep(0)  # each may have thousands of events
    return response


def _fitting(response: trace_pb2.GetTracesResponse) -> trace_pb2.GetTracesResponse:
    """Leaves out the last traces of an answer that is too large, and names them."""
    size = byte_size(response)
    while size > MAX_ANSWER_BYTES:
        last = response.traces.pop()
        response.left_out.insert(0, last.id)
        size -= byte_size(last)
    return response


def to_message(found: Timeline) -> trace_pb2.Trace:
    age = time.monotonic() - found.received
    trace = trace_pb2.Trace(
        id=found.id,
        received_unix_ms=int(1000 * (time.time() - age)),
        total_us=_us(found.total),
        outcome=found.outcome,
        reason=found.reason,
        prompt_tokens=found.prompt_tokens,
        output_tokens=found.output_tokens,
        phases=_phases(found.phases),
        work=_phases(found.work),
    )
    if found.ttft is not None:
        trace.ttft_us = _us(found.ttft)
    for timed in found.events:
        trace.events.add(
            at_us=int(1e6 * timed.at),
            role=timed.process.role,
            address=timed.process.address,
            event=event_to(timed.event),
        )
    return trace


def _phases(phases: Sequence[TimelinePhase]) -> list[trace_pb2.TracePhase]:
    return [
        trace_pb2.TracePhase(
            name=phase.name,
            role=phase.process.role,
            address=phase.process.address,
            start_us=_us(phase.start),
            end_us=None if phase.end is None else _us(phase.end),
            detail=phase.detail,
        )
        for phase in phases
    ]


def _us(seconds: float) -> int:
    return max(0, round(1e6 * seconds))
