"""Commands in odd surroundings: they work, or end in one line that says what is wrong."""

from __future__ import annotations

import os
import resource
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.demo import model_path
from baton.model_path import CheckpointError, resolve
from baton.tokenizer.hf_tokenizer import load
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


def test_a_variable_that_sets_nothing_is_said_with_the_nearest(tmp_path: Path) -> None:
    strange = {"BATON_KVTOKENS": "9", "BATON_WORLD": "1", "BATON_GATEWAY_SERVICE_HOST": "10.0.0.1"}
    strange |= {"BATON_KV_TOKENS": "9", "BATON_API_KEY": "x"}
    code, output = run([*BATON, "--version"], HOME=str(tmp_path), **strange)
    assert code == 0 and output.splitlines()[:-1] == [
        "baton: BATON_KVTOKENS is no variable of Baton's; did you mean BATON_KV_TOKENS?",
        "baton: BATON_WORLD is no variable of Baton's",
    ]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("upp", "No such command 'upp'. Did you mean 'up'?"),
        ("bench ofline", "No such command 'ofline'. Did you mean 'offline'?"),
        ("up --model smolm2 --port 0", "did you mean 'smollm2'?"),
    ],
)
def test_what_is_misspelt_is_answered_with_the_nearest(command: str, text: str, tmp_path: Path) -> None:
    code, output = run([*BATON, *command.split()], HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert code == 2 and len(output.splitlines()) == 1 and text in output, output


@pytest.mark.parametrize(
    ("content", "text"),
    [("{}", "names no model_type"), ("[]", "names no model_type"), ("{", "cannot be read")],
)
def test_a_config_that_names_no_model_is_refused_at_once(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=text):
        resolve(str(tmp_path))


def test_a_tokenizer_without_anything_is_one_line(tmp_path: Path) -> None:
    shutil.copytree(model_path(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"cannot read the tokenizer in .*: 'added_tokens' is missing"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["agent.py", "openai_client.py"])
def test_an_example_without_its_client_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(SystemExit, match="pip install openai"):
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / name), run_name="__main__")
