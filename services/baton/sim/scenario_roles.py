"""Scenarios in which workers change their roles, among all other faults."""

from __future__ import annotations

import random
from dataclasses import replace

from baton.sim.faults import Fault
from baton.sim.scenario import Scenario, make_scenario


def make_role_scenario(seed: int) -> Scenario:
    """The scenario of the seed, with changes of role; always the same one. One decode node stays what it is,
    so that no change excuses a lost request. Workers of several ranks, or with a host tier, keep theirs."""
    scenario, rng = make_scenario(seed), random.Random(f"roles {seed}")
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
    room = min(config.kv_tokens for config, _ in scenario.decode)
    pace = scenario.decode[0][1].pull_pace
    return replace(
        scenario,
        # Any of them may have to decode, and thus to pull.
        prefill=tuple(
            (replace(c, kv_tokens=max(c.kv_tokens, room)), replace(m, pull_pace=m.pull_pace or pace))
            for c, m in scenario.prefill
        ),
        faults=tuple(sorted([*scenario.faults, *changes], key=lambda fault: fault.at)),
    )
