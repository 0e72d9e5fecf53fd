"""OpenTelemetry: a collector gets one connected trace for each request, with spans of all four processes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from deployment import Deployment
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

SERVICES = {"baton-gateway", "baton-tokenizer", "baton-prefill", "baton-decode"}
NAMES = {
    "baton-gateway": {"admit", "tokenize", "route", "generate"},
    "baton-tokenizer": {"queue", "tokenize"},
    "baton-prefill": {"queue", "prefill", "chunk"},
    "baton-decode": {"queue", "prefill", "pull", "decode", "pull pages"},
}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[tuple[str, object]] = []

    def Export(self, request, context):
        for of_process in request.resource_spans:
            attributes = {each.key: each.value.string_value for each in of_process.resource.attributes}
            for scope in of_process.scope_spans:
                self.spans += [(attributes["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace_id: str) -> list[tuple[str, object]]:
        return [(service, span) for service, span in list(self.spans) if span.trace_id.hex() == trace_id]

    def wait(self, trace_id: str, services: set[str]) -> list[tuple[str, object]]:
        """All spans of a trace, once there are some of all services, with their parents, and no more come."""
        deadline, before = time.monotonic() + 60, -1
        while True:
            found = self.of(trace_id)
            ids = {span.span_id for _, span in found}
            roots = [span for _, span in found if span.parent_span_id not in ids]
            if {service for service, _ in found} >= services and len(roots) == 1 and len(found) == before:
                return found
            assert time.monotonic() < deadline, [(service, span.name) for service, span in found]
            before = len(found)
            time.sleep(1.2)


@pytest.fixture(scope="module")
def collected(tmp_path_factory, deployments) -> Iterator[tuple[Deployment, Collector]]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    deployment = Deployment.split(
        tmp_path_factory.mktemp("spans"), "demo", gateway_flags=("--otel-sample", "0")
    )
    for process in deployment.processes:
        process.flags += ["--otel-endpoint", f"http://127.0.0.1:{port}"]
    with deployment:
        deployments.append(deployment)
        yield deployment, collector
    server.stop(0)


def ask(deployment: Deployment, traceparent: str | None) -> None:
    prompt = f"{uuid.uuid4()} " + "def main(): " * 20
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    headers = {"traceparent": traceparent} if traceparent else {}
    with httpx.Client(trust_env=False) as http:
        http.post(
            f"http://{deployment.gateway.http}/v1/completions", json=body, headers=headers, timeout=60
        ).raise_for_status()


def test_one_connected_trace_from_all_processes(collected):
    deployment, collector = collected
    trace_id, client = uuid.uuid4().hex, "00f067aa0ba902b7"
    ask(deployment, f"00-{trace_id}-{client}-01")
    found = collector.wait(trace_id, SERVICES)
    by_id = {span.span_id.hex(): (service, span) for service, span in found}
    for service, span in found:
        parent = span.parent_span_id.hex()
        assert parent == client or parent in by_id, (service, span.name)
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if parent in by_id:
            of_parent = by_id[parent][1]
            slack = 5_000_000  # ends of one request reach the processes at different times
            assert of_parent.start_time_unix_nano - slack <= span.start_time_unix_nano, span.name
    for service, names in NAMES.items():
        assert names <= {span.name for of, span in found if of == service}, service
    roots = [(service, span) for service, span in found if span.parent_span_id.hex() == client]
    ((service, root),) = roots
    assert (service, root.name) == ("baton-gateway", "text_completion demo")
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["gen_ai.operation.name"].string_value == "text_completion"
    assert attributes["gen_ai.request.model"].string_value == "demo"
    assert attributes["gen_ai.request.max_tokens"].int_value == 4
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4
    processes = {
        of: by_id[span.parent_span_id.hex()][0]
        for of, span in found
        if span.parent_span_id.hex() in by_id and by_id[span.parent_span_id.hex()][0] != of
    }
    assert processes == {
        "baton-tokenizer": "baton-gateway",
        "baton-decode": "baton-gateway",
        "baton-prefill": "baton-decode",
    }


def test_what_is_not_sampled_leaves_no_span(collected):
    deployment, collector = collected
    trace_id = uuid.uuid4().hex
    before = len(collector.spans)
    ask(deployment, f"00-{trace_id}-00f067aa0ba902b7-00")
    ask(deployment, None)
    ask(deployment, "nonsense")
    sampled = uuid.uuid4().hex
    ask(deployment, f"00-{sampled}-00f067aa0ba902b7-01")
    found = collector.wait(sampled, SERVICES)
    assert not collector.of(trace_id) and len(collector.spans) == before + len(found)
