"""Scenarios in which workers change their roles, among all other faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from baton.gateway.role_balance import RoleBounds
from baton.sim.faults import Fault
from baton.sim.scenario import Scenario, make_scenario


def make_role_scenario(seed: int, make: Callable[[int], Scenario] = make_scenario) -> Scenario:
    """What `make` makes of the seed, with changes of role; always the same one. One decode node stays what it
    is, so that no change excuses a lost request. Workers of several ranks, or with a host tier, keep
    theirs."""
    scenario, rng = make(seed), random.Random(f"roles {seed}")
    names = [f"p{i}" for i in range(len(scenario.prefill))] + [f"d{i}" for i in range(len(scenario.decode))]
    names.remove(f"d{rng.randrange(len(scenario.decode))}")
    changes = [
        Fault(
            at=rng.uniform(0.9, 5.0),
            kind="role",
            target=rng.choice(names),
            seconds=rng.choice((0.0, 0.05, 0.5, 2.0)) * rng.uniform(0.5, 1.0),
        )
        for _ in range(rng.choice((2, 4, 8)))
    ]
    faults = tuple(sorted([*scenario.faults, *changes], key=lambda fault: fault.at))
    return replace(_able(scenario), faults=faults)


def make_auto_scenario(seed: int, make: Callable[[int], Scenario] = make_scenario) -> Scenario:
    """What `make` makes of the seed, in which gateways change roles by queues; always the same one. No
    worker has several ranks or a host tier, with which a simulated one would keep its role."""
    scenario, rng = make(seed), random.Random(f"auto {seed}")
    scenario = replace(
        scenario,
        prefill=tuple((c, replace(m, ranks=1, tier_rows=0, disk="")) for c, m in scenario.prefill),
        decode=tuple((c, replace(m, ranks=1, tier_rows=0, disk="")) for c, m in scenario.decode),
    )
    bounds = RoleBounds(
        lasting=rng.choice((0.1, 0.3)), pause=rng.choice((0.3, 1.0)), busy=0.01, calm=rng.choice((0.01, 0.1))
    )
    return replace(_able(scenario), gateway=replace(scenario.gateway, auto_roles=bounds))


def _able(scenario: Scenario) -> Scenario:
    """Any prefill node may have to decode, and thus to pull."""
    room = min(config.kv_tokens for config, _ in scenario.decode)
    pace = scenario.decode[0][1].pull_pace
    prefill = tuple(
        (replace(c, kv_tokens=max(c.kv_tokens, room)), replace(m, pull_pace=m.pull_pace or pace))
        for c, m in scenario.prefill
    )
    return replace(scenario, prefill=prefill)
