"""Many seeds, on all cores."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import threading
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
    bug: str = "",
) -> Iterator[Outcome]:
    """Outcomes as they come. `seconds`: no more seeds are begun after that."""
    jobs = jobs or os.cpu_count() or 1
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
                    running.add(pool.submit(run_chunk, chunk, max_steps, bug))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
