"""Prometheus metrics: the Load snapshot as baton_* series, and the HTTP server for them and for health."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from socket import AF_INET, AF_INET6
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from baton.v1 import node_pb2

COUNTERS = {
    "steps": "Steps of the engine.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "cached_tokens": "Prompt tokens that needed no computing.",
    "computed_tokens": "Tokens computed here: of prompts, and one for each decode row of a step.",
    "output_tokens": "Tokens sampled.",
    "pulled_pages": "KV pages pulled.",
    "pulled_bytes": "Bytes of KV pages pulled.",
    "retractions": "Requests that lost their pages under memory pressure.",
    "finished": "Requests that finished.",
    "failed": "Requests that failed.",
    "cancelled": "Requests that were cancelled.",
    "handoff_retries": "Hand-offs tried again.",
    "local_prefills": "Prompts prefilled on the decode node itself.",
    "messages": "Messages sent to gateways.",
    "refused": "Requests refused because they could not have ended in time.",
}
GAUGES = {
    "draining": "1 while draining.",
    "waiting": "Requests that wait for admission.",
    "prefilling": "Requests whose prompt is being computed here.",
    "handing_off": "Requests whose prompt is being computed or pulled elsewhere.",
    "running": "Rows in the running batch.",
    "leases": "Leases on prompts that may still be pulled.",
    "pulls": "Pulls in flight.",
    "rows": "Batch rows in use.",
    "requests": "Requests held in any state.",
    "paused": "Requests not generated now because their client does not read.",
    "step_age_ms": "Milliseconds since the step thread last began a turn.",
    "oldest_lease_ms": "Age of the oldest lease in milliseconds.",
    "step_us": "Microseconds of a step with decode rows, a moving average.",
    "prompt_tokens_per_second": "Prompt tokens computed a second in full steps, a moving average.",
    "first_token_ms": "Milliseconds from admission to the first token, a moving average.",
    "wait_ms": "Milliseconds that a request that came now would wait for a row.",
}


class LoadCollector(Collector):
    """Turns the Load that `snapshot` returns into metrics, at each scrape.

    `snapshot` is called on the thread that scrapes; it may raise TimeoutError, and the scrape is empty then.
    """

    def __init__(self, role: str, snapshot: Callable[[], node_pb2.Load]) -> None:
        self._role = role
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        return []  # keeps registration from calling collect()

    def collect(self) -> Iterator[Metric]:
        try:
            load = self._snapshot()
        except TimeoutError:
            return
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"baton_{name}", text, labels=["role"])
            counter.add_metric([self._role], float(getattr(load, name)))
            yield counter
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"baton_{name}", text, labels=["role"])
            gauge.add_metric([self._role], float(getattr(load, name)))
            yield gauge
        problems = GaugeMetricFamily(
            "baton_problems", "What is wrong, by reason; 1 each.", labels=["role", "reason"]
        )
        for reason in sorted({problem.reason for problem in load.problems}):
            problems.add_metric([self._role, reason], 1.0)
        yield problems
        pages = GaugeMetricFamily("baton_pages", "KV pages by state.", labels=["role", "state"])
        for field in node_pb2.PageCounts.DESCRIPTOR.fields:
            pages.add_metric([self._role, field.name], float(getattr(load.pages, field.name)))
        yield pages


Health = Callable[[], tuple[bool, list[str]]]
"""Whether the process serves, and what is wrong with it. Called on the HTTP server's threads."""


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int, health: Health
) -> tuple[int, Callable[[], None]]:
    """Serves GET /metrics and GET /health (503 while the process does not serve) from threads.

    Returns the port bound (0 asks for a free one) and what closes it. Raises OSError when it cannot be bound.
    """
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start: Any) -> Any:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            return metrics(environ, start)
        if path != "/health":
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"see /metrics and /health\n"]
        serving, problems = health()
        body = {"status": "serving" if serving else "not serving", "problems": problems}
        start("200 OK" if serving else "503 Service Unavailable", [("Content-Type", "application/json")])
        return [json.dumps(body).encode()]

    family = AF_INET6 if ":" in host else AF_INET
    kind = type("_Server", (ThreadingWSGIServer,), {"address_family": family})
    server: WSGIServer = make_server(host.strip("[]"), port, app, kind, handler_class=_Quiet)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)

    return server.server_port, close


class _Quiet(WSGIRequestHandler):
    timeout = 10.0
    """Seconds that a client may take for its request."""

    def log_message(self, format: str, *args: Any) -> None:
        pass
