"""Which GPU a worker of a deployment gets, and what its process is started with."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from baton.bench.machine import visible_gpus
from baton.cli.deployment import Deployment, DeploymentPlan, assign_gpus
from baton.cli.up import process_table
from baton.rpc.errors import BatonError

CUDA = {role: {"device": "cuda", "model": "demo"} for role in ("prefill", "decode")}


def test_in_turn():
    def of(names: str, gpus: list[str]) -> dict[str, str]:
        return assign_gpus(dict.fromkeys(names, 1), gpus)

    assert of("pd", ["0", "1"]) == {"p": "0", "d": "1"}
    assert of("pd", ["5"]) == {"p": "5", "d": "5"}
    assert of("abc", ["0", "1"]) == {"a": "0", "b": "1", "c": "0"}
    assert of("p", ["0", "1"]) == {"p": "0"}
    assert of("pd", []) == {}


def test_each_rank_has_a_gpu_of_its_own():
    gpus = [str(number) for number in range(6)]
    assert assign_gpus({"p": 2, "d": 2, "e": 2}, gpus) == {"p": "0,1", "d": "2,3", "e": "4,5"}
    assert assign_gpus({"p": 1, "d": 4}, gpus) == {"p": "0", "d": "1,2,3,4"}
    assert assign_gpus({"p": 2, "d": 2}, []) == {}
    with pytest.raises(BatonError, match=r"7 ranks need a GPU each \(p 1, d 4, e 2\), and 6 can be used"):
        assign_gpus({"p": 1, "d": 4, "e": 2}, gpus)


def test_visible_gpus(monkeypatch):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}) == ["2", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-aa, GPU-bb"}) == ["GPU-aa", "GPU-bb"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,0"}) == ["1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    monkeypatch.setattr("baton.bench.machine.DRIVER", (Path("/nonexistent"),))
    assert visible_gpus({}) == []


def started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, **plan) -> dict[str, tuple]:
    """Child -> its GPU and its share of the memory."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    plan = {"settings": CUDA, "log_folder": tmp_path} | plan
    deployment = Deployment(DeploymentPlan(**plan), Console(file=io.StringIO()))
    found = {}
    for child in deployment.children:
        flags = deployment._arguments(child)
        share = flags[flags.index("--memory-fraction") + 1] if "--memory-fraction" in flags else None
        found[child.name] = (child.environment.get("CUDA_VISIBLE_DEVICES"), share)
    return found


def test_a_deployment_spreads_its_workers(tmp_path, monkeypatch):
    found = started_with(tmp_path, monkeypatch, "6,7")
    none = (None, None)
    assert found == {"tokenizer": none, "prefill-0": ("6", None), "decode-0": ("7", None), "gateway": none}
    found = started_with(tmp_path, monkeypatch, "6,7", prefill=2)
    assert found["prefill-0"] == found["decode-0"] == ("6", "0.45") and found["prefill-1"] == ("7", None)
    given = {role: {**settings, "memory_fraction": 0.2} for role, settings in CUDA.items()}
    found = started_with(tmp_path, monkeypatch, "6", settings=given)
    assert found["prefill-0"] == found["decode-0"] == ("6", "0.2")
    cpu = {role: {"device": "cpu"} for role in CUDA}
    assert set(started_with(tmp_path, monkeypatch, "6", settings=cpu).values()) == {none}
    one = {role: {"device": "cuda:1"} for role in CUDA}
    found = started_with(tmp_path, monkeypatch, "6,7", settings=one)
    assert found["prefill-0"] == found["decode-0"] == (None, "0.45") and found["gateway"] == none
    apart = {"prefill": {"device": "cuda:0"}, "decode": {"device": "cuda:1"}}
    assert set(started_with(tmp_path, monkeypatch, "6,7", settings=apart).values()) == {none}
    ranked = {role: {**settings, "tp": 2} for role, settings in CUDA.items()}
    found = started_with(tmp_path, monkeypatch, "2,3,4,5,6,7", settings=ranked, decode=2)
    assert [found[name] for name in ("prefill-0", "decode-0", "decode-1")] == [
        ("2,3", None),
        ("4,5", None),
        ("6,7", None),
    ]
    with pytest.raises(BatonError, match="6 ranks need a GPU each"):
        started_with(tmp_path, monkeypatch, "2,3,4,5,6", settings=ranked, decode=2)
    mixed = {"prefill": {"device": "cuda:1"}, "decode": {"device": "cuda"}}
    found = started_with(tmp_path, monkeypatch, "6,7", settings=mixed)
    assert found["prefill-0"] == none and found["decode-0"] == ("6", None)


def test_the_table_names_gpus_only_where_there_are_any(tmp_path, monkeypatch):
    for gpus, columns in (("3", ["process", "pid", "gRPC", "HTTP", "GPU"]), ("", 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        deployment = Deployment(
            DeploymentPlan(settings=CUDA, log_folder=tmp_path), Console(file=io.StringIO())
        )
        headers = [str(column.header) for column in process_table(deployment.children).columns]
        assert headers == columns if isinstance(columns, list) else len(headers) == columns


def test_workers_publish_kv_events_at_addresses_of_their_own(tmp_path):
    workers = {
        "kv_events": "tcp://127.0.0.1:5557",
        "kv_events_replay": "ipc:///tmp/replay",
        "device": "cpu",
    }
    plan = DeploymentPlan(
        settings={"prefill": workers, "decode": {**workers, "kv_events_replay": "tcp://127.0.0.1:0"}},
        prefill=2,
        log_folder=tmp_path,
    )
    deployment = Deployment(plan, Console(file=io.StringIO()))
    found = {}
    for child in deployment.children:
        flags = deployment._arguments(child)
        if "--kv-events" in flags:
            found[child.name] = tuple(
                flags[flags.index(f"--{name}") + 1] for name in ("kv-events", "kv-events-replay")
            )
    assert found == {
        "prefill-0": ("tcp://127.0.0.1:5557", "ipc:///tmp/replay-0"),
        "prefill-1": ("tcp://127.0.0.1:5558", "ipc:///tmp/replay-1"),
        "decode-0": ("tcp://127.0.0.1:5559", "tcp://127.0.0.1:0"),
    }
