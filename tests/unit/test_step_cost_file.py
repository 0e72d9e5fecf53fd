"""--step-cost: what a worker has measured, the next one need not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from baton.config import DecodeConfig
from baton.rpc.errors import BatonError
from baton.step_cost import StepCost
from baton.worker.engine import build_engine, measure_steps
from baton.worker.step_cost_file import cost_key, keep, read_kept

COST = StepCost(fixed=1e-3, row=1e-5, key=0.0, token=2e-5, pair=0.0)
KEY = {"model": "a", "threads": 1}
CONFIG = DecodeConfig(device="cpu", threads=1, kv_tokens=1024)


def test_a_worker_measures_what_is_not_there_and_adds_it(tmp_path: Path) -> None:
    path = tmp_path / "costs"
    engine = build_engine(replace(CONFIG, step_cost=str(path)), 0x51EB)
    try:
        first = measure_steps(engine)
        assert read_kept(path, cost_key(engine)) == first
        assert measure_steps(engine) == first  # two measurements are never equal to the last digit
        assert len(path.read_text().splitlines()) == 1
        engine.config = replace(engine.config, max_rows=3)
        assert measure_steps(engine) != first
        assert len(path.read_text().splitlines()) == 2
        path.write_bytes(b"\0\xff{")
        again = measure_steps(engine)
        assert read_kept(path, cost_key(engine)) == again
        engine.config = replace(engine.config, step_cost=str(tmp_path))  # a directory
        assert measure_steps(engine).fixed >= 0
        engine.config = replace(engine.config, step_cost="")
        measure_steps(engine)
        assert len(path.read_bytes().splitlines()) == 2
    finally:
        engine.close()


def test_what_decides_is_in_the_key() -> None:
    engine = build_engine(CONFIG, 0x51EC)
    try:
        key = cost_key(engine)
        assert json.loads(json.dumps(key)) == key, "it can be found again in a file"
        for changed in (
            {"max_rows": 3},
            {"token_budget": 77},
            {"quantization": "int8"},
            {"tp": 2},
        ):
            before, engine.config = engine.config, replace(engine.config, **changed)
            assert cost_key(engine) != key, changed
            engine.config = before
        # Where it is kept, and what callers send, decide nothing.
        engine.config = replace(engine.config, step_cost="/elsewhere", port=7, max_waiting=5)
        assert cost_key(engine) == key
    finally:
        engine.close()


def test_each_key_has_its_newest_line(tmp_path: Path) -> None:
    path = tmp_path / "costs"
    assert read_kept(path, KEY) is None
    newer, other = replace(COST, fixed=2e-3), replace(COST, fixed=3e-3)
    keep(path, KEY, COST)
    keep(path, KEY, newer)
    keep(path, {**KEY, "threads": 2}, other)
    assert read_kept(path, KEY) == newer
    assert read_kept(path, {**KEY, "threads": 2}) == other
    assert read_kept(path, {**KEY, "threads": 3}) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        "[" * 100_000,
        '{"for": {}}',
        *(
            json.dumps({"for": KEY, "step": step})
            for step in (
                [],
                {"fixed": 1.0},
                {**asdict(COST), "more": 1.0},
                {**asdict(COST), "row": -1.0},
                {**asdict(COST), "row": "x"},
                {**asdict(COST), "row": None},
                {**asdict(COST), "row": float("nan")},
                {**asdict(COST), "row": float("inf")},
                dict.fromkeys(asdict(COST), 0.0),
            )
        ),
    ],
)
def test_a_damaged_line_is_left_out_whatever_follows(tmp_path: Path, line: str) -> None:
    path = tmp_path / "costs"
    path.write_text(line)  # without an end, as by a full disk
    assert read_kept(path, KEY) is None
    keep(path, KEY, COST)
    assert read_kept(path, KEY) == COST
    path.write_text(f"{path.read_text()}{line}\n")
    assert read_kept(path, KEY) == COST


def test_it_is_refused_with_a_profile(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"step": asdict(COST)}))
    with pytest.raises(BatonError, match="leave out --step-cost"):
        build_engine(replace(CONFIG, step_profile=str(profile), step_cost="costs"), 0x51ED)
