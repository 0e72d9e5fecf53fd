"""Many seeds, on all cores."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from baton.sim import bugs
from baton.sim.run import Outcome, run_seed

CHUNK = 25
"""Seeds that a process runs before it reports."""


def run_chunk(seeds: list[int], max_steps: int | None, bug: str) -> list[Outcome]:
    """In a process of its own; also imports only once."""
    with bugs.planted(bug):
        return [run_seed(seed, max_steps) for seed in seeds]


def run_many(
    seeds: Iterable[int],
    *,
    max_steps: int | None = None,
    jobs: int | None = None,
    seconds: float | None = None,
    bug: str = "",
) -> Iterator[Outcome]:
    """Outcomes as they come. `seconds`: no more seeds are begun after that."""
    jobs = jobs or os.cpu_count() or 1
    source = iter(seeds)
    deadline = time.monotonic() + seconds if seconds is not None else None
    with ProcessPoolExecutor(jobs) as pool:
        running: set[Future[list[Outcome]]] = set()
        try:
            while True:
                while len(running) < 2 * jobs and (deadline is None or time.monotonic() < deadline):
                    chunk = list(itertools.islice(source, CHUNK))
                    if not chunk:
                        break
                    running.add(pool.submit(run_chunk, chunk, max_steps, bug))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
