"""Commands in odd surroundings: they work, or end in one line that says what is wrong."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.checkpoint import CheckpointError, resolve
from baton.transport.shm import Segment, SegmentError

BATON = [sys.executable, "-P", "-m", "baton.cli.main"]
NOBODY = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]
"""The same user under an id that passwd does not know."""


def run(
    command: list[str], before: Callable[[], object] | None = None, **environment: str
) -> tuple[int, str]:
    """Exit code and all output."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        preexec_fn=before,
        env={**{k: v for k, v in os.environ.items() if k != "HOME"}, **environment},
    )
    return done.returncode, done.stdout


@pytest.mark.skipif(
    subprocess.call([*NOBODY, "true"], stderr=subprocess.DEVNULL) != 0, reason="no user namespaces"
)
def test_a_user_without_passwd_entry_and_home_has_a_temporary_one(tmp_path: Path) -> None:
    code, output = run([*NOBODY, *BATON, "doctor", "--json"], TMPDIR=str(tmp_path))
    assert code == 0 and "cannot be checked" not in output, output
    assert (tmp_path / "baton-home-12345").is_dir()
    (tmp_path / "baton-home-12345").chmod(0o777)
    code, output = run([*NOBODY, *BATON, "doctor"], TMPDIR=str(tmp_path))
    assert code == 2 and len(output.splitlines()) == 1 and "nobody else can enter" in output


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (lambda: (os.chdir("gone"), Path("../gone").rmdir()), "current directory"),
        (lambda: os.umask(0o777), "umask 777"),
        (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)), "ulimit -f"),
    ],
    ids=["deleted directory", "umask", "size of files"],
)
def test_what_no_process_can_work_with_is_one_line(
    before: Callable[[], object], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gone").mkdir()
    code, output = run([*BATON, "sim", "--seeds", "0-0"], before, HOME=str(tmp_path))
    assert code == 2 and len(output.splitlines()) == 1 and text in output, output


def test_a_pool_larger_than_files_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**26, 2**26))
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(27, "File too large"))
    )
    with pytest.raises(SegmentError, match=r"none may have more than 0.06 GiB here: .*ulimit -f"):
        Segment.create(2**15, 4096, os.getpid())


def test_the_home_of_somebody_unknown_is_no_model() -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve("~nobody-of-this-name/model")


def test_a_configuration_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_bytes("\ufeffport = 70000\n".encode())
    code, output = run([*BATON, "serve", "tokenizer", "--config", str(file)], HOME=str(tmp_path))
    assert code == 2 and "cannot read" not in output and "70000" in output, output
