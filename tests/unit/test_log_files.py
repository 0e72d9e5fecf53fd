"""Log folders of deployments, and logs that grow long."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.progress import KEPT_FOLDERS, LogFolder, follow_logs, rotate, rotate_logs
from baton.cli.supervisor import Child
from baton.rpc.errors import BatonError


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "baton" / "logs"


def test_the_folders_of_the_last_deployments_stay_and_those_in_use(state: Path) -> None:
    running = LogFolder()
    for _ in range(KEPT_FOLDERS + 3):
        ended = LogFolder()
        (ended.path / "decode-0.log").write_text("why it ended")
        ended.close()
    assert running.path.is_dir() and ended.path.is_dir()
    assert (state.stat().st_mode | ended.path.stat().st_mode) & 0o077 == 0
    last = LogFolder()
    assert len(list(state.iterdir())) == KEPT_FOLDERS + 2  # and the two that run
    assert (ended.path / "decode-0.log").read_text() == "why it ended"
    running.close()
    last.close()


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = LogFolder()
    assert folder.path.parent.parent == tmp_path and folder.path.is_dir()
    folder.close()


def test_where_no_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(BatonError, match="--log-dir"):
        LogFolder()
    with pytest.raises(BatonError, match="--log-dir"):
        Deployment(DeploymentPlan(log_folder=tmp_path / "file" / "logs"), Console())


def test_a_long_log_is_moved_and_its_process_writes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("baton.cli.progress.MAX_LOG_BYTES", 100)
    log = tmp_path / "decode-0.log"
    with log.open("ab", buffering=0) as process:
        for number in range(40):
            process.write(b"line %02d\n" % number)
            rotate(log)
    old, new = (tmp_path / "decode-0.log.1").read_text(), log.read_text()
    assert len(old) <= 108 and len(new) <= 108
    assert (old + new).endswith("".join(f"line {number:02d}\n" for number in range(26, 40)))


async def test_logs_are_rotated_and_followed_while_a_deployment_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("baton.cli.progress.MAX_LOG_BYTES", 100)
    monkeypatch.setattr("baton.cli.progress.ROTATE_SECONDS", 0.05)
    child = Child("decode-0", "decode", folder=tmp_path, host="127.0.0.1", port=1)
    shown = io.StringIO()
    tasks = [
        asyncio.create_task(rotate_logs([child])),
        asyncio.create_task(follow_logs([child], Console(file=shown))),
    ]
    with child.log.open("ab", buffering=0) as process:
        process.write(b"a" * 200 + b"\n")
        async with asyncio.timeout(30):
            while child.log.stat().st_size:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            process.write(b"after\n")
            while "after" not in shown.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
