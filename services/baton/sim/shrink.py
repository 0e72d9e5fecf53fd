"""Reduces a failing scenario: fewer faults, fewer and simpler requests, while the same rule is broken.

Greedy removal of ever smaller parts, after Zeller and Hildebrandt's delta debugging (2002).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from baton.sim.run import Outcome, run_scenario
from baton.sim.scenario import Scenario
from baton.sim.scenario_requests import RequestSpec

T = TypeVar("T")


def shrink(
    scenario: Scenario, rule: str, progress: Callable[[Scenario], None] = lambda smaller: None
) -> tuple[Scenario, Outcome]:
    """The smallest scenario found that breaks `rule`, and its end. `progress` is told of each smaller one.

    Raises ValueError when the scenario does not break the rule.
    """
    best, outcome = scenario, run_scenario(scenario)
    if outcome.rule != rule:
        raise ValueError(f"the scenario ends with {outcome.rule or 'nothing broken'!r}, not with {rule!r}")
    shrunk = True
    while shrunk:
        shrunk = False
        for smaller in _smaller(best):
            tried = run_scenario(smaller)
            if tried.rule == rule:
                best, outcome, shrunk = smaller, tried, True
                progress(best)
                break
    return best, outcome


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Smaller scenarios, the boldest first."""
    for faults in _without(scenario.faults):
        yield replace(scenario, faults=faults)
    for requests in _without(scenario.requests):
        yield replace(scenario, requests=requests)
    for index, spec in enumerate(scenario.requests):
        for plainer in _plainer(spec):
            requests = (*scenario.requests[:index], plainer, *scenario.requests[index + 1 :])
            yield replace(scenario, requests=requests)


def _without(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Without a half, a quarter, ... one of the items."""
    size = len(items)
    while size:
        for start in range(0, len(items), size):
            yield (*items[:start], *items[start + size :])
        size = size // 2


def _plainer(spec: RequestSpec) -> Iterator[RequestSpec]:
    if spec.cancel_after is not None:
        yield replace(spec, cancel_after=None)
    if spec.stop:
        yield replace(spec, stop=())
    if spec.n > 1:
        yield replace(spec, n=1)
    if spec.params.stop_token_ids:
        yield replace(spec, params=replace(spec.params, stop_token_ids=frozenset()))
    if spec.priority:
        yield replace(spec, priority=0)
