"""Reduces a failing scenario: fewer faults, fewer and simpler requests, while the same rule is broken.

    python tests/sim/shrink.py --seed 198 --trace FILE
    python tests/sim/shrink.py --seed 0 --bug lease-timer

Prints what is left; with a bug of `planted`, of the core with it. Exits with 1 if the run breaks a rule.
Greedy removal of ever smaller parts, after Zeller and Hildebrandt's delta debugging (2002).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from planted import BUGS, planted

from baton.sim.run import Outcome, run_scenario
from baton.sim.scenario import Scenario, make_scenario
from baton.sim.scenario_images import make_image_scenario
from baton.sim.scenario_requests import RequestSpec
from baton.sim.scenario_roles import make_auto_scenario, make_role_scenario

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


def _described(scenario: Scenario) -> Iterator[str]:
    yield from (f"prefill p{i}: {worker} {rest}" for i, (worker, rest) in enumerate(scenario.prefill))
    yield from (f"decode d{i}: {worker} {rest}" for i, (worker, rest) in enumerate(scenario.decode))
    yield from (f"request {spec}" for spec in scenario.requests)
    yield from (f"fault at {fault}" for fault in scenario.faults)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--bug", choices=sorted(BUGS), default="", help="planted into the core")
    parser.add_argument("--roles", action="store_true", help="the seed's scenario with changes of role")
    parser.add_argument("--auto-roles", action="store_true", help="... with gateways that change roles")
    parser.add_argument("--images", action="store_true", help="... of a model that sees")
    parser.add_argument("--trace", type=Path, help="a file for every event of the smaller run")
    options = parser.parse_args()
    with planted(options.bug):
        make = make_image_scenario if options.images else make_scenario
        if options.roles or options.auto_roles:
            scenario = (make_role_scenario if options.roles else make_auto_scenario)(options.seed, make)
        else:
            scenario = make(options.seed)
        outcome = run_scenario(scenario)
        print(outcome)
        if outcome.rule:
            scenario, outcome = shrink(
                scenario,
                outcome.rule,
                lambda smaller: print(
                    f"  {len(smaller.requests)} requests, {len(smaller.faults)} faults", file=sys.stderr
                ),
            )
            print(f"shrunk: {outcome}", *_described(scenario), sep="\n  ")
        if options.trace is not None:
            with options.trace.open("w") as file:
                run_scenario(scenario, trace=lambda line: print(line, file=file))
    return 1 if outcome.failure else 0


if __name__ == "__main__":
    sys.exit(main())
