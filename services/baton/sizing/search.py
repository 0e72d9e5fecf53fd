"""Finds the fewest nodes that meet the targets by simulating one layout after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.sizing.simulation import NodeLayout, Simulated
from baton.sizing.traffic import Traffic, TrafficWork
from baton.slo import Targets, spread
from baton.step_cost import StepCost, StepLoad, chunk_pairs


def layout_results(found: Simulated, targets: Targets) -> dict[str, Any]:
    """Latencies of finished requests, in milliseconds; rates per second, over the time in which the counted
    requests arrived."""
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


EXTRA_NODES = 2
"""Once a layout of one kind is found, the other kind is tried with at most this many more nodes."""

Simulate = Callable[[NodeLayout], Simulated]


@dataclass(frozen=True, slots=True)
class Goal:
    targets: Targets
    part: float
    """Part of the requests that must meet them."""

    def reached(self, found: Simulated) -> bool:
        return found.met(self.targets) >= self.part * len(found.records)


@dataclass(frozen=True, slots=True)
class Kinds:
    """Which layouts to try."""

    split: tuple[str, ...] = ("auto", "always")
    """`--split` modes of split layouts, in this order; empty: no split layouts."""
    aggregated: bool = True


@dataclass(slots=True)
class Plan:
    """Results of the search."""

    tried: list[Simulated] = field(default_factory=list)
    """In the order of the search."""
    split: Simulated | None = None
    """The layout with the fewest nodes that reaches the goal; None: none up to the limit."""
    aggregated: Simulated | None = None

    @property
    def best(self) -> Simulated | None:
        """The layout with fewer nodes; with equally many the aggregated one, which needs no hand-off."""
        found = [each for each in (self.aggregated, self.split) if each is not None]
        return min(found, key=lambda each: each.layout.nodes, default=None)


def impossible(traffic: Traffic, goal: Goal, cost: StepCost, budget: int, turn: float) -> str:
    """Why no number of nodes reaches the goal: too many requests would miss the targets even on an idle
    deployment. Empty: it may be reached. budget: tokens of a step. turn: seconds between two steps."""
    targets, rank = goal.targets, max(0, math.ceil(goal.part * len(traffic.arrivals)) - 1)
    if targets.itl_ms is not None:
        # A single token has no ITL.
        keys = sorted(arrival.prompt if arrival.output > 1 else 0 for arrival in traffic.arrivals)[rank]
        least = 1e3 * (cost.seconds(StepLoad(decode_sequences=1, context_tokens=keys)) + turn)
        if keys and least > targets.itl_ms:
            return f"a step with one row takes {least:.1f} ms, more than the ITL of {targets.itl_ms:g} ms"
    if targets.ttft_ms is not None:
        prompt = sorted(arrival.prompt for arrival in traffic.arrivals)[rank]
        start = min(traffic.shared_prefix, prompt - 1)
        least = 1e3 * prompt_seconds(start, prompt - start, cost, budget)
        if least > targets.ttft_ms:
            text = f"a prompt of {prompt} tokens takes {least:.0f} ms by itself"
            return f"{text}, more than the TTFT of {targets.ttft_ms:g} ms"
    return ""


def prompt_seconds(start: int, count: int, cost: StepCost, budget: int) -> float:
    """Time of the steps of a prompt on an idle node; `start` tokens are cached, `count` are computed."""
    chunks = -(-count // budget)
    return chunks * cost.fixed + cost.token * count + cost.pair * chunk_pairs(start, count)


def search(work: TrafficWork, goal: Goal, most: int, simulate: Simulate, kinds: Kinds) -> Plan:
    """most: nodes of a layout."""
    plan = Plan()
    limit = most
    for nodes in range(work.least_nodes, most + 1):
        if nodes > limit:
            break
        if kinds.aggregated and plan.aggregated is None:
            found = simulate(NodeLayout(0, nodes))
            plan.tried.append(found)
            plan.aggregated = found if goal.reached(found) else None
        for mode in kinds.split:
            if plan.split is None and nodes >= 2:
                plan.split = _walk(nodes, mode, work, goal, simulate, plan.tried)
        done = (
            plan.split is not None or not kinds.split,
            plan.aggregated is not None or not kinds.aggregated,
        )
        if all(done):
            break
        if limit == most and plan.best is not None:
            limit = min(most, nodes + EXTRA_NODES)
    return plan


def _walk(
    nodes: int, mode: str, work: TrafficWork, goal: Goal, simulate: Simulate, tried: list[Simulated]
) -> Simulated | None:
    """Tries layouts with this many nodes. Starts with nodes divided like the work, then moves a node to the
    role whose target more requests miss, until a layout repeats."""
    prefill = min(nodes - 1, max(1, round(nodes * work.prefill_part)))
    seen: set[int] = set()
    while 1 <= prefill < nodes and prefill not in seen:
        seen.add(prefill)
        found = simulate(NodeLayout(prefill, nodes - prefill, mode))
        tried.append(found)
        if goal.reached(found):
            return found
        late, slow = misses(found, goal.targets)
        prefill += 1 if late > slow else -1
    return None


def misses(found: Simulated, targets: Targets) -> tuple[int, int]:
    """Requests that miss the TTFT target, and the ITL target."""
    late, slow = Targets(ttft_ms=targets.ttft_ms), Targets(itl_ms=targets.itl_ms)
    count = len(found.records)
    return count - found.met(late), count - found.met(slow)
