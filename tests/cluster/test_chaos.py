"""Processes are killed, stalled and drained at random moments under 64 streams: clients see nothing of it."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from checkpoints import make_model, save
from reference import Reference
from stress import Cluster, Task, make_tasks, record, run

FAULTS = 50
TASKS = 40


@dataclass
class Prepared:
    cluster: Cluster
    tasks: list[Task]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, deployments) -> Iterator[Prepared]:
    folder = tmp_path_factory.mktemp("chaos")
    model = make_model("qwen3")
    path = save(model, folder / "model")
    with Cluster(folder, path) as cluster:
        deployments.append(cluster)
        tasks = make_tasks(Reference(model), TASKS)
        yield Prepared(cluster, asyncio.run(record(cluster.gateway.address, tasks)))


@pytest.mark.timeout(600)
async def test_fifty_faults_under_sixty_four_streams(prepared):
    seed = int(os.environ.get("BATON_CHAOS_SEED", "0")) or secrets.randbits(32)
    print(f"BATON_CHAOS_SEED={seed}")
    report = await run(prepared.cluster, prepared.tasks, seed=seed, faults=FAULTS)
    print(report.summary())
    assert not report.problems
    assert report.tally.exact > 64 and len(report.faults) == FAULTS
