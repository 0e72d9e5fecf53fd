from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from baton.transport import shm as segment_module
from baton.transport.shm import ALIGNMENT, Header, Segment, SegmentError, reap_orphans


@pytest.fixture
def directory() -> Iterator[Path]:
    """On the real file system, without meeting segments of others."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-baton-") as name:
        yield Path(name)


def test_layout_of_the_file(directory: Path) -> None:
    segment = Segment.create(600, 1000, 0xABC, directory)
    assert segment.path.name == f"baton-{os.geteuid()}-0000000000000abc"
    assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600
    header = Header.unpack(segment.path.read_bytes())
    assert header == segment.header
    assert (header.num_pages, header.page_bytes) == (600, 1000)
    assert header.generations_offset == ALIGNMENT
    assert header.pages_offset == 3 * ALIGNMENT  # 4800 bytes of generations take two
    assert (len(segment.generations), segment.generations.format) == (600, "Q")
    assert segment.pages.nbytes == 600_000
    assert not any(segment.pages)
    segment.generations[599] = 2**64 - 1
    segment.pages[-1] = 77
    data = segment.path.read_bytes()
    assert data[ALIGNMENT + 599 * 8 : ALIGNMENT + 600 * 8] == b"\xff" * 8
    assert (len(data), data[-1]) == (header.size, 77)
    # Reserved, not merely long.
    assert segment.path.stat().st_blocks * 512 >= header.size
    segment.close()
    assert list(directory.iterdir()) == []


def test_tokens_differ(directory: Path) -> None:
    first, second = Segment.create(1, 1, 1, directory), Segment.create(1, 1, 2, directory)
    assert first.header.token != second.header.token
    first.close()
    second.close()


def test_close_is_idempotent_and_survives_views(directory: Path) -> None:
    segment = Segment.create(4, 4096, 1, directory)
    array = np.frombuffer(segment.pages, np.uint8)
    segment.close()
    segment.close()
    assert list(directory.iterdir()) == []
    array[:] = 3  # still mapped: a crash here would be a segmentation fault
    assert int(array.sum()) == 3 * 4 * 4096


def test_a_step_that_retires_after_the_close_is_told_to_nobody(directory: Path) -> None:
    """A step thread that was given up may still end one."""
    segment = Segment.create(4, 0, 1, directory)
    segment.retire(3)
    segment.close()
    segment.retire(4)


def test_no_space_names_the_space_and_the_flag(directory: Path) -> None:
    space = os.statvfs(directory)
    pages = space.f_blocks * space.f_frsize // 2**20 + 1024
    with pytest.raises(
        SegmentError, match=r"needs \d+\.\d+ GiB in /dev/shm/.* GiB are free: lower --kv-tokens"
    ):
        Segment.create(pages, 2**20, 1, directory)
    assert list(directory.iterdir()) == []
    for absurd in (2**50, 2**62):
        with pytest.raises(SegmentError, match="lower --kv-tokens"):
            Segment.create(absurd, 2**20, 1, directory)
    assert list(directory.iterdir()) == []


def test_an_incarnation_is_used_once(directory: Path) -> None:
    segment = Segment.create(1, 1, 1, directory)
    with pytest.raises(SegmentError, match=os.strerror(errno.EEXIST)):
        Segment.create(1, 1, 1, directory)
    assert segment.path.exists()
    segment.close()
    with pytest.raises(SegmentError, match="cannot create"):
        Segment.create(1, 1, 1, directory / "missing")
    with pytest.raises(ValueError, match="0 pages"):
        Segment.create(0, 1, 1, directory)


OWNER = """
import sys, pathlib, time
from baton.transport.shm import Segment
segment = Segment.create(4, 4096, int(sys.argv[2]), pathlib.Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""


def start_owner(directory: Path, incarnation: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory), str(incarnation)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_reaps_the_killed_owners_segment_and_no_other(directory: Path) -> None:
    own = Segment.create(1, 1, 3, directory)
    others = [directory / "baton-4242-0000000000000001", directory / "notes"]
    for path in others:
        path.write_bytes(b"x")
    (directory / f"baton-{os.geteuid()}-link").symlink_to(others[1])
    (directory / f"baton-{os.geteuid()}-folder").mkdir()
    owners = [start_owner(directory, incarnation) for incarnation in (1, 2)]
    try:
        assert reap_orphans(directory) == []
        owners[0].kill()
        owners[0].wait()
        assert reap_orphans(directory) == [directory / f"baton-{os.geteuid()}-{1:016x}"]
        assert reap_orphans(directory) == []
        left = {path.name for path in directory.iterdir()}
        prefix = f"baton-{os.geteuid()}-"
        assert left == {
            *(path.name for path in others),
            prefix + "link",
            prefix + "folder",
            prefix + f"{2:016x}",
            own.path.name,
        }
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
            assert owner.stdout is not None
            owner.stdout.close()
        own.close()
    assert reap_orphans(directory) == [directory / f"baton-{os.geteuid()}-{2:016x}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_does_not_reap_another_users_file(directory: Path) -> None:
    path = directory / f"baton-{os.geteuid()}-{9:016x}"
    path.write_bytes(b"x")
    os.chown(path, 12345, 12345)
    assert reap_orphans(directory) == []
    assert path.exists()


def test_a_reaper_between_creation_and_lock_does_no_harm(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race, made to happen: the first lock of a fresh file comes after a reaper took it."""
    real = segment_module._lock
    calls = []

    def lock(descriptor: int) -> bool:
        calls.append(descriptor)
        if len(calls) == 1:
            assert len(reap_orphans(directory)) == 1
        return real(descriptor)

    monkeypatch.setattr(segment_module, "_lock", lock)
    segment = Segment.create(1, 1, 1, directory)
    assert segment.path.exists()
    assert segment.path.stat().st_ino == os.fstat(segment._descriptor).st_ino
    assert reap_orphans(directory) == []
    segment.close()


def test_create_and_reap_at_once(directory: Path) -> None:
    stop = threading.Event()

    def reap() -> None:
        while not stop.is_set():
            reap_orphans(directory)

    reapers = [threading.Thread(target=reap) for _ in range(3)]
    for reaper in reapers:
        reaper.start()
    try:
        for _ in range(300):
            segment = Segment.create(1, 1, 7, directory)  # one name: the hardest case
            assert segment.path.stat().st_ino == os.fstat(segment._descriptor).st_ino
            segment.close()
            assert not segment.path.exists()
    finally:
        stop.set()
        for reaper in reapers:
            reaper.join()


def test_a_lock_that_is_never_given_up_is_an_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "_lock", lambda descriptor: False)
    monkeypatch.setattr(segment_module, "LOCK_SECONDS", 0.05)
    with pytest.raises(SegmentError, match="another process holds its lock"):
        Segment.create(1, 1, 1, directory)


def test_header_is_checked() -> None:
    good = Header.plan(3, 5).pack()
    assert Header.unpack(good).num_pages == 3
    for bad in (b"", good[:-1], b"X" + good[1:], good[:8] + b"\x09" + good[9:]):
        with pytest.raises(SegmentError):
            Header.unpack(bad)


def test_no_resource_tracker_is_involved(directory: Path) -> None:
    """A child that ends must not remove a segment, which multiprocessing.shared_memory would do."""
    segment = Segment.create(1, 8, 1, directory)
    child = multiprocessing.get_context("spawn").Process(target=reap_orphans, args=(directory,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert segment.path.exists()
    segment.close()


def test_the_owner_has_its_full_size_from_the_start(directory: Path) -> None:
    before = psutil.Process().memory_info().rss
    segment = Segment.create(64, 2**20, 2, directory)
    assert psutil.Process().memory_info().rss - before > 60 * 2**20
    segment.close()
