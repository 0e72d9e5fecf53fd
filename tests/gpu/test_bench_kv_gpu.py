"""`baton bench kv` between two processes on GPUs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

KV = (sys.executable, "-c", "from baton.cli.bench_kv import kv; kv()")


def test_rates(tmp_path):
    file = tmp_path / "kv.json"
    sizes = ("--device", "cuda", "--tokens", "64,2048", "--repeats", "3", "--quotas", "4", "--decode-load")
    result = subprocess.run([*KV, *sizes, "--json", str(file)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    figures = json.loads(file.read_text())
    forced = [f"cuda_ipc, {way}, random pages" for way in ("copy engine", "kernel, quota 4")]
    methods = ["cuda_ipc, adjacent", "cuda_ipc", *forced, "grpc"]
    assert [one["method"] for one in figures["decode_load"]] == methods
    assert [rate["method"] for rate in figures["rates"]] == [method for method in methods for _ in range(2)]
    assert all(rate["gigabytes_per_second"] > 0 for rate in figures["rates"])


@pytest.mark.parametrize("ranks", ["1:2", "2:1", "2:2"])
def test_rates_of_several_ranks(tmp_path, ranks):
    file = tmp_path / "kv.json"
    sizes = ("--device", "cuda", "--ranks", ranks, "--tokens", "2048", "--repeats", "2", "--json", str(file))
    result = subprocess.run([*KV, *sizes], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    figures = json.loads(file.read_text())
    assert figures["ranks"] == ranks.replace(":", " to ")
    random_pages = "cuda_ipc, copy engine, random pages"
    methods = ["cuda_ipc, adjacent", "cuda_ipc", random_pages, "grpc"]
    assert [rate["method"] for rate in figures["rates"]] == methods
