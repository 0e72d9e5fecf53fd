"""Pictures of `baton bench serve`, drawn from reports alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from baton.bench.plots import draw, main
from baton.bench.summary import DISTRIBUTION, distribution, summarize, too_few
from baton.bench.workload import TokenRange, Workload
from baton.cli.bench_serve import few_requests
from baton.slo import RequestTimes


def run(work: Workload, load: str, pauses: list[float]) -> dict[str, Any]:
    times = np.cumsum([0.1, *pauses]).tolist()
    records = (
        [RequestTimes(0.0, 0.0, [(at, 1) for at in times], times[-1], output_tokens=len(times))]
        if pauses
        else []
    )
    return summarize(records) | {"load": load, "workload": work.to_dict()}


def report(*runs: dict[str, Any]) -> dict[str, Any]:
    processes = [
        {"role": "gateway", "model": {"name": "demo"}, "device": ""},
        {"role": "decode", "model": {"name": "demo"}, "device": "cpu"},
    ]
    versions = {"baton": "0.1.0", "commit": "abc"}
    return {"deployment": {"processes": processes}, "versions": versions, "runs": list(runs)}


OPEN = Workload(prompt_tokens=TokenRange(8, 8), output_tokens=TokenRange(2, 9), rate=4.0, seconds=1.0)


@pytest.mark.parametrize(
    "runs",
    [
        [run(OPEN, "4", [0.01, 0.02, 0.5])],
        [run(replace(OPEN, rate=2.0), "2", [0.01] * 50), run(OPEN, "4", [0.0, 0.02, 0.5])],
        [run(replace(OPEN, rate=None, requests=2), "all at once", [0.01, 0.02]), run(OPEN, "4", [0.3])],
        [run(OPEN, "4", [])],
    ],
    ids=["one", "rates", "closed and open", "nothing"],
)
def test_a_report_is_drawn(runs, tmp_path):
    source, picture = tmp_path / "load.json", tmp_path / "load.png"
    source.write_text(json.dumps(report(*runs)))
    assert main([str(source), str(picture)]) == 0
    pixels = imread(picture)
    assert pixels.shape[0] > 800 and pixels.shape[1] > 1000 and pixels.std() > 0.01


def test_percentiles_of_few_requests_are_said_to_be_that():
    assert too_few(8) == [90, 99] and too_few(50) == [99] and too_few(100) == []
    few, many = run(OPEN, "4", [0.01]), run(OPEN, "4", [0.01]) | {"finished": 100}
    titles = [[panel.get_title(loc="left") for panel in draw(report(each)).axes] for each in (few, many)]
    assert "p50 of 1 requests is close to the slowest" in titles[0][0]
    assert not any("slowest" in title for title in titles[1])
    assert list(few_requests(few | {"finished": 8})) == [
        "p90 and p99 of 8 requests is close to the slowest request; measure more requests"
    ]
    assert list(few_requests(many)) == []


def test_what_is_no_report_is_one_line(tmp_path, capsys):
    for text in ("{}", "no json"):
        (tmp_path / "x.json").write_text(text)
        assert main([str(tmp_path / "x.json"), str(tmp_path / "x.png")]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main([]) == 2


def test_a_distribution_is_numpy_s_percentiles():
    values = np.random.default_rng(1).exponential(0.02, 500)
    found = distribution(values)
    assert len(found) == len(DISTRIBUTION) and found == sorted(found)
    assert found[DISTRIBUTION.index(50.0)] == pytest.approx(1e3 * np.median(values))
    assert found[-1] == pytest.approx(1e3 * np.percentile(values, 99.9)) and distribution([]) == []
