"""Timelines of requests through real processes whose clocks are apart, with delays put into each phase."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator

import grpc
import pytest
from deployment import Deployment

from baton.v1 import trace_pb2, trace_pb2_grpc

SHIFTS = {"tokenizer": 10, "prefill": 5, "decode": 15}
"""Seconds by which a process's monotonic clock is ahead of the gateway's."""
DELAY = 0.6
TRIES = 12
TOKENS = 5
DELAYS = """
import json, os, time

def delay(what, parts=1):
    with open(os.environ["DELAYS"]) as file:
        time.sleep(json.load(file).get(what, 0.0) / parts)

def before(owner, name, what, when=lambda *arguments: True, parts=1):
    original = getattr(owner, name)
    def delayed(*arguments, **more):
        if when(*arguments):
            delay(what, parts)
        return original(*arguments, **more)
    setattr(owner, name, delayed)
"""
SHIFTED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.unshare(0x80)
with open("/proc/self/timens_offsets", "w") as file:
    file.write("monotonic {} 0")
descriptor = os.open("/proc/self/ns/time_for_children", os.O_RDONLY)
assert not libc.setns(descriptor, 0x80)
"""
PRELUDES = {
    "gateway": """
from baton.gateway.gateway import Gateway
before(Gateway, "routing", "gateway")
""",
    "tokenizer": """
from baton.tokenizer import service
before(service, "encode_all", "tokenizer")
""",
    "prefill": """
from baton.engine.scheduler import Scheduler
from baton.engine.step_loop import StepPipeline
before(Scheduler, "_try_admit", "queue")
before(StepPipeline, "_launch", "chunk", lambda pipeline, step: step is not None)
""",
    "decode": f"""
from baton.worker.peers import PullTask
from baton.engine.step_loop import StepPipeline
before(StepPipeline, "_launch", "step", lambda pipeline, step: step is not None, {TOKENS} - 1)
before(PullTask, "_copied", "pull")
""",
}


def _time_namespaces() -> bool:
    """Asked of a child: unshare changes what this process's own children get."""
    child = os.fork()
    if not child:
        os._exit(1 if ctypes.CDLL(None).unshare(0x80) else 0)
    return os.waitpid(child, 0)[1] == 0


pytestmark = [
    pytest.mark.times,
    pytest.mark.skipif(not _time_namespaces(), reason="time namespaces need CAP_SYS_ADMIN"),
]


class Traced:
    def __init__(self, deployment: Deployment, delays) -> None:
        self.deployment, self._delays = deployment, delays
        self.client = deployment.client()
        self.delay()

    def delay(self, **seconds: float) -> None:
        self._delays.write_text(json.dumps(seconds))

    def prompt(self) -> str:
        """One that nobody has cached."""
        return f"{uuid.uuid4()} " + "def main(): " * 20

    def ask(self) -> trace_pb2.Trace:
        answer = self.client.generate(self.prompt(), max_tokens=TOKENS, ignore_eos=True)
        return self.trace(answer.request_id)

    def trace(self, id: str) -> trace_pb2.Trace:
        answer = self.traces(ids=[id])
        assert len(answer.traces) == 1, answer
        return answer.traces[0]

    def traces(self, **question) -> trace_pb2.GetTracesResponse:
        with grpc.insecure_channel(self.deployment.gateway.address) as channel:
            ask = trace_pb2_grpc.TracesStub(channel).GetTraces
            return ask(trace_pb2.GetTracesRequest(**question), timeout=20)


@pytest.fixture(scope="module")
def traced(tmp_path_factory, deployments) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traces")
    delays = folder / "delays.json"
    delays.write_text("{}")
    deployment = Deployment.split(folder, "demo", decode=2)
    for process in deployment.processes:
        process.environment["DELAYS"] = str(delays)
        shift = SHIFTS.get(process.role)
        shifted = SHIFTED.format(shift) if shift else ""
        process.prelude = DELAYS + shifted + PRELUDES[process.role]
    with deployment:
        deployments.append(deployment)
        yield Traced(deployment, delays)


def length(phase: trace_pb2.TracePhase) -> float:
    return (phase.end_us - phase.start_us) / 1e6


def lengths(phases) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for phase in phases:
        name = phase.name, phase.role
        found[name] = found.get(name, 0.0) + length(phase)
    return found


def check_phases(trace: trace_pb2.Trace) -> None:
    """They follow one another without gaps, and those before the first token add up to its time."""
    place = 0
    for phase in trace.phases:
        assert phase.start_us == place and phase.end_us >= place, trace
        place = phase.end_us
    assert place == trace.total_us
    before = [phase for phase in trace.phases if phase.start_us < trace.ttft_us]
    assert sum(phase.end_us - phase.start_us for phase in before) == trace.ttft_us


@pytest.mark.parametrize(
    ("what", "phase"),
    [
        ("tokenizer", ("tokenize", "tokenizer")),
        ("gateway", ("route", "gateway")),
        ("queue", ("queue", "prefill")),
        ("chunk", ("prefill", "prefill")),
        ("pull", ("pull", "decode")),
        ("step", ("decode", "decode")),
    ],
)
def test_a_delay_is_found_in_its_phase(traced, what, phase):
    """Whatever else the machine does only adds time: of several requests the least counts."""
    traced.delay()
    traced.ask()  # costs of first times
    usual: dict[tuple[str, str], float] = {}
    found: dict[tuple[str, str], float] = {}
    for _ in range(TRIES):
        for seconds, least in ((0.0, usual), (DELAY, found)):
            traced.delay(**{what: seconds})
            try:
                trace = traced.ask()
            finally:
                traced.delay()
            check_phases(trace)
            for name, value in lengths(trace.phases).items():
                least[name] = min(value, least.get(name, value))
        grown = {name: value - usual.get(name, 0.0) for name, value in found.items()}
        if grown.get(phase, 0.0) == pytest.approx(DELAY, rel=0.1) and max(grown, key=grown.get) == phase:
            return
    raise AssertionError(f"{phase} was to grow by {DELAY:g} s: {grown}")


def test_clocks_that_are_apart_are_matched(traced):
    """Events of other processes lie within what the gateway itself has seen."""
    for _ in range(3):
        check_events(traced.ask())


def check_events(trace: trace_pb2.Trace) -> None:
    roles = {event.role for event in trace.events}
    assert roles == {"gateway", "tokenizer", "prefill", "decode"}
    clocks = {}
    for event in trace.events:
        # The prefill node is released after the end, on a busy machine much later.
        released = (event.role, event.event.kind) == ("prefill", trace_pb2.EVENT_ENDED)
        assert event.at_us >= -1000 and (released or event.at_us <= trace.total_us + 50_000), event
        clocks[event.role] = event.event.clock_us
    for role, shift in SHIFTS.items():
        assert (clocks[role] - clocks["gateway"]) / 1e6 == pytest.approx(shift, abs=2.0)
    order = [(event.role, event.event.kind) for event in trace.events]
    sent, received = trace_pb2.EVENT_SENT, trace_pb2.EVENT_RECEIVED
    path = [("gateway", sent), ("decode", received), ("decode", sent), ("prefill", received)]
    first = trace_pb2.EVENT_FIRST_TOKEN
    path += [("prefill", first), ("decode", first), ("gateway", first)]
    places = [order.index(step) for step in path]
    assert places == sorted(places), order


def test_the_timeline_adds_up_to_what_the_client_is_told(traced):
    answer = traced.client.generate(traced.prompt(), max_tokens=TOKENS, ignore_eos=True)
    trace = traced.trace(answer.request_id)
    assert trace.outcome == "finished"
    assert (trace.prompt_tokens, trace.output_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.output_tokens,
    )
    assert trace.ttft_us / 1e6 == pytest.approx(answer.stats.ttft, abs=0.002)
    work = {phase.name for phase in trace.work}
    assert work == {"tokenize", "chunk", "pull"}
    pull = next(phase for phase in trace.work if phase.name == "pull")
    assert "shm" in pull.detail and "MiB" in pull.detail


def test_a_running_request_is_seen_and_across_a_resume(traced):
    traced.delay(step=0.1 * (TOKENS - 1))
    answer = []

    def ask() -> None:
        answer.append(traced.client.generate(traced.prompt(), max_tokens=24, ignore_eos=True))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        deadline = time.monotonic() + 30
        while True:
            running = [t for t in traced.traces(limit=5).traces if not t.outcome and t.output_tokens >= 1]
            running = running or [
                t for t in traced.traces(limit=1).traces if not t.outcome and t.HasField("ttft_us")
            ]
            if running and running[0].phases[-1].name == "decode":
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        last = running[0].phases[-1]
        assert not last.HasField("end_us")
        victim = next(p for p in traced.deployment.of("decode") if p.address == last.address)
        victim.kill()
        asking.join(60)
    finally:
        traced.delay()
    trace = traced.trace(answer[0].request_id)
    check_phases(trace)
    assert trace.outcome == "finished" and answer[0].stats.resumed == 1
    names = [phase.name for phase in trace.phases]
    assert "resume" in names, names
    resume = trace.phases[names.index("resume")]
    assert resume.detail == "DECODE_LOST"
    after = trace.phases[names.index("resume") + 1 :]
    other = next(p for p in traced.deployment.of("decode") if p is not victim)
    assert {phase.address for phase in after if phase.role == "decode"} == {other.address}
    missing = traced.traces(ids=[trace.id]).missing
    assert [line.split(": ")[0] for line in missing] == [f"decode {victim.address}"]
    decoded = [phase for phase in after if phase.name == "decode"]
    assert decoded and length(decoded[-1]) >= 0.1
    victim.start()
    victim.wait_ready()


def test_slowest_come_first_and_unknown_ones_are_left_out(traced):
    slow = traced.traces(limit=3, slowest=True, gateway_only=True).traces
    assert [t.total_us for t in slow] == sorted((t.total_us for t in slow), reverse=True)
    assert {event.role for trace in slow for event in trace.events} == {"gateway"}
    assert not traced.traces(ids=["0123456789abcdef-1", "nonsense"]).traces
    with pytest.raises(grpc.RpcError) as caught:
        traced.traces(limit=1000)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_same_over_http_as_json(traced):
    trace = traced.ask()
    url = f"http://{traced.deployment.gateway.http}/traces"
    with urllib.request.urlopen(f"{url}?id={trace.id}", timeout=20) as response:
        found = json.load(response)["traces"]
    assert [each["id"] for each in found] == [trace.id]
    # Clocks are compared anew for each question, and phases too short for their error are left out.
    assert {"tokenize", "prefill", "decode"} <= {each["name"] for each in found[0]["phases"]}
    with urllib.request.urlopen(f"{url}?limit=2&slowest=true&gateway_only=1", timeout=20) as response:
        assert len(json.load(response)["traces"]) == 2
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(f"{url}?limit=many", timeout=20)
