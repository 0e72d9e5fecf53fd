"""Workers change their roles while they serve: clients see nothing of it."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from functools import partial

import pytest
from asking import greedy
from checkpoints import make_model, save
from deployment import Deployment
from forking import forks
from process import ENVIRONMENT
from reference import Reference
from stress import Cluster, RoleInjector, make_tasks, record, run
from stress.role_faults import set_role

from baton.client import AsyncClient

PAUSE_SECONDS = 2.0
REQUESTS = [greedy([*range(20 + number, 20 + number + 70)], 150) for number in range(6)]
"""With prompts that are handed off."""


async def streamed(client, request):
    """Its text, and the longest pause between two of its pieces."""
    last, longest, text = 0.0, 0.0, ""
    async with client.stream(**request) as stream:
        async for delta in stream:
            now = time.monotonic()
            longest, last, text = max(longest, now - last if last else 0.0), now, text + delta.text
    return text, longest


def baton(*arguments):
    return forks(**ENVIRONMENT).run(arguments, environment=dict(os.environ))


async def test_a_decode_node_becomes_a_prefill_node_and_back_under_load(tmp_path, deployments):
    with Deployment.split(tmp_path, "demo", prefill=1, decode=2) as deployment:
        deployments.append(deployment)
        server, worker = ("--server", deployment.gateway.address), deployment.of("decode")[1]
        async with AsyncClient(deployment.gateway.address) as client, asyncio.timeout(240):
            calm = [await streamed(client, request) for request in REQUESTS]
            stop, pauses = asyncio.Event(), []

            async def follow(number):
                while not stop.is_set():
                    text, pause = await streamed(client, REQUESTS[number])
                    assert text == calm[number][0]
                    pauses.append(pause)

            async with asyncio.TaskGroup() as group:
                for number in range(len(REQUESTS)):
                    group.create_task(follow(number))
                for role in ("prefill", "decode") * 3:
                    await asyncio.sleep(0.5)
                    answer = await asyncio.to_thread(set_role, worker, role, 0.1)
                    assert answer.pause_ms < 1000 * PAUSE_SECONDS
                    assert worker.info().role == role
                stop.set()
            assert len(pauses) >= len(REQUESTS) and max(pauses) < PAUSE_SECONDS, max(pauses)
        done = await asyncio.to_thread(baton, "role", worker.address, "prefill", *server)
        assert (done.returncode, done.stderr) == (0, "") and "is a prefill node: 0 requests" in done.stdout
        last = deployment.decode.address
        done = await asyncio.to_thread(baton, "role", last, "prefill", *server)
        assert done.returncode == 1 and f"{last} is the last decode node that serves; --force" in done.stderr
        done = await asyncio.to_thread(baton, "role", "127.0.0.1:1", "prefill", *server)
        assert (
            done.returncode == 1 and "127.0.0.1:1 is no worker of this deployment; there are:" in done.stderr
        )
        assert len(done.stderr.splitlines()) == 1
        done = await asyncio.to_thread(baton, "role", last, "prefill", "--force", *server)
        assert done.returncode == 0
        await asyncio.to_thread(set_role, worker, "decode", 0.0)
        with deployment.client() as again:  # waits until the gateway knows
            assert again.generate(**REQUESTS[0]).text == calm[0][0]


@pytest.mark.timeout(600)
async def test_roles_change_and_nodes_die_meanwhile(tmp_path, deployments):
    seed = int(os.environ.get("BATON_CHAOS_SEED", "0")) or secrets.randbits(32)
    print(f"BATON_CHAOS_SEED={seed}")
    model = make_model("qwen3")
    path = save(model, tmp_path / "model")
    with Cluster(tmp_path, path, tokenizers=1) as cluster:
        deployments.append(cluster)
        tasks = await record(cluster.gateway.address, make_tasks(Reference(model), 20))
        injector = partial(RoleInjector, kills=0.3)
        report = await run(cluster, tasks, seed=seed, faults=10, streams=16, injector=injector)
    print(report.summary())
    assert not report.problems
    assert report.tally.exact > 16 and len(report.faults) == 10
