"""Timelines in Chrome's trace event format, which Perfetto opens: in each process one track a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from baton.cli.node_reports import ORDER
from baton.v1 import trace_pb2

_MARKED = (trace_pb2.EVENT_RETRIED, trace_pb2.EVENT_RESUMED, trace_pb2.EVENT_RETRACTED)


def chrome_trace(traces: Sequence[trace_pb2.Trace]) -> dict[str, Any]:
    """A JSON object. Times are microseconds since the first of the requests was received. The format:
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    ordered = sorted(traces, key=lambda trace: trace.received_unix_ms)
    begin = ordered[0].received_unix_ms if ordered else 0
    processes = {(each.role, each.address) for trace in ordered for each in (*trace.phases, *trace.work)}
    pids = {process: pid for pid, process in enumerate(sorted(processes, key=_rank), 1)}
    events: list[dict[str, Any]] = []
    for (role, address), pid in pids.items():
        name = {"name": f"{role} {address}".rstrip()}
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": name})
    for tid, trace in enumerate(ordered, 1):
        start = 1000 * (trace.received_unix_ms - begin)
        for pid in sorted({pids[each.role, each.address] for each in (*trace.phases, *trace.work)}):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": trace.id}}
            )
        events += _phases(trace, pids, tid, start)
        events += _work(trace, pids, tid, start)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rank(process: tuple[str, str]) -> tuple[int, str]:
    role, address = process
    return ORDER.get(role, len(ORDER)), address


def _phases(
    trace: trace_pb2.Trace, pids: dict[tuple[str, str], int], tid: int, start: int
) -> Iterator[dict[str, Any]]:
    for phase in trace.phases:
        end = phase.end_us if phase.HasField("end_us") else trace.total_us
        yield {
            "ph": "X",
            "name": phase.name,
            "cat": "phase",
            "pid": pids[phase.role, phase.address],
            "tid": tid,
            "ts": start + phase.start_us,
            "dur": end - phase.start_us,
            "args": {"request": trace.id, "detail": phase.detail},
        }
    for event in trace.events:
        pid = pids.get((event.role, event.address))
        if event.event.kind in _MARKED and pid is not None:
            name = trace_pb2.EventKind.Name(event.event.kind).removeprefix("EVENT_").lower()
            at = {"pid": pid, "tid": tid, "ts": start + max(0, event.at_us)}
            yield {"ph": "i", "s": "t", "name": f"{name} {event.event.text}", "cat": "event", **at}


def _work(
    trace: trace_pb2.Trace, pids: dict[tuple[str, str], int], tid: int, start: int
) -> Iterator[dict[str, Any]]:
    """Asynchronous events, because pieces of work may overlap."""
    for number, work in enumerate(trace.work):
        end = work.end_us if work.HasField("end_us") else trace.total_us
        same = {
            "name": work.name,
            "cat": "work",
            "id": f"{tid}.{number}",
            "pid": pids[work.role, work.address],
        }
        args = {"request": trace.id, "detail": work.detail}
        yield {"ph": "b", **same, "tid": tid, "ts": start + work.start_us, "args": args}
        yield {"ph": "e", **same, "tid": tid, "ts": start + max(end, work.start_us)}
