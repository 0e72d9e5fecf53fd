"""Prometheus metrics: a registry per process, the Load snapshot as baton_* series, and what a scrape gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.v1 import node_pb2


def exposition(registry: CollectorRegistry, model: str) -> bytes:
    """The text that a scrape gets. Each series has a label `model` (empty: not known yet), and there are no
    series `_created`: a restart shows in counters that fall."""
    return generate_latest(_Scrape(registry, model))


class _Scrape(CollectorRegistry):
    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        super().__init__(auto_describe=False)
        self._registry = registry
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            found = copy(metric)
            found.samples = [
                sample._replace(labels={**sample.labels, "model": self._model})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield found


COUNTERS = {
    "steps": "Steps of the engine.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "cached_tokens": "Prompt tokens that needed no computing.",
    "computed_tokens": "Tokens computed here: of prompts, and of decode rows one for each step, and drafts.",
    "encoded_images": "Images that a vision tower here has encoded.",
    "encoded_tokens": "Their tokens.",
    "encode_us": "Microseconds that encoding them took.",
    "encode_batches": "Batches in which they were encoded.",
    "encode_hits": "Images whose embeddings were still known.",
    "drafted_tokens": "Guessed tokens that have been verified.",
    "accepted_drafts": "Guessed tokens that were right.",
    "output_tokens": "Tokens sampled.",
    "pulled_pages": "KV pages pulled.",
    "pulled_bytes": "Bytes of KV pages pulled.",
    "borrowed_pages": "KV pages pulled out of other workers' prefix trees.",
    "lent_pages": "KV pages lent to other workers.",
    "demoted_pages": "KV pages copied to the host tier.",
    "promoted_pages": "KV pages copied back from the host tier.",
    "promotions": "Requests for which pages were copied back from the host tier.",
    "dropped_copies": "Copies to or from the host tier that were dropped, since a page was reused meanwhile.",
    "disk_written_pages": "KV pages written to files of the disk tier.",
    "disk_read_pages": "KV pages read from files of the disk tier.",
    "disk_reads": "Requests for which pages were read from files of the disk tier.",
    "disk_evicted": "Files of the disk tier that were removed to make room.",
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
    "mask_wait_us": "Microseconds that the step thread computed masks, or waited for them.",
}
REASONS = {
    "handoff_retry_reasons": "Hand-offs tried again, by reason.",
    "borrow_failures": "Pulls out of other workers' prefix trees that failed, by reason.",
    "disk_faults": "KV pages not read from files of the disk tier, or not written, by reason.",
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
    "prompt_tokens_per_second": "Prompt tokens computed a second in full steps, a moving average.",
    "queued_tokens": "Prompt tokens still to be computed here.",
    "disk_bytes": "Bytes of the disk tier's files.",
    "available_pages": "KV pages that a request could take now.",
}


SECONDS = {
    "step_age_ms": ("step_age", 1e-3, "Since the step thread last began a turn."),
    "oldest_lease_ms": ("oldest_lease", 1e-3, "Age of the oldest lease."),
    "step_us": ("step", 1e-6, "A step with decode rows, a moving average."),
    "first_token_ms": ("first_token", 1e-3, "From admission to the first token, a moving average."),
    "wait_ms": ("wait", 1e-3, "That a request that came now would wait for a row."),
}
"""Field of the load -> metric without `_seconds`, the field's unit in seconds, and what it is."""


class LoadCollector(Collector):
    """Turns the Load that `snapshot` returns into metrics, at each scrape; no metrics if it raises."""

    def __init__(
        self,
        role: Callable[[], str],
        snapshot: Callable[[], node_pb2.Load],
        info: Callable[[], node_pb2.NodeInfo],
    ) -> None:
        self._role_now = role
        self._snapshot = snapshot
        self._info = info

    @property
    def _role(self) -> str:
        return self._role_now()

    def describe(self) -> list[Metric]:
        return []  # keeps registration from calling collect()

    def collect(self) -> Iterator[Metric]:
        try:
            load, info = self._snapshot(), self._info()
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
        for field_name, (name, unit, text) in SECONDS.items():
            gauge = GaugeMetricFamily(f"baton_{name}_seconds", text, labels=["role"])
            gauge.add_metric([self._role], unit * float(getattr(load, field_name)))
            yield gauge
        yield from self._ranks(load, info.ranks)
        usage = GaugeMetricFamily(
            "baton_kv_usage", "Part of the KV pool that no request could take, 0 to 1.", labels=["role"]
        )
        groups = len(info.layout.groups)  # 0: pages of embeddings, or none
        of_a_group = load.pages.total // groups if groups else 0
        used = max(0.0, 1 - load.available_pages / of_a_group) if of_a_group else 0.0
        usage.add_metric([self._role], used)
        yield usage
        for name, text in REASONS.items():
            reasons = CounterMetricFamily(f"baton_{name}", text, labels=["role", "reason"])
            for reason, count in sorted(getattr(load, name).items()):
                reasons.add_metric([self._role, reason], float(count))
            yield reasons
        yield from self._drafts(load)
        problems = GaugeMetricFamily(
            "baton_problems", "What is wrong, by reason; 1 each.", labels=["role", "reason"]
        )
        for reason in sorted({problem.reason for problem in load.problems}):
            problems.add_metric([self._role, reason], 1.0)
        yield problems
        for name, text, counts in (
            ("pages", "KV pages by state.", load.pages),
            ("host_pages", "Pages of the host tier by state.", load.host_pages),
        ):
            pages = GaugeMetricFamily(f"baton_{name}", text, labels=["role", "state"])
            for field in node_pb2.PageCounts.DESCRIPTOR.fields:
                pages.add_metric([self._role, field.name], float(getattr(counts, field.name)))
            yield pages

    def _drafts(self, load: node_pb2.Load) -> Iterator[Metric]:
        labels = ["role", "drafter", "place", "outcome"]
        text = "Guessed tokens that have been verified, by their place behind a row's last token."
        drafts = CounterMetricFamily("baton_drafts", text, labels=labels)
        for position, (drafted, right) in enumerate(
            zip(load.drafted_places, load.accepted_places, strict=True), 1
        ):
            for outcome, count in (("right", right), ("wrong", drafted - right)):
                drafts.add_metric([self._role, load.drafter, str(position), outcome], float(count))
        yield drafts

    def _ranks(self, load: node_pb2.Load, ranks: Sequence[node_pb2.Rank]) -> Iterator[Metric]:
        """Nothing but the names where there is one rank."""
        memory = GaugeMetricFamily(
            "baton_rank_resident_bytes", "Main memory of each rank.", labels=["role", "rank"]
        )
        for rank in ranks:
            memory.add_metric([self._role, str(rank.rank)], float(rank.resident_bytes))
        yield memory
        plans = HistogramMetricFamily(
            "baton_plan_seconds", "From a step's plan until all ranks were sent it.", labels=["role"]
        )
        times = load.plan_times
        if times.counts:
            names = [*map(floatToGoString, times.bounds), "+Inf"]
            buckets = list(zip(names, map(float, accumulate(times.counts)), strict=True))
            plans.add_metric([self._role], buckets, sum_value=times.sum)
        yield plans
