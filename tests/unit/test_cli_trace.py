"""`baton trace`: its lines, and Chrome's trace format."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

import pytest
from rich.cells import cell_len

from baton.cli.chrome_trace import chrome_trace
from baton.cli.trace import in_order, lines
from baton.v1 import trace_pb2


def phase(name, role, start, end, detail="", address="10.0.0.1:50061"):
    address = "" if role == "gateway" else address
    return trace_pb2.TracePhase(
        name=name, role=role, address=address, start_us=start, end_us=end, detail=detail
    )


def make(id="00000000000000ff-1", received=1000, more=()):
    return trace_pb2.Trace(
        id=id,
        received_unix_ms=received,
        ttft_us=30_000,
        total_us=100_000,
        outcome="finished",
        prompt_tokens=40,
        output_tokens=9,
        phases=[
            phase("admit", "gateway", 0, 200),
            phase("queue", "prefill", 200, 10_000),
            phase("prefill", "prefill", 10_000, 30_000),
            phase("decode", "decode", 30_000, 100_000),
            *more,
        ],
        work=[phase("chunk", "prefill", 10_000, 29_000, "step 7, 40 tokens")],
    )


@pytest.mark.parametrize("width", [50, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    found = lines(make(), width)
    assert all(cell_len(line.plain) <= width for line in found), [line.plain for line in found]
    assert all("█" in line.plain for line in found[3:7])


def test_at_80_columns_everything_is_said():
    text = "\n".join(line.plain for line in lines(make(), 80))
    for word in ("00000000000000ff-1", "finished, first token 30.0 ms, end 100.0 ms, 40 > 9 tokens"):
        assert word in text
    assert "prefill 10.0.0.1:50061, decode 10.0.0.1:50061" in text
    assert "step 7, 40 tokens" in text and "70.0 ms decode" in text


def test_processes_of_one_role_are_told_apart():
    other = phase("decode", "decode", 100_000, 100_000, address="10.0.0.2:50071")
    text = "\n".join(line.plain for line in lines(make(more=[other]), 120))
    assert "decode 10.0.0.1:50061" in text and "decode 10.0.0.2:50071" in text


def test_a_phase_that_lasts_is_marked():
    running = make()
    running.outcome = ""
    running.phases[-1].ClearField("end_us")
    found = [line.plain for line in lines(running, 80)]
    assert found[1].startswith("runs, ") and "so far 100.0 ms" in found[1]
    assert [("…" in line) for line in found[3:7]] == [False, False, False, True]


def test_traces_of_several_gateways_are_in_one_order():
    one, two, three = (make(f"{number:016x}-1", received=number) for number in (1, 2, 3))
    one.total_us = 500_000
    latest = trace_pb2.GetTracesRequest(limit=2)
    assert [t.id[15] for t in in_order([two, one, three], latest)] == ["3", "2"]
    slowest = trace_pb2.GetTracesRequest(limit=1, slowest=True)
    assert in_order([two, one, three], slowest) == [one]
    named = trace_pb2.GetTracesRequest(ids=[three.id, one.id])
    assert in_order([one, three], named) == [three, one]


def test_chromes_format():
    found = chrome_trace([make(received=1500), make("00000000000000ff-2", received=1000)])["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert list(processes.values()) == ["gateway", "prefill 10.0.0.1:50061", "decode 10.0.0.1:50061"]
    complete = [e for e in found if e["ph"] == "X"]
    assert len(complete) == 8 and {e["tid"] for e in complete} == {1, 2}
    second = [e for e in complete if e["args"]["request"] == "00000000000000ff-1"]
    assert [(e["name"], e["ts"], e["dur"]) for e in second][:2] == [
        ("admit", 500_000, 200),
        ("queue", 500_200, 9_800),
    ]
    begun, ended = [e for e in found if e["ph"] in "be" and e["tid"] == 2]
    assert (begun["id"], begun["ts"], ended["ts"]) == (ended["id"], 510_000, 529_000)


def test_chromes_format_is_kept():
    """The rules of the format's description, also for a request that runs."""
    running = make("00000000000000ff-2", received=1100, more=[phase("decode", "decode", 100_000, None)])
    running.outcome = ""
    running.phases[-1].ClearField("end_us")
    running.work.append(
        trace_pb2.TracePhase(name="pull", role="decode", address="10.0.0.9:1", start_us=100_001)
    )
    event = running.events.add(role="decode", address="10.0.0.1:50061", at_us=50)
    event.event.kind = trace_pb2.EVENT_RETRIED
    found = json.loads(json.dumps(chrome_trace([make(), running])))["traceEvents"]
    slices = defaultdict(list)
    begun: dict[tuple[str, str, int], float] = {}
    for each in found:
        assert isinstance(each["name"], str) and isinstance(each["pid"], int), each
        if each["ph"] == "M":
            assert each["name"] in ("process_name", "thread_name") and each["args"]["name"]
            continue
        assert isinstance(each["tid"], int) and each["ts"] >= 0, each
        if each["ph"] == "X":
            assert each["dur"] >= 0
            slices[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
        elif each["ph"] == "i":
            assert each["s"] in ("g", "p", "t")
        else:  # asynchronous events are matched by category, id and name
            key = each["cat"], each["id"], each["name"]
            if each["ph"] == "b":
                assert begun.setdefault(key, each["ts"]) == each["ts"]
            else:
                assert each["ph"] == "e" and begun.pop(key) <= each["ts"]
    assert not begun, "asynchronous events that do not end"
    for track in slices.values():  # of a track one slice ends before the next begins
        track.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(track)), track
    named = {(each["pid"], each.get("tid")) for each in found if each["ph"] == "M"}
    used = {(each["pid"], tid) for each in found if each["ph"] != "M" for tid in (None, each["tid"])}
    assert used <= named, used - named
