"""The workers of a gateway as one model server: metrics under the names of vLLM, by which the Gateway API
inference extension chooses among servers (its model server protocol)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.gateway.routing import Router
from baton.gateway.worker_registry import WorkerRegistry


@dataclass(frozen=True, slots=True)
class CellLoad:
    """What the workers that serve have reported lately, together."""

    waiting: int = 0
    """Requests that no node computes yet."""
    running: int = 0
    """Requests whose prompt is computed, handed off or continued."""
    pages: int = 0
    """Pages of the decode nodes' pools, of each KV group."""
    available: int = 0
    """Those of them that a request could take."""
    page_size: int = 0
    """Tokens; 0: no decode node has reported."""


def cell_load(nodes: WorkerRegistry, router: Router, now: float) -> CellLoad:
    """now: on the router's clock."""
    waiting = running = pages = available = page_size = 0
    for address, node in nodes.decode.items():
        view = router.view(address)
        load = view.fresh_load(now)
        if not node.usable or node.info is None or load is None:
            continue
        waiting += load.waiting
        running += load.prefilling + load.handing_off + load.running
        pages += load.pages.total // max(1, len(node.info.layout.groups))
        available += load.available_pages
        page_size = view.page_size
    return CellLoad(waiting, running, pages, min(available, pages), page_size)


class CellCollector(Collector):
    def __init__(self, load: Callable[[], CellLoad], registry: CollectorRegistry) -> None:
        self._load = load
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        load = self._load()
        used = 1 - load.available / load.pages if load.pages else 1.0
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait.", value=load.waiting)
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests that run.", value=load.running)
        yield GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Part of the KV pools in use, 0 to 1.", value=used
        )
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Of the KV pools.", labels=("block_size", "num_gpu_blocks")
        )
        info.add_metric((str(load.page_size), str(load.pages)), 1)
        yield info
