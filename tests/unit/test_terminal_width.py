"""`baton status` and `baton bench serve` in narrow terminals and in pipes: no word is broken or cut."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from baton.bench.workload import Workload
from baton.cli import bench_serve
from baton.cli.node_reports import NodeReport
from baton.cli.status import print_problems, print_status
from baton.cli.top import TopSample, frame
from baton.v1 import node_pb2, trace_pb2

WORDS = (
    *("gateway", "prefill", "decode", "tokenizer", "unreachable", "serving"),
    *("[fd00::5]:50051", "[fd00::7]:50071"),
)


def reports():
    def make(role, port, host="10.10.10.10", **load):
        info = node_pb2.NodeInfo(role=role, incarnation=2**63, pid=12345, device="cuda:0")
        info.model.name, info.model.dtype = "Qwen/Qwen3-0.6B", "bfloat16"
        info.peers.add(role="decode", address="10.10.10.10:50071", connected=True)
        return NodeReport(role, f"{host}:{port}", info, node_pb2.Load(**load), "SERVING")

    pages = node_pb2.PageCounts(total=65536, free=60000, cached=5000)
    return [
        make("gateway", 50050, requests=3),
        make("tokenizer", 50051, host="[fd00::5]"),
        make("prefill", 50061, waiting=12, prefilling=4, leases=7, oldest_lease_ms=1234, pages=pages),
        make("decode", 50071, handing_off=3, running=64, pulls=2, pages=pages),
        make("encode", 50081, waiting=2, running=3, encoded_images=7, encode_batches=2),
        NodeReport("decode", "[fd00::7]:50071", error="refused"),
    ]


def shown(terminal: bool, width: int, print_it) -> list[str]:
    file = io.StringIO()
    print_it(Console(file=file, force_terminal=terminal, width=width, color_system=None))
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()]


@pytest.mark.parametrize(("terminal", "width"), [(True, 80), (True, 250), (False, 80)])
def test_status(terminal, width):
    lines = shown(terminal, width, lambda console: print_status(reports(), console))
    text = "\n".join(lines)
    for word in (*WORDS, "10.10.10.10:50061", "Qwen/Qwen3-0.6B", "12 waiting, 4 prefilling", "64 running"):
        assert word in text, f"{word} is broken:\n{text}"
    assert "2 waiting, 3 encoding, 7 images so far, 3.5 a batch" in " ".join(text.split())
    assert "…" not in text
    if terminal:
        assert max(map(cell_len, lines)) <= width, text
    else:
        assert len(lines) == 1 + len(reports()), "a process is a line"


def test_a_problem_is_one_line():
    found = reports()
    found[3].load.problems.add(reason="PREFILL_LOST", message="prompts are not handed off to " + "x" * 90)
    lines = shown(False, 80, lambda console: print_problems(found, console))
    assert len(lines) == 2 and lines[0].startswith("decode 10.10.10.10:50071 PREFILL_LOST: "), lines


@pytest.mark.parametrize("terminal", [True, False])
def test_bench_serve(terminal, monkeypatch):
    each = {"mean": 1234.5, "p50": 1234.5, "p90": 12345.6, "p99": 12345.6, "p999": 1.0}
    run = {f"{name}_ms": each for name in bench_serve.LATENCIES}
    run |= {"finished": 1000, "requests": 1000, "requests_per_second": 123.45, "prompt_tokens": 9}
    run |= {"output_tokens_per_second": 12345.6, "cached_tokens": 3, "goodput_per_second": 123.45}
    run |= {"in_flight": {"mean": 123.4}, "lateness_ms": {"p99": 12.3}, "client_busy": 0.31}
    run |= {"failed": 0, "errors": {}}
    work = Workload(rate=123.0, seconds=25.0, prompt_tokens=(9, 9), output_tokens=(9, 9))
    monkeypatch.setattr(bench_serve, "warnings", lambda run, work: ())
    lines = shown(terminal, 80, lambda console: bench_serve.show((work,), [run], console))
    text = "\n".join(lines)
    assert "…" not in text, text
    for word in ("TTFT, ms", "ITL, ms", "goodput", "client", "12,345.6", "31%"):
        assert word in text, f"{word}:\n{text}"
    assert max(map(cell_len, lines)) <= 80, text


def test_top():
    first, second = reports(), reports()
    second[0].load.finished, second[3].load.output_tokens = 20, 3000
    traces = [
        trace_pb2.Trace(id="00000000000000ff-1", total_us=5000, phases=[trace_pb2.TracePhase(name="queue")]),
        trace_pb2.Trace(id="00000000000000ff-2", ttft_us=900, total_us=9_000_000, outcome="finished"),
    ]
    before, now = TopSample(10.0, first, []), TopSample(12.0, second, traces)
    lines = shown(True, 80, lambda console: console.print(frame(before, now)))
    text = "\n".join(lines)
    assert lines[0].startswith("10.0 requests/s, 0.0 failed/s, 1,500 output tokens/s")
    assert text.count("[fd00::7]:50071") == 2, "also where its problem is told"
    for word in (*WORDS, "runs: queue", "9.000 s", "0.9 ms", "refused"):
        assert word in text, text
    assert max(map(cell_len, lines)) <= 80, text
