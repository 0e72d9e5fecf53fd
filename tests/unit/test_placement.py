"""Which GPU a worker of a deployment gets, and what its process is started with."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from baton.bench.machine import visible_gpus
from baton.cli.deployment import Deployment, DeploymentPlan, GpuShare, assign_gpus, value_of, wants_gpu
from baton.cli.up import process_table

CUDA = dict.fromkeys(("prefill", "decode"), ("--device", "cuda", "--model", "demo"))


def test_in_turn():
    assert assign_gpus(["p", "d"], ["0", "1"]) == {"p": GpuShare("0", 1), "d": GpuShare("1", 1)}
    assert assign_gpus(["p", "d"], ["5"]) == {"p": GpuShare("5", 2), "d": GpuShare("5", 2)}
    assert assign_gpus(["a", "b", "c"], ["0", "1"]) == {
        "a": GpuShare("0", 2),
        "b": GpuShare("1", 1),
        "c": GpuShare("0", 2),
    }
    assert assign_gpus(["p"], ["0", "1"]) == {"p": GpuShare("0", 1)}
    assert assign_gpus(["p", "d"], []) == {}


def test_shared_memory_is_divided_unless_it_was_given():
    assert GpuShare("0", 1).flags(given=False) == ()
    assert GpuShare("0", 2).flags(given=False) == ("--memory-fraction", "0.450")
    assert GpuShare("0", 3).flags(given=False) == ("--memory-fraction", "0.300")
    assert GpuShare("0", 2).flags(given=True) == ()


def test_visible_gpus(monkeypatch):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}) == ["2", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-aa, GPU-bb"}) == ["GPU-aa", "GPU-bb"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,0"}) == ["1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    monkeypatch.setattr("baton.bench.machine.DRIVER", (Path("/nonexistent"),))
    assert visible_gpus({}) == []


def test_what_the_flags_and_the_file_say(tmp_path):
    file = tmp_path / "baton.toml"
    file.write_text('device = "cuda"\n[decode]\ndevice = "cpu"\nmemory_fraction = 0.3\n')
    config = ("--config", str(file))
    assert value_of((), "prefill", "device") is None
    assert value_of(("--device", "cpu", "--device", "cuda:1"), "prefill", "device") == "cuda:1"
    assert value_of((*config, "--device", "auto"), "prefill", "device") == "auto"
    assert value_of(config, "prefill", "device") == "cuda"
    assert value_of(config, "decode", "memory_fraction") == "0.3"
    assert value_of(config, "prefill", "memory_fraction") is None
    assert [wants_gpu(config, role) for role in ("prefill", "decode")] == [True, False]
    assert wants_gpu((), "decode") and not wants_gpu(("--device", "cuda:0"), "decode")


def started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, **plan) -> dict[str, tuple]:
    """Child -> its GPU and its share of the memory."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    plan = {"flags": CUDA, "log_folder": tmp_path} | plan
    deployment = Deployment(DeploymentPlan(**plan), Console(file=io.StringIO()))
    found = {}
    for child in deployment.children:
        flags = deployment._arguments(child)
        share = value_of(flags, child.role, "memory_fraction")
        found[child.name] = (child.environment.get("CUDA_VISIBLE_DEVICES"), share)
    return found


def test_a_deployment_spreads_its_workers(tmp_path, monkeypatch):
    found = started_with(tmp_path, monkeypatch, "6,7")
    none = (None, None)
    assert found == {"tokenizer": none, "prefill-0": ("6", None), "decode-0": ("7", None), "gateway": none}
    found = started_with(tmp_path, monkeypatch, "6,7", prefill=2)
    assert found["prefill-0"] == found["decode-0"] == ("6", "0.450") and found["prefill-1"] == ("7", None)
    given = {role: (*flags, "--memory-fraction", "0.2") for role, flags in CUDA.items()}
    found = started_with(tmp_path, monkeypatch, "6", flags=given)
    assert found["prefill-0"] == found["decode-0"] == ("6", "0.2")
    cpu = dict.fromkeys(CUDA, ("--device", "cpu"))
    assert set(started_with(tmp_path, monkeypatch, "6", flags=cpu).values()) == {none}
    mixed = {"prefill": ("--device", "cuda:1"), "decode": ("--device", "cuda")}
    found = started_with(tmp_path, monkeypatch, "6,7", flags=mixed)
    assert found["prefill-0"] == none and found["decode-0"] == ("6", None)


def test_the_table_names_gpus_only_where_there_are_any(tmp_path, monkeypatch):
    for gpus, columns in (("3", ["process", "pid", "gRPC", "HTTP", "GPU"]), ("", 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        deployment = Deployment(DeploymentPlan(flags=CUDA, log_folder=tmp_path), Console(file=io.StringIO()))
        headers = [str(column.header) for column in process_table(deployment.children).columns]
        assert headers == columns if isinstance(columns, list) else len(headers) == columns
