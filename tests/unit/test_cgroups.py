"""Limits of control groups: of files as versions 2 and 1 write them, and of a real group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton import cgroups
from baton.cli.supervisor import Child
from baton.config import DecodeConfig
from baton.rpc.errors import BatonError
from baton.worker.memory import check_pool, free_and_total
from baton.worker.model import sized

GIB = 2**30
UNLIMITED = 9223372036854771712
"""As version 1 writes it."""


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")
    return folder


@pytest.fixture
def second(tmp_path: Path) -> tuple[Path, Path]:
    """Version 2: a group within another, of which each has the tighter limit of one kind."""
    root = tmp_path / "cgroup"
    write(root)
    outer = write(root / "pod", memory__max=4 * GIB, memory__current=3 * GIB, cpu__max="max 100000")
    (outer / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\n")
    inner = write(outer / "app", memory__max=8 * GIB, memory__current=GIB, cpu__max="150000 100000")
    (inner / "memory.events").write_text("low 0\noom 2\noom_kill 2\noom_group_kill 0\n")
    write(tmp_path, own="0::/pod/app")
    return root, tmp_path / "own"


@pytest.fixture
def first(tmp_path: Path) -> tuple[Path, Path]:
    """Version 1, in a container that shows its host's path."""
    root = tmp_path / "cgroup"
    memory = write(root / "memory", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    (memory / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {GIB // 4}\n")
    (memory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    write(root / "cpu,cpuacct", cpu__cfs_quota_us=100_000, cpu__cfs_period_us=100_000)
    write(tmp_path, own="5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc")
    return root, tmp_path / "own"


def test_of_version_2_the_tightest_limit_of_nested_groups_counts(second: tuple[Path, Path]) -> None:
    assert cgroups.memory(*second) == (GIB + GIB // 2, 4 * GIB)
    assert cgroups.cores(*second) == min(2, len(os.sched_getaffinity(0)))
    assert cgroups.oom_kills(*second) == 2


def test_of_version_1_in_a_container(first: tuple[Path, Path]) -> None:
    assert cgroups.memory(*first) == (GIB + GIB // 4, 2 * GIB)
    assert cgroups.cores(*first) == 1
    assert cgroups.oom_kills(*first) == 1


def test_without_limits(tmp_path: Path) -> None:
    write(tmp_path / "memory", memory__limit_in_bytes=UNLIMITED, memory__usage_in_bytes=GIB)
    write(tmp_path / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    own = write(tmp_path, own="2:memory:/\n1:cpu:/") / "own"
    for root in (tmp_path, tmp_path / "nothing"):
        assert cgroups.memory(root, own) is None and cgroups.oom_kills(root, own) == 0
        assert cgroups.cores(root, own) == len(os.sched_getaffinity(0))


def test_memory_of_the_host_is_what_its_group_leaves(
    second: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = cgroups.memory(*second)
    monkeypatch.setattr(cgroups, "memory", lambda: limits)
    assert free_and_total(torch.device("cpu")) == limits
    check_pool(GIB)
    with pytest.raises(BatonError, match=r"takes 2.00 GiB; 1.50 of the 4.00 GiB .* lower --kv-tokens"):
        check_pool(2 * GIB)


def test_a_worker_has_as_many_threads_as_its_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(cgroups, "cores", lambda: 2)
    cpu = torch.device("cpu")
    assert sized(DecodeConfig(), cpu).threads == 2 and sized(DecodeConfig(tp=2), cpu).threads == 1
    assert sized(DecodeConfig(threads=3), cpu).threads == 3
    monkeypatch.setattr(cgroups, "cores", lambda: 64)
    assert sized(DecodeConfig(), cpu).threads == 0  # torch's own


async def test_a_worker_that_was_killed_for_memory_is_named_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child("decode-0", "decode", folder=tmp_path, host="127.0.0.1", port=1)
    script = "import os; print('ready now', flush=True); os.kill(os.getpid(), 9)"
    await child.start([sys.executable, "-c", script], 60.0)
    code = await child.ended()
    assert str(child.died(code)).endswith("was killed by SIGKILL")
    monkeypatch.setattr(cgroups, "oom_kills", lambda: 2**20)
    monkeypatch.setattr(cgroups, "memory", lambda: (0, 2 * GIB))
    text = "was killed by SIGKILL: memory ran out (all processes here may take 2.00 GiB; lower --kv-tokens, "
    assert text in str(child.died(code))
    assert "memory" not in str(child.died(1))


LIMITED = """
import os, subprocess, sys
for folder in sys.argv[1:]:
    open(os.path.join(folder, "cgroup.procs"), "w").write(str(os.getpid()))
from baton import cgroups
assert cgroups.memory()[1] == 64 * 2**20, cgroups.memory()
assert cgroups.cores() == 1
before = cgroups.oom_kills()
code = subprocess.call([sys.executable, "-c", "x = bytearray(2**28)"])
assert (code, cgroups.oom_kills() - before) == (-9, 1), (code, cgroups.oom_kills(), before)
"""


@pytest.fixture
def real() -> Iterator[list[Path]]:
    """Folders of new groups with 64 MiB and one core; made where this machine permits it."""
    name, limit = f"baton-test-{os.getpid()}", str(64 * 2**20)
    if (cgroups.ROOT / "cgroup.controllers").exists():
        rows = [(cgroups.ROOT / name, {"memory.max": limit, "cpu.max": "100000 100000"})]
    else:
        quota = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}
        rows = [
            (cgroups.ROOT / "memory" / name, {"memory.limit_in_bytes": limit}),
            (cgroups.ROOT / "cpu" / name, quota),
        ]
    made: list[Path] = []
    try:
        try:
            for folder, files in rows:
                folder.mkdir()
                made.append(folder)
                for file, content in files.items():
                    (folder / file).write_text(content)
        except OSError as error:
            pytest.skip(f"no group can be made: {error}")
        yield made
    finally:
        for folder in made:
            folder.rmdir()


def test_of_a_real_group(real: list[Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, real)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
