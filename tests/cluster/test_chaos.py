"""Processes are killed, stalled and drained at random moments under 64 streams: clients see nothing of it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
from checkpoints import make_model, save
from polling import until
from process import Process
from reference import Reference
from stress import Cluster, Load, Task, make_tasks, record, run
from stress.clients import Outcome
from stress.run import IDLE_SECONDS

FAULTS = 24
"""benchmarks/chaos.py injects hundreds."""
TASKS = 40
HOST_MEMORY = "2M"
"""Of each worker: about 1,000 tokens."""


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
async def test_faults_under_sixty_four_streams(prepared):
    seed = int(os.environ.get("BATON_CHAOS_SEED", "0")) or secrets.randbits(32)
    print(f"BATON_CHAOS_SEED={seed}")
    report = await run(prepared.cluster, prepared.tasks, seed=seed, faults=FAULTS)
    print(report.summary())
    assert not report.problems
    assert report.tally.exact > 64 and len(report.faults) == FAULTS


@pytest.mark.timeout(600)
async def test_faults_while_pages_go_through_the_tiers(tmp_path, deployments):
    """Pools have room for a few prompts, host memory for a few more; all share a disk."""
    seed = int(os.environ.get("BATON_CHAOS_SEED", "0")) or secrets.randbits(32)
    print(f"BATON_CHAOS_SEED={seed}")
    model = make_model("qwen3")
    path = save(model, tmp_path / "model")
    with Cluster(tmp_path, path, kv_tokens=2048, host_memory=HOST_MEMORY, disk="64M") as cluster:
        deployments.append(cluster)
        tasks = await record(cluster.gateway.address, make_tasks(Reference(model), TASKS))
        report = await run(cluster, tasks, seed=seed, faults=FAULTS // 2, streams=16)
    print(report.summary())
    assert not report.problems
    assert report.tally.exact > 16 and len(report.faults) == FAULTS // 2
    assert report.tiers["demoted_pages"] and report.tiers["promotions"] + report.tiers["disk_reads"]


DEADLINE = 6.0
"""Of streams that cannot be finished; those that can have a minute."""
LATE = 10.0
"""How long after its deadline a client may hear of it, on a machine with much else to do."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("action", ["kill", "stall"])
@pytest.mark.parametrize("role", ["decode", "tokenizer", "prefill"])
async def test_no_survivor_of_a_kind(prepared, role, action):
    """Without decode nodes each stream ends with a typed error within its deadline. Without prefill nodes
    decode nodes compute prompts themselves, and prompts of token ids need no tokenizer: each gives its
    tokens."""
    cluster, victims = prepared.cluster, prepared.cluster.of(role)
    served_on = role != "decode"
    deadline = 60.0 if served_on else DEADLINE
    outcomes: list[Outcome] = []
    load = Load(
        cluster.gateway.address, "", prepared.tasks, Random(1), deadline=deadline, ended=outcomes.append
    )
    # One stream follows another: prompts alone are computed in less time than it takes to look.
    stop = asyncio.Event()
    streams = asyncio.create_task(load.closed_loop(64, stop))
    try:
        await until(lambda: under_way(cluster, role), "streams under way")
        for victim in victims:
            victim.signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        stop.set()
        await streams
    finally:
        stop.set()
        await revive(cluster, victims, action)
    assert not load.tally.broken
    if served_on:
        assert all(outcome.exact for outcome in outcomes), load.tally.errors
    else:
        assert load.tally.errors
        assert max(outcome.seconds for outcome in outcomes) < DEADLINE + LATE
    cluster.assert_idle(IDLE_SECONDS)
    again = Load(cluster.gateway.address, cluster.gateway.http, prepared.tasks, Random(2))
    assert all(outcome.exact for outcome in await asyncio.gather(*(again.one() for _ in range(16))))
    await asyncio.gather(load.close(), again.close())


def under_way(cluster: Cluster, role: str) -> bool:
    """Of prefill nodes that prompts are there; else that tokens are being made."""
    if role == "prefill":
        return any(process.load().requests for process in cluster.of("prefill"))
    return any(process.load().running for process in cluster.of("decode"))


async def revive(cluster: Cluster, victims: list[Process], action: str) -> None:
    if action == "stall":
        for victim in victims:
            victim.signal(signal.SIGCONT)
    else:
        for victim in victims:
            victim.kill()
        await asyncio.to_thread(cluster.start_all, victims)
        cluster.note_incarnations()
    for victim in victims:
        await cluster.in_touch(victim)
