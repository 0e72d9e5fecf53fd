"""One run of a scenario, and how it ended: plain data, to be compared, printed and sent between processes."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

from baton.sim.cluster import Cluster
from baton.sim.scenario import Scenario, make_scenario
from baton.sim.world import Trace, Violation


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    steps: int
    seconds: float
    """Virtual."""
    faults: int
    tokens: int
    """Delivered to clients, each compared with the reference."""
    requests: dict[str, int]
    """How many ended in which way."""
    resumed: int = 0
    """Times that a request with output went on at another decode node."""
    rule: str = ""
    """What was broken, in a word or two; empty: nothing."""
    failure: str = ""
    """One line."""

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in self.requests.items())
        text = f"{self.steps} steps, {self.seconds:.1f} s of virtual time, {self.faults} faults, {ends}"
        if self.failure:
            return f"seed {self.seed} FAILS: {self.failure} ({text})"
        return f"seed {self.seed}: well ({text}; {self.tokens} tokens compared)"


def run_seed(seed: int, max_steps: int | None = None) -> Outcome:
    return run_scenario(make_scenario(seed), max_steps)


def run_scenario(scenario: Scenario, max_steps: int | None = None, trace: Trace | None = None) -> Outcome:
    """Raises nothing: whatever escapes the core is a failure of the run."""
    cluster: Cluster | None = None
    rule = failure = ""
    try:
        cluster = Cluster(scenario, trace)
        cluster.run(max_steps)
    except Violation as violation:
        failure = str(violation)
        rule = failure.split(":")[0]
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        rule = f"{type(error).__name__} in {Path(frame.filename).name}, {frame.name}"
        failure = f"{rule}: {error}"
    assert cluster is not None, failure
    world, ledger = cluster.world, cluster.ledger
    faults = len(scenario.faults)
    if trace is not None:
        world.note("end", failure or "well")
    return Outcome(
        scenario.seed,
        world.steps,
        world.now,
        faults,
        ledger.tokens,
        ledger.outcomes,
        ledger.resumed,
        rule,
        failure,
    )
