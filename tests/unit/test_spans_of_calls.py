"""Spans that are begun end, and never pile up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.rpc.errors import BatonError
from baton.tokenizer import service as module
from baton.tokenizer.service import TokenizerService
from baton.tracing import spans as spans_module
from baton.tracing.recorder import EventKind, Recorder
from baton.tracing.spans import Spans
from baton.v1 import tokenizer_pb2

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_call_of_the_tokenizer_that_fails_ends_its_span(monkeypatch):
    exporter = InMemorySpanExporter()
    recorder = Recorder()
    recorder.spans = Spans("tokenizer", "", 1.0, exporter)
    service = TokenizerService(ThreadPoolExecutor(1), recorder)
    service.tokenizer = object()  # type: ignore[assignment]
    monkeypatch.setattr(module, "MAX_WORK", 0)
    request = tokenizer_pb2.EncodeRequest()
    each = request.inputs.add(text="a", traceparent=PARENT)
    each.request.gateway, each.request.request = 7, 1
    with pytest.raises(BatonError) as failed:
        await service.Encode(request, None)  # type: ignore[arg-type]
    assert not recorder.spans._open
    recorder.spans.close()
    failures = [
        span.attributes.get("error.type") for span in exporter.get_finished_spans() if span.attributes
    ]
    assert failures == [failed.value.reason]


def test_requests_have_no_spans_while_those_before_wait_for_theirs(monkeypatch):
    monkeypatch.setattr(spans_module, "MAX_OPEN", 4)
    spans = Spans("gateway", "", 1.0, InMemorySpanExporter())
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(spans, "_finish", lambda span, events: (begun.set(), go_on.wait(10)))
    recorder = Recorder()
    recorder.spans = spans

    def ask(number: int) -> bool:
        traced = recorder.begin_span(7, number, operation="chat", traceparent=PARENT)
        recorder.add(EventKind.RECEIVED, 7, number)
        recorder.add(EventKind.ENDED, 7, number, text="finished")
        return bool(traced)

    assert ask(0) and begun.wait(10)  # its spans are being made, and take long
    assert [ask(number) for number in range(1, 7)] == [True] * 4 + [False] * 2
    go_on.set()
    spans.close()


def test_an_encode_node_has_a_span_for_each_image_of_a_request():
    exporter = InMemorySpanExporter()
    recorder = Recorder(0)
    recorder.spans = Spans("encode", "", 1.0, exporter)
    for image in (1, 2):
        recorder.begin_span(7, 1, image, operation="encode", traceparent=PARENT)
        recorder.add(EventKind.RECEIVED, 7, 1, step=image)
    for kind in (EventKind.ENCODE_BEGUN, EventKind.ENCODE_ENDED, EventKind.ENDED):
        for image in (2, 1):
            recorder.add(kind, 7, 1, step=image, text="finished")
    recorder.spans.close()
    assert not recorder.spans._open
    found = sorted(span.name for span in exporter.get_finished_spans())
    assert found == sorted(2 * ["encode", "queue", "encode", "lease"])
