"""`baton bench kv`: as a command with a real second process; what it refuses, within this process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from click.testing import CliRunner

from baton.bench.kv_transfer import fitting
from baton.cli.bench_kv import kv
from baton.kvcache.kv_pool import PoolLayout
from baton.layers.cache_spec import Full

KV = (sys.executable, "-c", "from baton.cli.bench_kv import kv; kv()")


def mapped(process: psutil.Process) -> set[Path]:
    """Baton's shared memory that a process and its children have mapped."""
    found = set()
    for each in (process, *process.children(recursive=True)):
        try:
            found |= set(re.findall(r"/dev/shm/baton-\S+", Path(f"/proc/{each.pid}/maps").read_text()))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return {Path(path) for path in found}


@pytest.mark.thorough
def test_rates_on_the_cpu(tmp_path):
    file, output, segments = tmp_path / "kv.json", tmp_path / "output", set()
    sizes = ("--tokens", "16,100", "--repeats", "2", "--page-size", "16")
    flags = ("--device", "cpu", *sizes, "--decode-load", "--json", str(file))
    with output.open("w") as printed:
        process = subprocess.Popen([*KV, *flags], stdout=printed, stderr=printed)
    try:
        while process.poll() is None:
            segments |= mapped(psutil.Process(process.pid))
            time.sleep(0.05)
    finally:
        process.kill()
    stdout = output.read_text()
    assert process.returncode == 0, stdout
    figures = json.loads(file.read_text())
    rates = {(rate["method"], rate["tokens"]): rate for rate in figures["rates"]}
    methods = ["shm, adjacent", "shm", "grpc"]
    assert set(rates) == {(method, tokens) for method in methods for tokens in (16, 100)}
    for (_, tokens), rate in rates.items():
        assert rate["pages"] == -(-tokens // 16) and rate["bytes"] == rate["pages"] * figures["page_bytes"]
        assert 0 < rate["fastest_seconds"] <= rate["seconds"] <= rate["slowest_seconds"]
        assert rate["gigabytes_per_second"] == pytest.approx(rate["bytes"] / rate["seconds"] / 1e9)
    assert [one["method"] for one in figures["decode_load"]] == methods
    assert "of adjacent" in stdout and "times slower" in stdout
    assert segments and not [path for path in segments if path.exists()]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--model", "./none"), 2, "no such directory"),
        (("--tokens", "1,x"), 2, "give whole numbers of 1 or more"),
        (("--tokens", "9999999999"), 2, "no prompt length fits"),
        (("--ranks", "2"), 2, "the owner's and the receiver's number of ranks"),
        (("--ranks", "1:0"), 2, "the owner's and the receiver's number of ranks"),
        (("--device", "cpu", "--ranks", "1:2"), 2, "pools of several ranks are those of GPUs"),
        pytest.param(
            ("--device", "cuda"),
            2,
            "sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_measured(arguments, code, text):
    result = CliRunner().invoke(kv, arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code and text in result.stderr, result.stderr


def test_lengths_fit_if_both_pools_do(monkeypatch):
    layout = PoolLayout.of([Full()], 16, torch.float32)
    usage = SimpleNamespace(free=4 * 100 * layout.page_bytes)  # each pool has twice a prompt's pages and one
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert fitting((16 * 99, 16 * 100), layout, torch.device("cpu")) == (16 * 99,)
