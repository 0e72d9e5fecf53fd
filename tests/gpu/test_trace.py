"""A steady decode keeps the GPU busy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton.bench.engine_bench import EngineBench
from baton.bench.steps import Point
from baton.config import WorkerConfig

sys.path.append(str(Path(__file__).parents[2] / "tools"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gaps import trace_decode
from make_shape import write_shape


@pytest.mark.timeout(180)
def test_no_gaps_between_the_steps_of_an_8b_shape(tmp_path):
    write_shape("8b", tmp_path)
    bench = EngineBench(
        WorkerConfig(
            model=str(tmp_path),
            load_format="dummy",
            device="cuda",
            kv_tokens=40_000,
            max_rows=64,
            token_budget=8192,
        )
    )
    try:
        found = trace_decode(bench, Point(64, 128), 100, 0.6)
    finally:
        bench.close()
    print(found)
    assert found.steps == 100 and found.kernels > 36
    assert found.long_share < 0.03
