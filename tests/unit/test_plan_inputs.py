"""What `baton plan` reads: lengths, traces, profiles; and what `baton bench profile` makes of figures."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import asdict

import pytest

from baton.bench.kv_transfer import Rate, line
from baton.bench.profile import (
    LOCAL,
    MANY,
    OUTPUT,
    REMOTE,
    STEP,
    MeasuredSteps,
    Shape,
    _rows,
    fitted,
    grid,
    solve,
)
from baton.config import DecodeConfig, PrefillConfig
from baton.engine.plan import step_load
from baton.sizing.nodes import NodeSetup
from baton.sizing.profile import EngineFacts, HostCost, MeasuredPullCost, Profile, read_profile, to_dict
from baton.sizing.simulation import NodeLayout, simulate
from baton.sizing.traffic import Arrival, Lengths, Traffic, poisson, read_trace
from baton.step_cost import StepCost, StepLoad

COST = StepCost(fixed=2e-3, row=1e-4, key=2e-8, token=5e-5, pair=1e-8)


def draws(text, count=4000):
    rng = random.Random(5)
    return sorted(Lengths.parse(text).draw(rng) for _ in range(count))


def at(values, part):
    return values[int(part * len(values))]


def test_lengths_are_drawn_as_they_are_written():
    assert set(draws("512", 20)) == {512}
    even = draws("100-199")
    assert (even[0], even[-1]) == (100, 199) and statistics.fmean(even) == pytest.approx(149.5, rel=0.02)


def test_two_percentiles_are_a_lognormal_and_more_bend_it():
    two = draws("p50=300,p99=4000")
    assert at(two, 0.5) == pytest.approx(300, rel=0.08) and at(two, 0.99) == pytest.approx(4000, rel=0.25)
    # Log-normal: as far below the median, in the logarithm, as above it.
    assert at(two, 0.1) * at(two, 0.9) == pytest.approx(300**2, rel=0.2)
    three = draws("p10=200,p50=300,p99=4000")
    assert at(three, 0.1) == pytest.approx(200, rel=0.05) and at(three, 0.5) == pytest.approx(300, rel=0.08)
    assert at(three, 0.99) == pytest.approx(4000, rel=0.25)


@pytest.mark.parametrize(
    "text", ["", "0", "9-3", "a", "p50=3", "p50=9,p90=3", "p90=3,p50=9", "p0=1,p50=2", "p50"]
)
def test_lengths_that_are_none_say_so(text):
    with pytest.raises(ValueError, match=r"length|must be 1|percentiles"):
        Lengths.parse(text)


def test_poisson_traffic_has_its_rate_and_fits_the_context():
    found = poisson(20, Lengths(10, 3000), Lengths(10, 3000), 2000, 1, 2048)
    assert found.last - found.first == 2000 and found.first == len(found.arrivals) - found.last == 250
    assert found.rate == pytest.approx(20, rel=0.06)
    assert max(a.prompt + a.output for a in found.arrivals) <= 2048
    gaps = [b.at - a.at for a, b in zip(found.arrivals, found.arrivals[1:], strict=False)]
    assert statistics.pstdev(gaps) == pytest.approx(1 / 20, rel=0.1), "exponential: as spread as its mean"


def test_a_trace_is_read_and_one_that_is_none_says_so(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('[{"at": 2, "prompt": 30, "output": 4}, {"at": 0.5, "prompt": 10, "output": 1}]')
    found = read_trace(path, 100)
    assert found.arrivals == (Arrival(0.5, 10, 1), Arrival(2.0, 30, 4)) and (found.first, found.last) == (
        0,
        2,
    )
    for text, wrong in (
        ("{", "no trace"),
        ("[1]", "no trace"),
        ('[{"at": 1, "prompt": 5}]', "no trace"),
        ('[{"at": 1, "prompt": 5, "output": 2}]', "two or more"),
        ('[{"at": 1, "prompt": 5, "output": 2}, {"at": 1, "prompt": 5, "output": 2}]', "two or more times"),
        ('[{"at": 0, "prompt": 0, "output": 2}, {"at": 1, "prompt": 5, "output": 2}]', "lengths of 1"),
        ('[{"at": 0, "prompt": 99, "output": 2}, {"at": 1, "prompt": 5, "output": 2}]', "holds 100"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=wrong):
            read_trace(path, 100)
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path / "none", 100)


def test_work_is_what_full_steps_would_take():
    load = Traffic((Arrival(0, 100, 11), Arrival(1, 100, 11), Arrival(2, 100, 11)), 0, 3)
    work = load.work(COST, max_rows=10, token_budget=50)
    keys = sum(range(101, 111))
    assert work.prompts == pytest.approx(100 * COST.token + 5050 * COST.pair)
    assert work.rows == pytest.approx(10 * COST.row + keys * COST.key)
    assert work.prompt_steps == pytest.approx(2 * COST.fixed)
    assert work.row_steps == pytest.approx(COST.fixed)


def test_a_profile_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "profile.json"
    profile = Profile(
        COST, EngineFacts(page_size=64, overlap=True), MeasuredPullCost(1e-3, 2e9, False, "grpc")
    )
    path.write_text(json.dumps(to_dict(profile)))
    assert read_profile(path) == profile
    path.write_text(json.dumps({"step": asdict(COST)}))
    assert read_profile(path) == Profile(COST, missing=("engine", "pull", "host"))
    # What a part has besides is of no concern.
    path.write_text(json.dumps({"step": asdict(COST), "engine": {"page_size": 8, "model": "x"}}))
    assert read_profile(path).engine == EngineFacts(page_size=8)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ({"engine": {"page_size": 0}}, "engine.page_size: .*equal to 1, not 0"),
        ({"engine": {"page_size": "x"}}, "no profile"),
        ({"engine": []}, "no profile"),
        ({"pull": {"bytes_per_second": 0}}, "pull.bytes_per_second: .*greater than 0"),
        ({"pull": {"latency": -1}}, "pull.latency: .*not -1"),
        ({"host": {"hop": -1}}, "host.hop: .*not -1"),
        ({"host": {"row": None}}, "no profile"),
        ({"step": {}}, "no profile"),
    ],
)
def test_a_profile_that_is_none_says_so(tmp_path, part, wrong):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"step": asdict(COST), **part}))
    with pytest.raises(ValueError, match=wrong):
        read_profile(path)


def test_a_grid_has_steps_of_all_kinds_with_pages_of_their_own():
    shapes = grid((1, 4), (10, 100), (16, 64))
    assert Shape(rows=4, context=100) in shapes and Shape(chunk=64, cached=100) in shapes
    assert Shape(chunk=64) in shapes and Shape(rows=4, context=100, chunk=64) in shapes
    for shape in shapes:
        rows = list(_rows(shape, 16))
        used = [page for row in rows for page in row.tables[0]]
        assert sorted(used) == list(range(shape.pages(16))), str(shape)
        load = step_load(rows)
        assert (load.decode_sequences, load.context_tokens) == (shape.rows, shape.rows * (shape.context + 1))
        assert load.prefill_tokens == shape.chunk
        assert all(len(row.tables[0]) * 16 >= row.start + row.count for row in rows)


def test_a_fit_tells_its_error():
    loads = [step_load(_rows(shape, 16)) for shape in grid((1, 4, 16), (64, 512), (16, 128))]
    found = fitted([MeasuredSteps(Shape(), load, COST.seconds(load)) for load in loads])
    assert found.summary()["worst"] < 1e-6
    odd = [MeasuredSteps(Shape(), StepLoad(decode_sequences=1), seconds) for seconds in (1.0, 1.0, 1.0, 2.0)]
    assert fitted(odd).summary()["worst"] == pytest.approx(0.5, abs=0.2)


def test_pulls_of_two_lengths_are_a_line():
    short, long = (Rate("shm", 0, pages, pages * 1000, 2e-3 + pages * 1e-5, 0, 0) for pages in (4, 128))
    found = line(short, long, "shm")
    assert found.latency == pytest.approx(2e-3) and found.bytes_per_second == pytest.approx(1e8)
    assert found.seen and not line(short, long, "grpc").seen
    # Noise that makes the longer pull the faster one: latency alone.
    assert line(short, Rate("shm", 0, 128, 128000, 1e-3, 0, 0), "shm").seconds(10**9) == pytest.approx(
        short.seconds
    )


@pytest.mark.parametrize("step", [STEP, StepCost(fixed=15e-3, row=2e-4, key=1e-7, token=1e-4, pair=1e-9)])
def test_the_hosts_part_is_what_clients_see_beyond_the_steps(step):
    """The same deployment, simulated, with a host that is known."""
    host = HostCost(turn=5e-4, row=4e-5, request=3e-3, hop=7e-4)
    setup = NodeSetup(Profile(step, host=host), PrefillConfig(), DecodeConfig(local_prefill_tokens=32))

    def records(prompt, output, count, apart):
        arrivals = tuple(Arrival(1 + i * apart, prompt, output) for i in range(count))
        return simulate(NodeLayout(1, 1), setup, Traffic(arrivals, 0, count)).records

    alone = records(LOCAL, OUTPUT, 3, 10.0), records(REMOTE, 2, 3, 10.0)
    found = solve(step, *alone, records(LOCAL, OUTPUT, MANY, 0.0))
    assert found.request == pytest.approx(host.request, rel=0.01)
    assert found.hop == pytest.approx(host.hop, rel=0.01)
    assert found.turn == pytest.approx(host.turn, rel=0.15)
    assert found.row == pytest.approx(host.row, rel=0.15)
