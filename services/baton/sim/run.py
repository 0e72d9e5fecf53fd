"""One run of a scenario, its outcome, and many runs on all cores."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from baton import cgroups
from baton.sim.cluster import SimCluster
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
    """How many requests ended in which way."""
    resumed: int = 0
    """Times that a request with output went on at another decode node."""
    pulled_pages: int = 0
    """Pages of prompts computed at prefill nodes, by the decode nodes that are there at the end."""
    borrowed_pages: int = 0
    """Pages out of other workers' prefix trees, by the workers that are there at the end."""
    disk_pages: int = 0
    """Pages that have been read from disks."""
    role_changes: int = 0
    encoded_images: int = 0
    """By the encode nodes that are there at the end."""
    rule: str = ""
    """The rule that was broken, in a word or two; empty: none."""
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
    """Raises nothing: an error that escapes the core is a failure of the run."""
    cluster: SimCluster | None = None
    rule = failure = ""
    try:
        cluster = SimCluster(scenario, trace)
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
        cluster.pulled_pages,
        cluster.borrowed_pages,
        cluster.disk_pages,
        cluster.role_changes,
        cluster.encoded_images,
        rule,
        failure,
    )


CHUNK = 25
"""Seeds that a process runs before it reports."""


def run_chunk(seeds: list[int], max_steps: int | None) -> list[Outcome]:
    """In a process of its own; also imports only once."""
    return [run_seed(seed, max_steps) for seed in seeds]


def end_with_parent() -> None:
    """For a process of a pool: the queue that it waits at is one that it holds open itself, so that it would
    outlive a killed parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in the process that owns the pool"

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def run_many(
    seeds: Iterable[int],
    *,
    max_steps: int | None = None,
    jobs: int | None = None,
    seconds: float | None = None,
) -> Iterator[Outcome]:
    """Outcomes as they come. `seconds`: no more seeds are begun after that."""
    jobs = jobs or cgroups.cores()
    source = iter(seeds)
    deadline = time.monotonic() + seconds if seconds is not None else None
    # Not forked from this process, which may have threads, gRPC's among them, and pipes others read.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=end_with_parent) as pool:
        running: set[Future[list[Outcome]]] = set()
        try:
            while True:
                while len(running) < 2 * jobs and (deadline is None or time.monotonic() < deadline):
                    chunk = list(itertools.islice(source, CHUNK))
                    if not chunk:
                        break
                    running.add(pool.submit(run_chunk, chunk, max_steps))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
