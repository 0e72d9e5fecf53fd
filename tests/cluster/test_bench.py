"""`baton bench`, the real command against real processes: short, for its figures' form and their sense."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from forking import forks
from polling import wait
from process import ENVIRONMENT

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from make_shape import write_shape

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "pause_ms", "e2e_ms", "lateness_ms")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    of = {**os.environ, **ENVIRONMENT, "COLUMNS": "120"}
    return forks(**ENVIRONMENT).run(["bench", *arguments], environment=of)


def figures(file: Path, *arguments: str) -> tuple[dict, str]:
    done = bench(*arguments, "--json", str(file), "--commit", "abc123")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert report["measurement"] == arguments[0]
    assert report["versions"]["commit"] == "abc123" and report["machine"]["cores"] >= 1
    return report, done.stdout


def test_open_loop_against_a_running_deployment(demo, tmp_path):
    from matplotlib.image import imread

    picture = tmp_path / "load.png"
    report, output = figures(
        tmp_path / "serve.json",
        *("serve", "--server", demo.gateway.address, "--rate", "6,12", "--seconds", "2", "--clients", "2"),
        *("--prompt-tokens", "90-120", "--output-tokens", "8", "--seed", "41", "--plot", str(picture)),
        *("--ttft-target-ms", "60000", "--itl-target-ms", "60000"),
    )
    slow, fast = report["runs"]
    for run, rate in ((slow, 6.0), (fast, 12.0)):
        assert run["workload"]["rate"] == rate and run["finished"] == run["requests"] > 0
        assert run["output_tokens"] == 8 * run["requests"] and run["failures"] == {}
        assert run["offered_per_second"] == run["requests"] / 2.0
        assert run["seconds"] >= 2.0 and run["goodput_per_second"] == pytest.approx(
            run["requests_per_second"]
        )
        for name in LATENCIES:
            spread = run[name]
            assert 0 <= spread["p50"] <= spread["p90"] <= spread["p99"], name
        assert 0 < run["ttft_ms"]["p50"] < run["e2e_ms"]["p50"]
        assert run["in_flight"]["max"] >= 1 and 0 < run["client_busy"] < 1
        assert 90 * run["requests"] <= run["prompt_tokens"] <= 120 * run["requests"]
        assert run["cached_tokens"] == 0, "each run has prompts of its own"
        assert run["transports"] == {"shm": run["requests"]}
    assert report["clients"] == 2 and "SGLang" in report["itl_counting"]
    processes = report["deployment"]["processes"]
    assert [process["role"] for process in processes] == ["gateway", "tokenizer", "prefill", "decode"]
    assert processes[2]["transports"] == ["shm", "grpc"] and processes[2]["page_size"] == 16
    assert processes[-1]["device"] == "cpu" and "torch" in processes[-1]["attention"]
    assert "TTFT" in output and "goodput" in output
    pixels = imread(picture)
    assert pixels.shape[0] > 800 and pixels.shape[1] > 1000 and pixels.std() > 0.01


def test_closed_loop_holds_its_concurrency(demo, tmp_path):
    report, _ = figures(
        tmp_path / "closed.json",
        *("serve", "--server", demo.gateway.address, "--concurrency", "3", "--requests", "8", "--seed", "42"),
        *("--prompt-tokens", "70", "--output-tokens", "1", "--shared-prefix", "64"),
        *("--plot", str(tmp_path / "closed.png")),
    )
    (run,) = report["runs"]
    assert run["load"] == "3 at a time" and run["finished"] == 8
    assert run["in_flight"]["max"] == 3 and run["goodput_per_second"] is None
    assert run["cached_tokens"] > 0, "the shared prefix"
    assert run["itl_ms"]["p50"] is None and (tmp_path / "closed.png").stat().st_size > 10_000


def test_conversations_find_what_was_said_before(demo, tmp_path):
    report, output = figures(
        tmp_path / "talk.json",
        *("serve", "--server", demo.gateway.address, "--concurrency", "2", "--requests", "8", "--seed", "43"),
        *("--workload", "conversation", "--turns", "4", "--think-seconds", "0.1", "--warmup", "0"),
        *("--prompt-tokens", "64", "--output-tokens", "16", "--clients", "2"),
    )
    (run,) = report["runs"]
    assert run["finished"] == run["requests"] == 8 and run["in_flight"]["max"] <= 2
    # Two conversations; each turn repeats the 80 tokens of every one before it.
    assert run["prompt_tokens"] == 2 * sum(64 + 80 * turn for turn in range(4))
    assert run["cached_tokens"] >= 2 * sum(64 + 80 * turn for turn in range(3))
    assert "cached" in output


def test_failures_are_counted_and_do_not_end_it(demo, tmp_path):
    """Of this seed the outputs are 2, 1,618 and 1,666 tokens long: the latter take longer than they may."""
    flags = ("serve", "--server", demo.gateway.address, "--requests", "3", "--warmup", "0", "--seed", "1563")
    flags = (*flags, "--prompt-tokens", "16", "--output-tokens", "1-1900")
    report, output = figures(tmp_path / "late.json", *flags, "--timeout", "1.5")
    (run,) = report["runs"]
    assert run["failures"] == {"DEADLINE_EXCEEDED": 2} and run["finished"] == 1 and run["output_tokens"] == 2
    assert "2 of 3 requests failed: DEADLINE_EXCEEDED" in output
    done = bench(*flags, "--timeout", "0.001")
    assert done.returncode == 1 and "every request failed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_offline_through_a_deployment_and_in_process(demo, tmp_path):
    sizes = ("--requests", "6", "--prompt-tokens", "20-60", "--output-tokens", "5-9")
    deployed, output = figures(
        tmp_path / "offline.json", "offline", "--server", demo.gateway.address, *sizes, "--repeats", "2"
    )
    alone, _ = figures(tmp_path / "engine.json", "offline", "--engine", *sizes, "--kv-tokens", "4096")
    assert deployed["workload"] == alone["workload"] and alone["workload"]["requests"] == 6
    tokens = alone["workload"]["output_tokens"]
    assert {run["output_tokens"] for run in [*deployed["runs"], *alone["runs"]]} == {tokens}
    assert [run["cached_tokens"] for run in deployed["runs"]] == [0, 0] and len(alone["runs"]) == 1
    for report in (deployed, alone):
        assert report["output_tokens_per_second"] > 0
    assert alone["engine"]["device"] == "cpu" and alone["engine"]["kv_tokens"] == 4096
    assert deployed["engine"] is None and f"{tokens:,} output tokens" in output


def test_steps_against_their_floor(tmp_path):
    report, output = figures(
        tmp_path / "step.json",
        *("step", "--batch", "1,4", "--context", "32,256,5000", "--steps", "6", "--repeats", "2"),
    )
    points = report["points"]
    assert [(p["batch"], p["context"]) for p in points] == [(1, 32), (1, 256), (4, 32), (4, 256)]
    for point in points:
        assert point["context"] < point["mean_context"] < point["context"] + 30
        assert point["step_ms"] > 0 and len(point["runs_step_ms"]) == 2
        assert point["step_ms"] in point["runs_step_ms"]
        per_token = report["engine"]["kv_bytes_per_token"]
        assert point["kv_bytes"] == pytest.approx(point["batch"] * point["mean_context"] * per_token)
        bytes_moved = report["weight_bytes"] + point["kv_bytes"]
        assert point["floor_ms"] == pytest.approx(bytes_moved / report["bandwidth_bytes_per_second"] * 1e3)
        assert set(point["host_ms"]) == {"plan", "launch", "read", "commit"} and point["first_tokens_ms"] > 0
    # The demo model: 4,492,672 weights, the embedding tied; 5 layers of 4 heads and 2 KV heads of 64, whose
    # norms are held once a head.
    assert report["weight_bytes"] == (4_492_672 + 5 * (3 + 1) * 64) * 4
    assert report["engine"]["kv_bytes_per_token"] == 5 * 2 * 2 * 64 * 4
    assert set(report["skipped"]) == {"batch 1, context 5000", "batch 4, context 5000"}
    assert "exceed the context of 2048" in output


def test_a_shape_without_weights_is_served_and_measured(tmp_path):
    """As on a GPU with a shape of 8 billion: a directory that `tools/make_shape.py` made, random weights."""
    write_shape("tiny", tmp_path / "tiny")
    report, _ = figures(
        tmp_path / "tiny.json",
        *("serve", "--model", str(tmp_path / "tiny"), "--load-format", "dummy", "--kv-tokens", "4096"),
        *(
            "--rate",
            "8",
            "--seconds",
            "1",
            "--prompt-tokens",
            "100",
            "--output-tokens",
            "6",
            "--threads",
            "1",
        ),
    )
    (run,) = report["runs"]
    assert run["finished"] == run["requests"] > 0 and run["output_tokens"] == 6 * run["requests"]
    assert report["deployment"]["processes"][0]["model"]["name"] == "tiny"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--rate", "0"], "numbers above 0"),
        (["serve", "--rate", "4", "--concurrency", "2"], "--concurrency is for a closed loop"),
        (["serve", "--rate", "4", "--requests", "2"], "--requests is for a closed loop"),
        (["serve", "--rate", "0.001", "--seconds", "1"], "nothing arrives"),
        (["serve", "--concurrency", "2", "--clients", "3"], "--clients (3)"),
        (["serve", "--prompt-tokens", "9-3"], "smaller number first"),
        (["serve", "--json", "/no-such-folder/x.json"], "/no-such-folder"),
        (["offline", "--engine", "--server", "x:1"], "give one of them"),
        (
            ["serve", "--server", "x:1", "--kv-tokens", "64"],
            "--kv-tokens is for a deployment that is started",
        ),
        (["offline", "--server", "x:1", "--decode", "2"], "--decode is for a deployment that is started"),
        (["step", "--batch", "1,x"], "whole numbers"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(arguments, says):
    done = bench(*arguments)
    assert done.returncode == 2 and done.stdout == "" and says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_too_long_for_the_context_is_one_line_before_anything_is_sent(demo):
    done = bench(
        "serve", "--server", demo.gateway.address, "--prompt-tokens", "2000", "--output-tokens", "100"
    )
    assert done.returncode == 1 and "exceed the model's context of 2048" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_plots_without_matplotlib_say_what_to_install(tmp_path):
    """A package of that name that cannot be imported stands before the real one."""
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Python reads the path when it starts.
    command = [sys.executable, "-m", "baton.cli.main", "bench", "serve", "--plot", str(tmp_path / "x.png")]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.strip() == "baton: --plot needs matplotlib: pip install 'baton-serve[bench]'"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_its_clients_end_with_it(demo, number):
    flags = ("--concurrency", "2", "--requests", "40", "--prompt-tokens", "16", "--output-tokens", "1900")
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.cli.main", "bench", "serve", "--server", demo.gateway.address, *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
    )
    wait(lambda: demo.decode.load().running == 2, "two requests run")
    clients = psutil.Process(process.pid).children(recursive=True)
    assert clients
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number) and stderr == b""
    wait(
        lambda: all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in clients),
        "its clients end",
    )


def test_nothing_there_is_one_line():
    for measurement in ("serve", "offline"):
        done = bench(measurement, "--server", "127.0.0.1:1")
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "baton up" in done.stderr
