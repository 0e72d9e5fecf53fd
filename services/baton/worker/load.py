"""A worker's reports: load, step cost, and the contents of its prefix tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from baton.engine.scheduler import Scheduler
from baton.engine.step_stats import StepStats
from baton.kvcache.host_tier import HostTier
from baton.kvcache.kv_events import TreeLog
from baton.kvcache.page_map import PageMap, PageUse
from baton.v1 import cache_pb2, node_pb2

if TYPE_CHECKING:
    from baton.engine.images import EncodeCounters
    from baton.handoff.pull_cost import PullCost
    from baton.worker.engine import Engine
    from baton.worker.sources.sharing import CacheSharing

STORED_PER_UPDATE = 2**17
"""Digests of eight bytes."""


def worker_info(engine: Engine | None, incarnation: int) -> node_pb2.NodeInfo:
    """None: it has not been built yet."""
    info = node_pb2.NodeInfo(incarnation=incarnation)
    if engine is not None:
        info.model.CopyFrom(engine.model_info)
        info.layout.CopyFrom(engine.layout)
        info.endpoints.extend(engine.endpoints())
        info.device = str(engine.device)
        info.attention = engine.attention
        info.ranks.extend(engine.ranks.describe(engine.device))
    return info


def snapshot(scheduler: Scheduler, requests: int) -> node_pb2.Load:
    """Called in the step thread. `requests`: number of requests in any state."""
    counts = scheduler.cache.counts()
    pages = node_pb2.PageCounts(
        total=counts.total,
        free=counts.free,
        owned=counts.owned,
        cached=counts.cached,
        quarantined=counts.quarantined,
        reserved=scheduler.reservations.total,
    )
    load = node_pb2.Load(
        waiting=len(scheduler.waiting),
        prefilling=len(scheduler.prompts),
        handing_off=len(scheduler.handoffs),
        running=len(scheduler.running),
        rows=scheduler.slots.in_use,
        steps=scheduler.step_number,
        retractions=scheduler.retractions,
        computed_tokens=scheduler.computed_tokens,
        requests=requests,
        pages=pages,
        queued_tokens=scheduler.queued_tokens,
        available_pages=max(0, scheduler.reservations.headroom) // len(scheduler.cache.groups),
        step_tokens=scheduler.config.token_budget,
        keys=sum(len(sequence.tokens) for sequence in scheduler.running),
    )
    if scheduler.drafts is not None:
        load.drafted_tokens = sum(scheduler.drafts.drafted)
        load.accepted_drafts = sum(scheduler.drafts.accepted)
        load.drafter = scheduler.drafts.name
        load.drafted_places.extend(scheduler.drafts.drafted)
        load.accepted_places.extend(scheduler.drafts.accepted)
    if scheduler.cache.tier is not None:
        add_tier(load, scheduler.cache.tier)
    return load


def add_tier(load: node_pb2.Load, tier: HostTier) -> None:
    load.host_pages.CopyFrom(node_pb2.PageCounts(**asdict(tier.cache.counts())))
    load.demoted_pages, load.promoted_pages = tier.counters.demoted_pages, tier.counters.promoted_pages
    load.promotions, load.dropped_copies = tier.counters.promotions, tier.counters.dropped
    if tier.disk is not None:
        disk, files = tier.disk, tier.disk.files
        load.disk_written_pages, load.disk_read_pages = disk.counters.written_pages, disk.counters.read_pages
        load.disk_reads, load.disk_evicted, load.disk_bytes = disk.counters.reads, files.evicted, files.size
        load.disk_faults.update(disk.faults)
    load.host_token_seconds = tier.page_seconds * len(tier.cache.groups) / tier.cache.page_size


def add_step_cost(load: node_pb2.Load, stats: StepStats) -> None:
    load.step_us = int(1e6 * stats.step.value)
    load.prompt_tokens_per_second = int(stats.prompt_rate.value)
    if stats.calibration is not None:
        load.step_cost.CopyFrom(node_pb2.StepCost(**asdict(stats.calibration.cost)))


def add_sharing(load: node_pb2.Load, sharing: CacheSharing) -> None:
    counters = sharing.borrower.counters
    load.borrowed_pages, load.lent_pages = counters.pulled_pages, sharing.lender.lent_pages
    if sharing.borrower.able:
        cost = sharing.borrower.cost
        load.borrow_cost.CopyFrom(node_pb2.PullCost(fixed=cost.fixed, token=cost.token))
    load.borrow_failures.update(dict(counters.retries))  # copied in one call: see decode.shell


def page_map_message(found: PageMap) -> node_pb2.PageMap:
    names = [use.name.lower() for use in PageUse]
    return node_pb2.PageMap(
        total=found.total,
        pages_per_cell=found.pages_per_cell,
        runs=[
            node_pb2.PageRun(cells=run.cells, **dict(zip(names, run.pages, strict=True)))
            for run in found.runs
        ],
    )


def add_grammars(load: node_pb2.Load, engine: Engine) -> None:
    masks = engine.masks
    load.masks, load.mask_us = masks.masks, int(1e6 * masks.seconds)
    load.mask_wait_us = int(1e6 * masks.waited)
    if engine.grammars is not None:
        stats = engine.grammars.stats
        load.grammars, load.grammar_us = stats.compiled, int(1e6 * stats.seconds)


def add_encoding(load: node_pb2.Load, counters: EncodeCounters, cost: PullCost | None) -> None:
    load.encoded_images, load.encoded_tokens = counters.images, counters.tokens
    load.encode_us = int(1e6 * counters.seconds)
    load.encode_batches, load.encode_hits = counters.batches, counters.hits
    if cost is not None:
        load.encode_cost.CopyFrom(node_pb2.PullCost(fixed=cost.fixed, token=cost.token))


def cache_updates(
    log: TreeLog, known: int | None, incarnation: int, role: str, load: node_pb2.Load
) -> Iterator[cache_pb2.CacheUpdate]:
    """For a watcher that knows the log up to this change; None: it knows nothing. A large tree takes several,
    and before the last of them its watcher knows no change."""
    changes = log.since(known)
    most = max(1, len(changes.stored), len(changes.host_stored))
    for first in range(0, most, STORED_PER_UPDATE):
        last = first + STORED_PER_UPDATE >= most
        yield cache_pb2.CacheUpdate(
            incarnation=incarnation,
            role=role,
            after=changes.after,
            sequence=changes.sequence if last else changes.after,
            snapshot=changes.snapshot and not first,
            stored=changes.stored[first : first + STORED_PER_UPDATE],
            removed=() if first else changes.removed,
            host_stored=changes.host_stored[first : first + STORED_PER_UPDATE],
            host_removed=() if first else changes.host_removed,
            page_size=log.page_size,
            load=load,
        )
