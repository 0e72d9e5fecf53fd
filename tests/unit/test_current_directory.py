"""No process executes Python files of the current directory: in /tmp anybody may have put them there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.supervisor import SERVE
from baton.cli.up import check_workers
from baton.config import DecodeConfig
from baton.worker.engine import build_engine

SCRIPT = str(Path(sys.executable).with_name("baton"))
NAMES = ("torch", "click", "numpy", "json", "multiprocessing", "pickle", "socket")


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: modules there end the process that imports them."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(
            f"raise SystemExit('{name}.py of the current directory was executed')"
        )
    (tmp_path / "baton").mkdir()
    (tmp_path / "baton" / "__init__.py").write_text("raise SystemExit('the folder baton was executed')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        [*SERVE, "tokenizer", "--help"],
        pytest.param([SCRIPT, "sim", "--seeds", "0-1"], marks=pytest.mark.thorough),
        pytest.param(
            [SCRIPT, "bench", "kv", "--device", "cpu", "--tokens", "16", "--repeats", "1"],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["serve", "sim", "bench kv"],
)
def test_of_commands(trapped: Path, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "executed" not in done.stderr, done.stderr


@pytest.mark.thorough
def test_of_the_check_of_workers(trapped: Path) -> None:
    check_workers({"decode": {"tp": 2}}, prefill=0)


@pytest.mark.thorough
def test_of_followers(trapped: Path) -> None:
    build_engine(DecodeConfig(model="demo", tp=2, kv_tokens=1024), 0x7A9D52).close()


def test_of_the_module_baton(trapped: Path) -> None:
    """Python itself finds a package `baton` in the current directory first; nothing else there."""
    (trapped / "baton" / "__init__.py").unlink()
    (trapped / "baton").rmdir()
    done = subprocess.run(
        [sys.executable, "-m", "baton", "--version"], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("baton 0.")
