"""Real processes that find each other through a real etcd: nodes join, drain and leave while requests run."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from etcd import running_etcd
from polling import wait
from process import Process

from baton.client import Client

LONG = " ".join(f"word{number}" for number in range(40))
"""More tokens than a decode node prefills itself."""


def answer(client: Client, number: int) -> str:
    prompt = f"{number} {LONG}"
    deltas = client.stream(prompt, max_tokens=200, temperature=0, ignore_eos=True)
    return "".join(delta.text for delta in deltas)


def test_nodes_join_drain_and_leave_while_requests_run(tmp_path):
    with running_etcd(tmp_path) as etcd:
        flags = ["--etcd", etcd.endpoint, "--etcd-prefix", f"/test-{os.getpid()}"]
        worker = [*flags, "--threads", "1", "--kv-tokens", "8192"]
        roles = {"tokenizer": flags, "prefill": worker, "decode": worker, "gateway": flags}
        first = {role: Process(role, role, list(given), tmp_path) for role, given in roles.items()}
        second = {role: Process(role, f"{role}-2", list(worker), tmp_path) for role in ("prefill", "decode")}
        processes = [*first.values(), *second.values()]
        try:
            for process in first.values():
                process.start()
            for process in first.values():
                process.wait_ready()
            gateway = first["gateway"]

            def peers(role: str) -> set[str]:
                return {p.address for p in gateway.info().peers if p.role == role and p.connected}

            wait(lambda: peers("decode") == {first["decode"].address}, "the first decode node is found")
            with Client(gateway.address) as client, ThreadPoolExecutor(4) as pool:
                expected = [answer(client, number) for number in range(4)]
                for process in second.values():
                    process.start()
                for process in second.values():
                    process.wait_ready()
                wait(lambda: len(peers("decode")) == 2, "the second decode node has joined")

                running = [pool.submit(answer, client, number) for number in range(4)]
                wait(lambda: first["decode"].load().requests, "requests run on the first")
                for role in ("decode", "prefill"):
                    first[role].signal(signal.SIGTERM)
                assert [each.result(timeout=60) for each in running] == expected
                wait(lambda: peers("decode") == {second["decode"].address}, "the first has left")
                # A killed process has said nothing: it goes with its lease. The survivors compute meanwhile.
                used = client.generate(f"5 {LONG}", max_tokens=4, hand_off=True)
                assert used.stats is not None and used.stats.prefill_address == second["prefill"].address
        finally:
            codes = {process.name: process.stop() for process in reversed(processes) if process.starts}
        assert not any(codes.values()), codes
