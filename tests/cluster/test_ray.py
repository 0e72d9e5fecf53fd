"""`baton up --ray` on three raylets of this machine: streams go on while workers and hosts come and go.

Skipped without the environment that Ray lives in: make .venv/ray
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from polling import wait

from baton.client import BatonError, Client
from ports import free_port

PYTHON = Path(__file__).parents[2] / ".venv" / "ray" / "bin" / "python"
HOSTS = Path(__file__).with_name("ray_hosts.py")
BATON = (str(PYTHON), "-P", "-m", "baton.cli.main")
WHOLE_SECONDS = 60.0
START_SECONDS = 240.0
END_SECONDS = 150.0
"""Without the head requests are served for a minute, and then the deployment ends."""
OUTPUT = 200
LONG = " ".join(f"word{number}" for number in range(40))
"""More tokens than a decode node prefills itself."""
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.alone,  # processes must be there again within a minute
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="no Ray: make .venv/ray"),
]


def alive(pids: set[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return []


def segments(pids: set[int]) -> set[Path]:
    """Shared memory of Baton's that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(path) for path in re.findall(r"/dev/shm/baton-\S+", maps)}
    return found


def own(process: psutil.Process) -> bool:
    """Whether it is Ray's, with no actor in it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        command = " ".join(process.cmdline())
        return "ray" in command and "Actor" not in command and "serve" not in command.split()
    return False


class Hosts:
    """The raylets, of which the first is the head's and that of `baton up`."""

    def __init__(self, *cpus: int) -> None:
        self.folder = tempfile.TemporaryDirectory(
            prefix="ray-", dir="/tmp"
        )  # Ray's sockets need a short path
        self.environment = {**os.environ, "RAY_TMPDIR": self.folder.name, "RAY_USAGE_STATS_ENABLED": "0"}
        self.process = subprocess.Popen(
            [str(PYTHON), str(HOSTS), *map(str, cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self.environment,
        )
        assert self.process.stdout is not None
        found = json.loads(self.process.stdout.readline())
        self.address, self.raylets, self.store = found["address"], found["raylets"], found["store"]

    def actors(self, role: str, raylet: int) -> list[psutil.Process]:
        title = f"ray::{role.title()}Actor"
        return [each for each in family(raylet) if "".join(each.cmdline()[:1]).startswith(title)]

    def close(self) -> None:
        self.process.communicate(timeout=60)
        self.folder.cleanup()


class Up:
    """A running `baton up --ray`."""

    def __init__(self, hosts: Hosts, folder: Path, *flags: str) -> None:
        self.printed, self.port = folder / "up.log", free_port()
        self.server = f"127.0.0.1:{self.port}"
        flags = ("--port", str(self.port), "--http-port", "none", "--kv-tokens", "8192", *flags)
        command = [*BATON, "up", "--ray", hosts.address, "--log-dir", str(folder / "logs"), *flags]
        self.environment = {**hosts.environment, "COLUMNS": "200"}
        with self.printed.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=self.environment)
        wait(lambda: "Ctrl-C stops" in self.said or self.process.poll() is not None, "up", START_SECONDS)
        assert self.process.poll() is None, self.said
        rows = re.findall(r"^(\S+) +(\d+) +(\d\S+:\d+)", self.said, re.MULTILINE)
        self.rows = {name: (int(pid), address) for name, pid, address in rows}

    @property
    def said(self) -> str:
        return self.printed.read_text()

    def baton(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*BATON, *arguments, "--server", self.server]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=240)

    def whole(self, lost: int) -> bool:
        """All of `lost` processes, in all, are there again."""
        return self.said.count("was lost with its actor") == self.said.count("healthy again") == lost


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    found = Hosts(2, 4, 4)
    try:
        yield found
    finally:
        found.close()


def stream(client: Client, number: int) -> list[int]:
    deltas = client.stream(f"{number} {LONG}", max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    return [token for delta in deltas for token in delta.token_ids]


@contextlib.contextmanager
def load(client: Client) -> Iterator[list[int]]:
    """Three streams run at any time. Each must end with the tokens that it has on a calm machine."""
    expected = [stream(client, number) for number in range(3)]
    assert all(len(tokens) == OUTPUT for tokens in expected)
    done, wrong, stopping = [], [], threading.Event()

    def run(number: int) -> None:
        while not stopping.is_set():
            try:
                tokens = stream(client, number)
            except BatonError as error:
                wrong.append(f"{number}: {error}")
            else:
                done.append(number)
                if tokens != expected[number]:
                    wrong.append(f"{number}: other tokens")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield done
    finally:
        stopping.set()
        for thread in threads:
            thread.join(120)
    assert not wrong and len(done) >= 3, wrong


def test_streams_go_on_while_workers_actors_and_hosts_come_and_go(hosts, tmp_path):
    up = Up(hosts, tmp_path, "--prefill", "1", "--decode", "3")
    seen = {each.pid for raylet in hosts.raylets for each in family(raylet)}
    mapped = segments(seen)
    assert len(mapped) >= 4
    try:
        assert list(up.rows) == ["tokenizer", "prefill-0", "decode-0", "decode-1", "decode-2", "gateway"]
        spread = [len(hosts.actors("decode", raylet)) for raylet in hosts.raylets]
        assert sum(spread) == 3 and max(spread) <= 2, "workers are spread over the hosts"
        with Client(up.server) as client, load(client) as done:
            used = client.generate(f"9 {LONG}", max_tokens=4, hand_off=True)
            assert used.stats is not None and used.stats.prefill_address == up.rows["prefill-0"][1]
            status = up.baton("status", "--json")
            assert status.returncode == 0, status.stdout + status.stderr
            pids = {int(report["info"]["pid"]) for report in json.loads(status.stdout)}
            assert pids == {pid for pid, _ in up.rows.values()}
            # Workers come and go.
            for count, listed in (("1", 1), ("3", 3)):
                scaled = up.baton("scale", f"decode={count}")
                assert scaled.returncode == 0, scaled.stderr
                assert len((tmp_path / "logs" / "decode.nodes").read_text().split()) == listed
            too_many = up.baton("scale", "decode=40")
            assert too_many.returncode == 1 and re.search(
                r"37 workers need 37 CPUs, .* has \d+ CPUs free", too_many.stderr
            )
            # An actor dies, and so does its process.
            actor = next(each for raylet in hosts.raylets for each in hosts.actors("decode", raylet))
            child = {each.pid for each in actor.children(recursive=True)}
            assert child
            actor.kill()
            began = time.monotonic()
            wait(lambda: up.whole(1), "a decode node instead", WHOLE_SECONDS)
            times = [time.monotonic() - began]
            wait(lambda: not alive(child), "the end of the actor's process", 30)
            # A host dies with all that is on it; not that of the gateway.
            last = hosts.raylets[2]
            lost = sum(len(hosts.actors(role, last)) for role in ("prefill", "decode"))
            assert lost
            count = len(done)
            seen |= {each.pid for each in family(last)}
            for each in family(last):
                each.kill()
            began = time.monotonic()
            wait(lambda: up.whole(1 + lost), "all workers on other hosts", WHOLE_SECONDS)
            times.append(time.monotonic() - began)
            wait(lambda: len(done) > count + 3, "streams since then")
            seen |= {each.pid for raylet in hosts.raylets[:2] for each in family(raylet)}
            mapped |= segments(seen)
        print(f"whole again: actor {times[0]:.0f} s, host {times[1]:.0f} s; {len(done)} streams")
    finally:
        up.process.send_signal(signal.SIGTERM)
        code = up.process.wait(90)
    assert code == 0, up.said
    agents = {each.pid for raylet in hosts.raylets[:2] for each in family(raylet) if own(each)}
    wait(lambda: not alive(seen - agents), "the end of all its processes", 30)
    assert not [path for path in mapped if path.exists()]
    assert not list((tmp_path / "logs").glob("*.nodes"))


def test_the_ranks_of_a_worker_share_a_host(hosts, tmp_path):
    up = Up(hosts, tmp_path, "--prefill", "1", "--decode", "2", "--tp", "2")
    try:
        with Client(up.server) as client, load(client):
            families = [{each.pid for each in family(raylet)} for raylet in hosts.raylets]
            reports = json.loads(up.baton("status", "--json").stdout)
            ranks = [
                {int(rank["pid"]) for rank in report["info"]["ranks"]}
                for report in reports
                if report["role"] in ("prefill", "decode")
            ]
            assert [len(each) for each in ranks] == [2, 2, 2]
            assert all(any(each <= host for host in families) for each in ranks)
            actor = next(each for raylet in hosts.raylets for each in hosts.actors("decode", raylet))
            child = {each.pid for each in actor.children(recursive=True)}
            assert len(child) >= 2
            actor.kill()
            wait(lambda: up.whole(1), "a decode node instead", WHOLE_SECONDS)
            wait(lambda: not alive(child), "the end of all its ranks", 30)
    finally:
        up.process.send_signal(signal.SIGTERM)
        code = up.process.wait(90)
    assert code == 0, up.said


def test_without_the_head_requests_are_served_until_ray_ends_its_hosts(tmp_path):
    """Its store is the part that the other hosts need."""
    hosts = Hosts(2, 4)
    try:
        up = Up(hosts, tmp_path, "--prefill", "1", "--decode", "2")
        seen = {each.pid for raylet in hosts.raylets for each in family(raylet)}
        mapped = segments(seen)
        try:
            with Client(up.server) as client:
                expected = stream(client, 0)
                psutil.Process(hosts.store).kill()
                began = time.monotonic()
                assert [stream(client, 0) for _ in range(2)] == [expected] * 2
                assert up.process.poll() is None, up.said
            wait(lambda: up.process.poll() is not None, "the end of the deployment", END_SECONDS)
            print(f"the deployment has ended {time.monotonic() - began:.0f} s after the head")
        finally:
            up.process.kill()
            up.process.wait()
        wait(lambda: not alive(seen), "the end of all its processes", 90)
        assert not [path for path in mapped if path.exists()]
    finally:
        hosts.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", "no Ray cluster at 127.0.0.1:1: .*refused; start one with 'ray start'"),
        ("ray://127.0.0.1:10001", "--ray: run this on a host of the cluster"),
    ],
)
def test_without_a_cluster_nothing_starts(address, expected):
    command = [*BATON, "up", "--ray", address, "--port", "0", "--http-port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and re.match(rf"baton: {expected}[^\n]*\n$", result.stderr), result.stderr
