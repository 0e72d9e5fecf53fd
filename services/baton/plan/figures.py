"""A simulated layout's figures, for tables and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from baton.bench.figures import Targets, spread
from baton.plan.deployment import Simulated
from baton.plan.search import misses


def figures(found: Simulated, targets: Targets) -> dict[str, Any]:
    """Latencies in milliseconds, of requests that finished; rates per second over the time in which the
    requests that count arrived."""
    done = [record for record in found.records if not record.error]
    seconds, met = found.seconds, found.met(targets)
    late, slow = misses(found, targets)
    return {
        "prefill": found.layout.prefill,
        "decode": found.layout.decode,
        "split": found.layout.split if found.layout.prefill else None,
        "requests": len(found.records),
        "failed": len(found.records) - len(done),
        "met": met,
        "goodput_part": met / len(found.records),
        "goodput_per_second": met / seconds,
        "missed_ttft": late,
        "missed_itl": slow,
        "output_tokens_per_second": sum(record.output_tokens for record in done) / seconds,
        "ttft_ms": spread(record.ttft for record in done if record.arrivals),
        "itl_ms": spread(gap for record in done for gap in record.itl),
        "tpot_ms": spread(record.tpot for record in done),
        "e2e_ms": spread(record.e2e for record in done),
        "prefill_nodes": asdict(found.prefill) if found.prefill is not None else None,
        "decode_nodes": asdict(found.decode),
        "retractions": found.retractions,
    }
