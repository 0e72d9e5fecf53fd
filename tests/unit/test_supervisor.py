"""The supervisor with real child processes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from baton.cli.deployment import Deployment, DeploymentPlan, free_ports
from baton.cli.supervisor import RESTARTS_PER_MINUTE, Backoff, Child, ChildError, ChildState, Supervisor

CHILD = Path(__file__).with_name("supervised_child.py")
PROGRAM = (sys.executable, str(CHILD))


def make_children(folder: Path) -> list[Child]:
    names = {"tokenizer": "tokenizer", "prefill-0": "prefill", "decode-0": "decode", "gateway": "gateway"}
    ports = free_ports("127.0.0.1", len(names))
    return [
        Child(name, role, folder=folder, host="127.0.0.1", port=port)
        for (name, role), port in zip(names.items(), ports, strict=True)
    ]


def make(children: Sequence[Child], behave: dict[str, str] | None = None, **settings) -> Supervisor:
    def arguments(child: Child) -> list[str]:
        seen = ",".join(other.name for other in children if other.state is ChildState.HEALTHY)
        return ["--behave", (behave or {}).get(child.name, "good"), "--seen", seen]

    settings = {"program": PROGRAM, "start_seconds": 120.0, "drain_seconds": 0.5, **settings}
    return Supervisor(children, arguments, **settings)


def gone(pids: Sequence[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.05)
    return False


async def test_starts_in_order_and_stops_everything(tmp_path: Path) -> None:
    children = make_children(tmp_path)
    supervisor = make(children)
    try:
        await supervisor.start()
        assert [child.state for child in children] == [ChildState.HEALTHY] * 4
        pids = [child.pid for child in children]
        assert len(set(pids)) == 4 and all(psutil.pid_exists(pid) for pid in pids)
        tokenizer, prefill, decode, gateway = children
        assert all(each.name in gateway.log.read_text() for each in (tokenizer, prefill, decode))
    finally:
        await supervisor.stop()
    assert gone(pids, 20.0)
    assert [child.state for child in children] == [ChildState.STOPPED] * 4


async def test_workers_load_at_the_same_time(tmp_path: Path) -> None:
    children = make_children(tmp_path)
    prefill, decode = children[1:3]
    supervisor = make(children, {prefill.name: f"after:{decode.log}"}, start_seconds=60.0)
    try:
        await supervisor.start()
        assert prefill.state is decode.state is ChildState.HEALTHY
    finally:
        await supervisor.stop()


async def test_child_that_cannot_start_is_named_with_its_log(tmp_path: Path) -> None:
    children = make_children(tmp_path)
    supervisor = make(children, {"decode-0": "crash"})
    with pytest.raises(ChildError) as caught:
        await supervisor.start()
    await supervisor.stop()
    message = str(caught.value)
    assert "decode-0 exited with code 3" in message.splitlines()[0]
    assert message.splitlines()[-1] == "the model is not there"
    assert children[3].state is ChildState.WAITING  # the gateway was never started
    assert gone([child.pid for child in children[:3]], 20.0)


async def test_child_that_hangs_meets_the_deadline(tmp_path: Path) -> None:
    children = make_children(tmp_path)[:1]
    supervisor = make(children, {"tokenizer": "hang"}, start_seconds=1.0)
    with pytest.raises(ChildError, match="tokenizer was not ready after 1 s"):
        await supervisor.start()
    await supervisor.stop()
    assert not children[0].running


async def test_restarts_on_the_same_port(tmp_path: Path) -> None:
    children = make_children(tmp_path)[:2]
    lines: list[str] = []
    supervisor = make(children, report=lines.append)
    try:
        await supervisor.start()
        before = (children[1].pid, children[1].address)
        psutil.Process(before[0]).send_signal(signal.SIGKILL)
        async with asyncio.timeout(90):
            while children[1].starts < 2 or children[1].state is not ChildState.HEALTHY:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert children[1].pid != before[0] and children[1].address == before[1]
        assert f"prefill-0 (pid {before[0]}) was killed by SIGKILL" in lines[0]
    finally:
        await supervisor.stop()
    assert not children[1].running


@pytest.mark.parametrize("can_be_made", [True, False], ids=["removed", "a file in its place"])
async def test_restarts_where_the_folder_of_logs_is_gone(tmp_path: Path, can_be_made: bool) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    children = make_children(folder)[:1]
    lines: list[str] = []
    supervisor = make(children, report=lines.append)
    try:
        await supervisor.start()
        shutil.rmtree(folder)
        if not can_be_made:
            folder.touch()
        psutil.Process(children[0].pid).kill()
        async with asyncio.timeout(90):
            while not any("again in 0.4 s" in line for line in lines) and not can_be_made:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            if not can_be_made:
                assert "tokenizer cannot be started: " in lines[-1]
                folder.unlink()
            while not lines or "is healthy again" not in lines[-1]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert children[0].running and children[0].log.exists()
    finally:
        await supervisor.stop()


async def test_without_restarts_a_death_is_reported(tmp_path: Path) -> None:
    children = make_children(tmp_path)[:2]
    supervisor = make(children, restart=False)
    try:
        await supervisor.start()
        psutil.Process(children[0].pid).kill()
        async with asyncio.timeout(60):
            error = await supervisor.failed()
        assert "tokenizer" in str(error) and "SIGKILL" in str(error)
        assert children[0].starts == 1
    finally:
        await supervisor.stop()


async def test_stubborn_child_is_killed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("baton.cli.supervisor.STOP_MARGIN_SECONDS", 30.0)
    children = make_children(tmp_path)[:1]
    supervisor = make(children, {"tokenizer": "stubborn"}, drain_seconds=-29.5)  # 0.5 s with it
    await supervisor.start()
    started = time.monotonic()
    await supervisor.stop()
    assert not children[0].running and time.monotonic() - started < 15.0


async def test_cancelled_stop_kills_at_once(tmp_path: Path) -> None:
    children = make_children(tmp_path)[:2]
    supervisor = make(children, {"tokenizer": "stubborn", "prefill-0": "stubborn"}, drain_seconds=30.0)
    await supervisor.start()
    stopping = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0.2)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(20):
            await stopping
    assert not any(child.running for child in children)


def test_two_deployments_choose_different_ports_before_any_process_binds_them(monkeypatch):
    # No other test takes ports from here.
    monkeypatch.setattr("baton.cli.deployment.PORTS", range(9_600, 9_608))
    with contextlib.ExitStack() as claims:
        first = free_ports("127.0.0.1", 3, claims)
        assert not set(first) & set(free_ports("127.0.0.1", 3))
        with pytest.raises(OSError, match="no 6 free ports"):
            free_ports("127.0.0.1", 6)
    assert len(free_ports("127.0.0.1", 8)) == 8


@pytest.mark.parametrize("behave", ["good", "stubborn"])
def test_killed_supervisor_leaves_no_process(tmp_path: Path, behave: str) -> None:
    script = f"""
        import asyncio, sys
        from pathlib import Path
        from baton.cli.deployment import free_ports
        from baton.cli.supervisor import Child
        from baton.cli.supervisor import Supervisor

        async def main():
            names = ["tokenizer", "prefill", "decode", "gateway"]
            folder = Path({str(tmp_path)!r})
            ports = free_ports("127.0.0.1", len(names))
            children = [
                Child(name, name, folder=folder, host="127.0.0.1", port=port)
                for name, port in zip(names, ports, strict=True)
            ]
            supervisor = Supervisor(children, lambda child: ["--behave", {behave!r}], program={PROGRAM!r})
            await supervisor.start()
            print(*(child.pid for child in children), flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    supervisor = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None
    pids = [int(word) for word in supervisor.stdout.readline().split()]
    assert len(pids) == 4 and all(psutil.pid_exists(pid) for pid in pids)
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    assert gone(pids, 30.0)


async def test_children_come_and_go_while_others_run(tmp_path: Path) -> None:
    """The list of the deployment is the supervisor's. One that is removed is not started again."""
    children = make_children(tmp_path)
    (port,) = free_ports("127.0.0.1", 1)
    one_more = Child("decode-1", "decode", folder=tmp_path, host="127.0.0.1", port=port)
    supervisor = make(children)
    try:
        await supervisor.start()
        await supervisor.add(one_more)
        assert one_more.state is ChildState.HEALTHY and one_more in children
        pids = [child.pid for child in children]
        one_more.kill()
        while one_more.starts < 2 or one_more.state is not ChildState.HEALTHY:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await supervisor.remove(one_more)
        assert gone([pids[-1], one_more.pid], 20.0) and not gone(pids[:-1], 0.1)
        assert one_more.state is ChildState.STOPPED and one_more not in children
        again = Child("decode-1", "decode", folder=tmp_path, host="127.0.0.1", port=port)
        broken = make(children, {"decode-1": "crash"})
        with pytest.raises(ChildError, match="decode-1"):
            await broken.add(again)
        assert again not in children and not again.running
    finally:
        await supervisor.stop()
    assert gone(pids, 20.0)


def test_backoff_doubles_and_keeps_the_limit_per_minute() -> None:
    backoff, now, times = Backoff(), 0.0, []
    for _ in range(20):
        now += backoff.next(now) + 0.5
        times.append(now)
    assert times[1] - times[0] < times[2] - times[1]
    for first, last in zip(times, times[RESTARTS_PER_MINUTE:], strict=False):
        assert last - first >= 60.0 - 1e-6


KEEPS = """
import os, signal, time
from baton.transport.shm import Segment
signal.signal(signal.SIGTERM, signal.SIG_IGN)
segment = Segment.create(1, 4096, os.getpid())
print("ready role", flush=True)
time.sleep(60)
"""


async def test_killed_children_leave_no_shared_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("baton.cli.supervisor.STOP_MARGIN_SECONDS", 0.5)
    plan = DeploymentPlan(program=(sys.executable, "-c", KEEPS), log_folder=tmp_path, drain_seconds=0.0)
    async with Deployment(plan, Console(file=io.StringIO())) as deployment:
        left = [Path("/dev/shm", f"baton-{os.geteuid()}-{child.pid:016x}") for child in deployment.children]
        assert len(left) == 4 and all(map(os.path.exists, left))
    assert not any(map(os.path.exists, left))
