"""OpenTelemetry: each process makes spans of the requests that it has recorded, and exports them by OTLP.

Needs the extra `otel`. The trace context travels in fields `traceparent` (W3C Trace Context) of the messages
between processes; a request that is not sampled has none, and costs nothing. A thread makes the spans when a
request has ended.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from baton.rpc.logs import get_logger
from baton.tracing.recorder import Event, EventKind

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_log = get_logger()

MAX_OPEN = 4096
"""Sampled requests at a time, with those whose spans are still to be made; further ones have no spans."""
MAX_EVENTS = 1024
"""Most events of one request that become spans."""
PHASES: dict[str, dict[EventKind, str]] = {
    "gateway": {
        EventKind.RECEIVED: "admit",
        EventKind.TOKENIZING: "tokenize",
        EventKind.TOKENIZED: "route",
        EventKind.SENT: "generate",
        EventKind.RETRIED: "resume",
        EventKind.RESUMED: "resume",
    },
    "tokenizer": {EventKind.RECEIVED: "queue", EventKind.TOKENIZING: "tokenize"},
    "prefill": {
        EventKind.RECEIVED: "queue",
        EventKind.RETRACTED: "queue",
        EventKind.IMAGES_BEGUN: "pull images",
        EventKind.IMAGES_ENDED: "queue",
        EventKind.CHUNK_BEGUN: "prefill",
        EventKind.FIRST_TOKEN: "lease",
    },
    "decode": {
        EventKind.RECEIVED: "queue",
        EventKind.ADMITTED: "prefill",
        EventKind.FIRST_TOKEN: "pull",
        EventKind.RUNNING: "decode",
        EventKind.RETRACTED: "queue",
        EventKind.RETRIED: "queue",
        EventKind.IMAGES_BEGUN: "pull images",
        EventKind.IMAGES_ENDED: "queue",
    },
    "encode": {
        EventKind.RECEIVED: "queue",
        EventKind.ENCODE_BEGUN: "encode",
        EventKind.ENCODE_ENDED: "lease",
    },
}
"""Role -> what a request does after an event."""
_MARKS = (EventKind.FIRST_TOKEN, EventKind.RETRACTED, EventKind.RETRIED, EventKind.RESUMED)
"""Events of the process's span."""

SpanName = tuple[int, int, int, int]
"""Gateway, request, attempt, decode try; at an encode node the number of the image there, and 0."""


class SpanError(Exception):
    """Spans cannot be made: one line that says what to do."""


class Spans:
    """Spans of one process. Any thread may call `begin` and `take`."""

    def __init__(self, role: str, endpoint: str, sample: float, exporter: SpanExporter | None = None) -> None:
        """endpoint: URL of an OTLP receiver over gRPC, such as http://127.0.0.1:4317. sample: part of the
        requests without a trace context of their own that are sampled. Raises SpanError."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError as error:
            text = f"--otel-endpoint needs OpenTelemetry ({error.name} is missing)"
            raise SpanError(f"{text}: pip install 'baton-serve[otel]'") from None
        if not 0.0 <= sample <= 1.0:
            raise SpanError(f"--otel-sample must be between 0 and 1, not {sample:g}")
        resource = Resource.create({"service.name": f"baton-{role}", "service.namespace": "baton"})
        self._provider = TracerProvider(
            resource=resource, sampler=ParentBased(TraceIdRatioBased(sample)), shutdown_on_exit=False
        )
        insecure = not endpoint.startswith("https")
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint, insecure=insecure)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("baton")
        self._role = role
        self._phases = PHASES[role]
        self._open: dict[SpanName, tuple[Span, list[Event]]] = {}
        self._ended: queue.SimpleQueue[tuple[Span, list[Event]] | None] = queue.SimpleQueue()
        self._offset = 0.0
        """Offset of the time of day to the monotonic clock."""
        self._thread = threading.Thread(target=self._work, name="spans", daemon=True)
        self._thread.start()

    def begin(
        self, name: SpanName, operation: str, traceparent: str, attributes: dict[str, Any] | None = None
    ) -> str:
        """The process has got a request. Returns the trace context for the processes that it asks; empty: the
        request is not sampled."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if len(self._open) + self._ended.qsize() >= MAX_OPEN:
            return ""
        propagator = TraceContextTextMapPropagator()
        parent = propagator.extract({"traceparent": traceparent} if traceparent else {})
        kind = trace.SpanKind.SERVER
        span = self._tracer.start_span(operation, parent, kind=kind, attributes=attributes)
        if not span.is_recording():
            return ""
        self._open[name] = span, []
        carrier: dict[str, str] = {}
        propagator.inject(carrier, trace.set_span_in_context(span))
        return carrier.get("traceparent", "")

    def describe(self, name: SpanName, attributes: dict[str, Any]) -> None:
        """Adds what is known at the end. Before the event ENDED."""
        found = self._open.get(name)
        if found is not None:
            found[0].set_attributes(attributes)

    def take(self, event: Event) -> None:
        """Takes each event of the recorder as it happens."""
        # A gateway's and a tokenizer's span is of all attempts; a decode node's of all tries.
        name = _name(self._role, event)
        found = self._open.get(name)
        if found is None:
            return
        if len(found[1]) < MAX_EVENTS or event.kind is EventKind.ENDED:
            found[1].append(event)
        last = EventKind.TOKENIZED if self._role == "tokenizer" else EventKind.ENDED
        if event.kind is last or event.kind is EventKind.ENDED:
            self._open.pop(name, None)
            self._ended.put(found)

    def close(self) -> None:
        """Exports what has ended. Takes at most seconds."""
        self._ended.put(None)
        self._thread.join(2.0)
        self._provider.force_flush(2000)
        self._provider.shutdown()

    def _work(self) -> None:
        while (found := self._ended.get()) is not None:
            try:
                self._finish(*found)
            except Exception as error:  # else no further span would be exported
                _log.warning("a request's spans are lost", exc_info=error)

    def _finish(self, span: Span, events: list[Event]) -> None:
        from opentelemetry import trace

        self._offset = time.time() - time.monotonic()  # anew, because the time of day may be set
        context = trace.set_span_in_context(span)
        end = events[-1]
        for name, begun, until, attributes in self._children(events):
            child = self._tracer.start_span(name, context, start_time=self._ns(begun), attributes=attributes)
            child.end(self._ns(until))
        for event in events:
            if event.kind in _MARKS:
                reason = {"baton.reason": event.text} if event.text else {}
                span.add_event(event.kind.name.lower(), reason, self._ns(event.at))
        if end.kind is EventKind.ENDED and end.text not in ("finished", "cancelled", "released"):
            span.set_attribute("error.type", end.text)
            span.set_status(trace.StatusCode.ERROR, end.text)
        span.end(self._ns(end.at))

    def _children(self, events: list[Event]) -> list[tuple[str, float, float, dict[str, Any]]]:
        """Name, begin, end and attributes: phases one after the other, and each chunk and pull."""
        found: list[tuple[str, float, float, dict[str, Any]]] = []
        name, since = "", 0.0
        for event in events:
            phase = self._phases.get(event.kind)
            if phase is not None and phase != name:
                if name:
                    found.append((name, since, event.at, {}))
                name, since = phase, event.at
        if name:
            found.append((name, since, events[-1].at, {}))
        begun: dict[tuple[EventKind, int, int], Event] = {}
        for event in events:
            if event.kind in (EventKind.CHUNK_BEGUN, EventKind.PULL_BEGUN):
                begun[
                    event.kind, event.step if event.kind is EventKind.CHUNK_BEGUN else 0, event.decode_try
                ] = event
            elif event.kind is EventKind.CHUNK_ENDED:
                first = begun.pop((EventKind.CHUNK_BEGUN, event.step, event.decode_try), None)
                if first is not None:
                    more = {"baton.step": event.step, "baton.tokens": first.number}
                    if event.number:
                        more["baton.encode_us"] = event.number
                    found.append(("chunk", first.at, event.at, more))
            elif event.kind is EventKind.PULL_ENDED:
                first = begun.pop((EventKind.PULL_BEGUN, 0, event.decode_try), None)
                if first is not None:
                    how = {"baton.pages": event.number, "baton.bytes": event.size}
                    found.append(("pull pages", first.at, event.at, {**how, "baton.transport": event.text}))
        return found

    def _ns(self, monotonic: float) -> int:
        return int(1e9 * (monotonic + self._offset))


def _name(role: str, event: Event) -> SpanName:
    if role == "encode":  # a span for each image
        return event.gateway, event.request, event.step, 0
    attempt = event.attempt if role in ("prefill", "decode") else 0
    return event.gateway, event.request, attempt, event.decode_try if role == "prefill" else 0
