"""Prometheus metrics: a registry per process, and the Load snapshot as baton_* series."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
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
    "leases_expired": "Prompts given up because their decode node's heartbeats had stopped.",
    "leases_revoked": "Leases taken back because a prompt that waited needed the pages.",
    "local_prefills": "Prompts prefilled on the decode node itself.",
    "messages": "Messages sent to gateways.",
    "refused": "Requests refused because they could not have ended in time.",
    "grammars": "Grammars compiled.",
    "grammar_us": "Microseconds that compiling grammars took.",
    "masks": "Masks of constrained rows computed.",
    "mask_us": "Microseconds that masks took.",
    "mask_wait_us": "Microseconds that sampling waited for masks, beyond the forward pass.",
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
    "queued_tokens": "Prompt tokens still to be computed here.",
    "available_pages": "KV pages that a request could take now.",
    "wait_ms": "Milliseconds that a request that came now would wait for a row.",
}


class LoadCollector(Collector):
    """Turns the Load that `snapshot` returns into metrics, at each scrape; no metrics if it raises."""

    def __init__(self, role: str, snapshot: Callable[[], node_pb2.Load]) -> None:
        self._role = role
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        return []  # keeps registration from calling collect()

    def collect(self) -> Iterator[Metric]:
        try:
            load = self._snapshot()
        except Exception:
            return  # rpc.health logs it
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"baton_{name}", text, labels=["role"])
            counter.add_metric([self._role], float(getattr(load, name)))
            yield counter
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"baton_{name}", text, labels=["role"])
            gauge.add_metric([self._role], float(getattr(load, name)))
            yield gauge
        reasons = CounterMetricFamily(
            "baton_handoff_retry_reasons", "Hand-offs tried again, by reason.", labels=["role", "reason"]
        )
        for reason, count in sorted(load.handoff_retry_reasons.items()):
            reasons.add_metric([self._role, reason], float(count))
        yield reasons
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
