"""`baton bench profile`, and what `baton plan` makes of it against real processes: short, for its sense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
from deployment import Deployment
from process import ENVIRONMENT

from baton.bench.load_processes import make_target, run_clients
from baton.bench.profile import LIMIT, measure_host
from baton.bench.summary import summarize
from baton.bench.workload import TokenRange, Workload
from baton.config import DecodeConfig, PrefillConfig
from baton.sizing.nodes import NodeSetup
from baton.sizing.profile import EngineFacts, MeasuredPullCost, Profile, read_profile
from baton.sizing.simulation import NodeLayout, simulate
from baton.sizing.traffic import Arrival, Traffic
from baton.step_cost import StepCost

STEP = StepCost(fixed=40e-3, row=2e-4, key=0.0, token=2e-4, pair=0.0)
"""Long, so that a busy machine adds little."""


def test_the_engine_and_its_pulls_are_measured(tmp_path):
    file = tmp_path / "profile.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "baton.cli.main", "bench", "profile", "--no-host", "--json", str(file)),
            *("--rows", "1,4", "--contexts", "32,128,5000", "--chunks", "16,64", "--seconds", "0.02"),
            *("--threads", "1", "--kv-tokens", "4096", "--commit", "abc123"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **ENVIRONMENT, "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["measurement"] == "profile" and report["versions"]["commit"] == "abc123"
    assert {point["step"] for point in report["points"]} == {
        *("1 rows of 32", "1 rows of 128", "4 rows of 32", "4 rows of 128"),
        *("16 prompt tokens after 0", "16 prompt tokens after 32", "16 prompt tokens after 128"),
        *("64 prompt tokens after 0", "64 prompt tokens after 32", "64 prompt tokens after 128"),
        "4 rows of 128 and 64 prompt tokens after 0",
    }
    assert "beyond the context of 2048" in report["skipped"]["4 rows of 5000"]
    assert all(point["ms"] > 0 and point["fitted_ms"] > 0 for point in report["points"])
    error = report["fit_error"]
    assert 0 <= error["median"] <= error["p90"] <= error["worst"]
    profile = read_profile(file)
    assert profile.missing == ("host",) and profile.step.fixed + profile.step.token > 0
    engine = profile.engine
    assert (engine.kv_tokens, engine.page_size, engine.context_length) == (4096, 16, 2048)
    assert (engine.page_bytes, engine.device, engine.overlap) == (16 * 5 * 2 * 2 * 64 * 4, "cpu", False)
    assert profile.pull.transport == "shm" and profile.pull.seen and profile.pull.seconds(10**6) > 0
    assert "a step" in done.stdout and "Pulls (shm)" in done.stdout


LOCAL = ("--local-prefill-tokens", str(LIMIT))


@pytest.mark.alone
@pytest.mark.times
async def test_a_prediction_is_near_what_real_processes_do(tmp_path):
    """Steps take a given time; processes, messages, schedulers, pages and pulls are real. What a busy machine
    disturbed is taken again, three times at most."""
    steps = tmp_path / "steps.json"
    steps.write_text(json.dumps({"step": asdict(STEP)}))
    worker = ("--step-profile", str(steps), "--kv-tokens", "16384")
    with Deployment.split(tmp_path, "demo", worker=worker, decode_flags=LOCAL) as deployment:
        (gateway,) = deployment.of("gateway")
        for seed in (11, 12, 13, 14):
            real, predicted = await both(gateway.address, seed)
            assert predicted["output_tokens"] == real["output_tokens"]
            assert predicted["pulled_pages"] == real["pulled_pages"]
            if far(predicted, real) == []:
                break
    assert far(predicted, real) == [], (predicted, real)


async def both(address: str, seed: int) -> tuple[dict, dict]:
    """The figures of a load, and what is predicted of it."""
    work = Workload(
        prompt_tokens=TokenRange(60, 400), output_tokens=TokenRange(4, 24), rate=6.0, seconds=4.0, seed=seed
    )
    host = await measure_host(address, STEP)
    target = await make_target(address, 1, 4, 60.0)
    real = summarize((await run_clients(target, work, lambda *_: None)).records)
    assert real["failures"] == {} and real["requests"] > 10
    jobs = work.jobs(target.vocabulary, target.context)
    arrivals = tuple(Arrival(job.at, len(job.prompt), job.output_tokens) for job in jobs)
    profile = Profile(STEP, EngineFacts(kv_tokens=16384), MeasuredPullCost(2e-3, 1e9), host)
    found = simulate(
        NodeLayout(1, 1),
        NodeSetup(profile, PrefillConfig(), DecodeConfig(local_prefill_tokens=LIMIT)),
        Traffic(arrivals, 0, len(arrivals)),
    )
    return real, summarize(found.records)


def far(predicted: dict, real: dict) -> list[str]:
    """Which figures differ."""
    figures = (("ttft_ms", "p50"), ("tpot_ms", "p50"), ("e2e_ms", "mean"))
    return [
        name for name, part in figures if predicted[name][part] != pytest.approx(real[name][part], rel=0.3)
    ]
