"""A worker changes its role where etcd finds it, with a host tier, KV events or several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import greedy
from deployment import Deployment
from etcd import running_etcd
from polling import wait
from process import Process
from stress.role_faults import set_role
from test_cache_stream import PAGE, prompt
from test_kv_events_split import Reader, reads_all

from baton.client import Client

OUTPUT = 120


def answer(client: Client, number: int) -> list[int]:
    return client.generate(**greedy(prompt(number, 8 * PAGE), OUTPUT)).choices[0].token_ids


def answers(client: Client, expected: list[list[int]]) -> bool:
    """All at once."""
    with ThreadPoolExecutor(len(expected)) as pool:
        return list(pool.map(lambda number: answer(client, number), range(len(expected)))) == expected


@pytest.fixture
def found_by_etcd(tmp_path) -> Iterator[dict[str, Process]]:
    """One prefill and two decode nodes with small pools, host tiers and KV events."""
    with running_etcd(tmp_path) as etcd:
        flags = ["--etcd", etcd.endpoint, "--etcd-prefix", f"/test-{os.getpid()}"]
        worker = [*flags, "--threads", "1", "--kv-tokens", str(96 * PAGE), "--context-length", "512"]
        processes = {}
        for name in ("tokenizer", "prefill", "decode-0", "decode-1", "gateway"):
            role, own = name.split("-")[0], list(flags)
            if role in ("prefill", "decode"):
                events = ["--kv-events", f"ipc://{tmp_path}/{name}", "--kv-events-topic", "kv@test"]
                events += ["--kv-events-replay", f"ipc://{tmp_path}/{name}-replay"]
                own = [*worker, "--host-memory", "8M", *events]
            processes[name] = Process(role, name, own, tmp_path)
        try:
            for process in processes.values():
                process.start()
            for process in processes.values():
                process.wait_ready()
            yield processes
        finally:
            codes = {process.name: process.stop() for process in reversed(processes.values())}
        assert not any(codes.values()), codes
        for process in processes.values():
            assert "Traceback" not in process.log.read_text(), process.log


def test_etcd_host_tiers_and_kv_events_follow_a_change_of_role(found_by_etcd, tmp_path):
    """More prompts than a pool has pages for; a reader of events that knows nothing else stays right."""
    gateway, worker = found_by_etcd["gateway"], found_by_etcd["decode-1"]

    def peers(role: str) -> set[str]:
        return {peer.address for peer in gateway.info().peers if peer.role == role and peer.connected}

    wait(lambda: len(peers("decode")) == 2 and len(peers("prefill")) == 1, "all are found")
    reader = Reader(f"ipc://{tmp_path}/decode-1", f"ipc://{tmp_path}/decode-1-replay")
    with Client(gateway.address) as client:
        expected = [answer(client, number) for number in range(12)]
        reader.catch_up()
        for role in ("prefill", "decode", "prefill", "decode"):
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(answers, client, expected)
                wait(lambda asked=asked: worker.load().requests or asked.done(), "requests run there")
                changed = set_role(worker, role, 0.1)
                assert changed.pause_ms < 2000
                assert asked.result(timeout=120)
            wait(lambda role=role: worker.address in peers(role), f"it is found as a {role} node")
            assert worker.address not in peers("decode" if role == "prefill" else "prefill")
            assert answers(client, expected)
            wait(lambda: reads_all(reader, worker), "the reader has all")
        load = worker.load()
        assert load.demoted_pages and load.host_pages.cached, "the tier goes on"
    reader.close()


async def test_a_worker_of_two_ranks_changes_its_role(tmp_path, deployments):
    with Deployment.split(tmp_path, "demo", decode=2, worker=("--tp", "2")) as deployment:
        deployments.append(deployment)
        worker, client = deployment.of("decode")[1], deployment.client()
        expected = [answer(client, number) for number in range(4)]
        ranks = [rank.pid for rank in worker.info().ranks]
        assert len(ranks) == 2
        for role in ("prefill", "decode"):
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(answers, client, expected)
                assert set_role(worker, role, 0.1).pause_ms < 2000
                assert asked.result(timeout=120)
            assert worker.info().role == role and [rank.pid for rank in worker.info().ranks] == ranks
            assert answers(client, expected)
