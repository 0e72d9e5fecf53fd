"""What decode and prefill nodes make of their callers' messages, before the core sees any of it."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton import gateway
from baton.config import DecodeConfig, PrefillConfig
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.handoff.fetch import FetchCounters
from baton.handoff.lease import LeaseCounters
from baton.handoff.messages import (
    AttemptName,
    ChunkAnnounced,
    FirstSampled,
    GroupPages,
    PromptSource,
    StartPrefill,
)
from baton.handoff.pull_cost import PullCost
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.layers.batch import FINAL
from baton.rpc.errors import BatonError, exhausted, from_status
from baton.tracing.recorder import EventKind, Recorder
from baton.v1 import common_pb2, decode_pb2, node_pb2, prefill_pb2
from baton.worker.decode.shell import DecodeShell
from baton.worker.decode.stream import DecodeStream
from baton.worker.decode.types import DecodeCounters, DoneOutput
from baton.worker.handoff_messages import events_from, request_for
from baton.worker.hidden_states import MOST_BYTES, HiddenForm, last_rows, layers_to
from baton.worker.prefill.core import PrefillCounters
from baton.worker.prefill.shell import FULL_STEP, LeaseStream, PrefillShell
from baton.worker.shell import WorkerShell

INFO = node_pb2.ModelInfo(vocab_size=100, context_length=64)


class Surroundings:
    """No engine and no peers: what would reach the core is written down."""

    incarnation, draining, model_info, core_or_none, device = 7, False, INFO, None, "cpu"

    def __init__(self, config):
        self.recorder = Recorder(0)
        self.config, self.calls, self.connected, self.full = config, [], [], False
        self.steps = SimpleNamespace(call=self.calls.append, step_age=0.0)
        self.peers = SimpleNamespace(check_room=self.check_room, connect=self.connected.append)
        self.sources = SimpleNamespace(lenders=self.lenders)

    def check_room(self, addresses):
        if self.full:
            raise exhausted("too many", "TOO_MANY_PEERS")

    def lenders(self, sources):
        return tuple(source for source in sources if source.incarnation != self.incarnation)

    def clock(self):
        return 100.0


class Executes(WorkerShell):
    """What a process or the simulator reports of itself."""

    def load(self):
        return node_pb2.Load(rows=5)


class Decode(Surroundings, DecodeShell, Executes):
    pass


class Prefill(Surroundings, PrefillShell, Executes):
    pass


def events(stream):
    """What has been put into a stream's outbox since the last call."""
    reading = anext(stream.outbox)
    with pytest.raises(StopIteration) as message:  # nothing is awaited where something is there
        reading.send(None)
    return list(message.value.value.events)


def reason(event):
    assert event.WhichOneof("kind") == "failed"
    return from_status(event.failed).reason


def decode_start(**fields):
    start = decode_pb2.DecodeStart(request=1, attempt=2, **{"token_ids": [1, 2, 3], **fields})
    return decode_pb2.GenerateCommand(start=start)


def choices(*tokens):
    return [decode_pb2.DecodeStart().choices.add(token_ids=each) for each in tokens]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"token_ids": []}, "EMPTY_PROMPT"),
        ({"token_ids": [1] * 65}, "PROMPT_TOO_LONG"),
        ({"token_ids": [100]}, "INVALID_FIELD"),
        ({"choices": choices([100])}, "INVALID_FIELD"),
        ({"choices": choices([1], [2])}, "INVALID_FIELD"),
        ({"sampling": common_pb2.SamplingParams(temperature=-1)}, "INVALID_FIELD"),
    ],
)
def test_a_wrong_start_of_decode_gets_one_terminal_event_and_no_pages(fields, expected):
    node, caller = Decode(DecodeConfig()), DecodeStream(3)
    node.handle_command(decode_start(**fields), caller)
    (event,) = events(caller)
    assert (event.request, event.attempt, reason(event)) == (1, 2, expected)
    assert caller.attempt_of(1) is None and caller.has_ended(1) and not node.calls and not node.connected


def test_a_decode_node_that_drains_or_has_no_room_for_peers_refuses():
    node, caller = Decode(DecodeConfig()), DecodeStream(3)
    node.draining = True
    node.handle_command(decode_start(), caller)
    assert reason(events(caller)[0]) == "DRAINING"
    node.draining, node.full = False, True
    node.handle_command(decode_start(), caller)
    assert reason(events(caller)[0]) == "TOO_MANY_PEERS" and not node.calls


def test_a_good_start_of_decode_reaches_the_core_once():
    node, caller = Decode(DecodeConfig(prefill=("own:1",))), DecodeStream(3)
    given = {"timeout_ms": 500, "local_prefill_tokens": 0, "announce_admission": True}
    given["sources"] = [
        common_pb2.PromptSource(address="s:1", incarnation=9, tokens=4),
        common_pb2.PromptSource(address="own:1", incarnation=7, tokens=4),
    ]
    node.handle_command(decode_start(prefill=["a:1", "b:1", "a:1"], **given), caller)
    assert node.connected == ["a:1", "b:1"] and caller.attempt_of(1) == 2
    (call,), started = node.calls, []

    def start(*given, announce, sources, lenders):
        started.append((*given, announce, sources, lenders))

    call(SimpleNamespace(start=start), 5.0)
    key, gateway, attempt, request, candidates, now, local, announce, sources, lenders = started[0]
    assert sources == (PromptSource("s:1", 9, 4), PromptSource("own:1", 7, 4))
    assert lenders == sources[:1]
    assert (key.caller, key.request, gateway, attempt, now, local) == (caller, 1, 3, 2, 5.0, 0)
    assert candidates == ("a:1", "b:1") and request.deadline == 100.5 and announce
    assert request.params.max_tokens == 61  # what the context has left
    with pytest.raises(BatonError, match="is running on this stream"):
        node.handle_command(decode_start(), caller)
    start = decode_pb2.DecodeStart(request=2, token_ids=[1])
    node.handle_command(decode_pb2.GenerateCommand(start=start), caller)
    assert node.connected[2:] == ["own:1"]  # its own, where the caller names none


def test_cancel_and_pause_reach_the_core_for_what_runs_only():
    node, caller = Decode(DecodeConfig()), DecodeStream(3)
    caller.begin(1, 2)
    for command in (
        {"cancel": decode_pb2.DecodeCancel(request=1, attempt=2)},
        {"pause": decode_pb2.DecodePause(request=1, attempt=2, paused=True)},
    ):
        node.handle_command(decode_pb2.GenerateCommand(**command), caller)
    seen = []
    core = SimpleNamespace(
        cancel=lambda key: seen.append((key.caller, key.request)),
        pause=lambda key, paused: seen.append((key.caller, key.request, paused)),
    )
    for call in node.calls:
        call(core, 1.0)
    assert seen == [(caller, 1), (caller, 1, True)]
    for command in (
        {"cancel": decode_pb2.DecodeCancel(request=1, attempt=3)},
        {"pause": decode_pb2.DecodePause(request=9, attempt=1)},
    ):
        node.handle_command(decode_pb2.GenerateCommand(**command), caller)
        assert reason(events(caller)[0]) == "UNKNOWN_ATTEMPT"
    assert len(node.calls) == 2
    with pytest.raises(BatonError, match="after `hello` sets"):
        node.handle_command(decode_pb2.GenerateCommand(), caller)


def test_a_heartbeat_is_answered_at_once_unless_a_step_may_be_stuck():
    node, caller = Decode(DecodeConfig()), DecodeStream(3)
    beat = decode_pb2.GenerateCommand(heartbeat=decode_pb2.DecodeHeartbeat())
    node.core_or_none = SimpleNamespace(step_stats=SimpleNamespace(limit=lambda floor: max(floor, 0.5)))
    node.handle_command(beat, caller)
    assert events(caller) == [] and not node.calls
    node.steps.step_age = 0.6
    node.handle_command(beat, caller)
    assert not len(caller.outbox) and len(node.calls) == 1, "the step thread answers"


def prefill_start(**fields):
    name = common_pb2.Attempt(gateway=3, request=1, attempt=1, decode_try=1)
    start = prefill_pb2.PrefillStart(attempt=name, **{"token_ids": [1, 2, 3], **fields})
    return prefill_pb2.PrefillRequest(start=start)


@pytest.mark.parametrize(
    ("fields", "draining", "expected"),
    [
        ({"token_ids": [100]}, False, "INVALID_FIELD"),
        ({"delivered": 3}, False, "INVALID_FIELD"),
        ({"n": 2, "delivered": 1}, False, "INVALID_FIELD"),
        ({}, True, "DRAINING"),
    ],
)
def test_a_wrong_start_of_prefill_gets_one_terminal_event(fields, draining, expected):
    node, caller = Prefill(PrefillConfig()), LeaseStream(3)
    node.draining = draining
    node.handle_command(prefill_start(**fields), caller)
    (event,) = events(caller)
    assert event.attempt.request == 1 and reason(event) == expected and not node.calls


def test_a_good_start_of_prefill_reaches_the_core_once():
    node, caller = Prefill(PrefillConfig()), LeaseStream(3)
    node.recorder = Recorder(4)
    node.handle_command(prefill_start(delivered=1, keep_pages=False, announce_ahead=True), caller)
    with pytest.raises(BatonError, match="started twice"):
        node.handle_command(prefill_start(), caller)
    (call,), started = node.calls, []
    start = SimpleNamespace(start=lambda *arguments, drafts: started.append((*arguments, drafts)))
    call(start, 5.0)
    assert [event.kind for event in node.recorder.of([(3, 1)])] == [EventKind.RECEIVED]
    holder, name, request, keep, now, ahead, _, drafts = started[0]
    assert not drafts
    assert (holder, name.request, keep, now, ahead) == (caller, 1, False, 5.0, True)
    assert (request.prompt, request.delivered) == ((1, 2), ((3,),))


def test_a_half_closed_stream_ends_when_its_attempts_have():
    node, caller, closed = Prefill(PrefillConfig()), LeaseStream(3), []
    node.post, caller.close = lambda function: function(), lambda: closed.append(caller)
    node.half_closed(caller)
    (call,), waiting = node.calls, []
    call(SimpleNamespace(close_when_idle=lambda *arguments: waiting.append(arguments)), 5.0)
    ((stream, close),) = waiting
    assert stream is caller and not closed
    close()
    assert closed == [caller]


def test_a_prefill_node_whose_steps_are_stuck_takes_no_callers():
    node = Prefill(PrefillConfig())
    node.core_or_none = SimpleNamespace(step_stats=SimpleNamespace(limit=lambda floor: 0.5))
    node.steps.step_age = 0.6
    with pytest.raises(BatonError, match="in one step"):
        node.open(prefill_pb2.PrefillHello(incarnation=3))
    assert not node.calls
    node.steps.step_age, node.make_stream = 0.4, LeaseStream
    assert node.open(prefill_pb2.PrefillHello(incarnation=3)) and len(node.calls) == 1


OWN = {"first_page": 2, "page_ids": [7, 5], "generations": [1, 2**40]}
OTHERS = [
    {"first_page": 3, "page_ids": [9], "generations": [4]},
    {"first_page": 4},  # a window that begins behind these pages
]


@pytest.mark.parametrize("groups", [1, 3])
def test_chunks_are_announced_by_kv_group(groups):
    node, others = Prefill(PrefillConfig()), OTHERS[: groups - 1]
    node.make_stream = LeaseStream
    caller = node.open(prefill_pb2.PrefillHello(incarnation=3))
    of_groups = [
        GroupPages(each["first_page"], tuple(each.get("page_ids", ())), tuple(each.get("generations", ())))
        for each in (OWN, *others)
    ]
    chunk = ChunkAnnounced(AttemptName(1, 2, 3, 4), tuple(of_groups), True, 6)
    node._deliver({caller: [chunk]})
    (event,) = events(caller)
    assert event.chunk == prefill_pb2.ChunkReady(last=True, step=6, groups=[OWN, *others])
    assert list(events_from(prefill_pb2.PrefillResponse(events=[event]), 100, {})) == [chunk]


def test_hidden_states_are_sent_to_callers_that_ask_for_them():
    """As many of the last tokens as have room, bit by bit."""
    node, form = Prefill(PrefillConfig()), HiddenForm((1, FINAL), 2 * 4096, torch.bfloat16)
    node.make_stream = LeaseStream
    assert layers_to(form.layers) == [1, 2**32 - 1]
    caller = node.open(prefill_pb2.PrefillHello(incarnation=3, hidden_layers=layers_to(form.layers)))
    assert caller.hidden_layers == form.layers
    states = torch.randn(9, form.values).bfloat16()
    name = AttemptName(1, 2, 3, 4)
    node._deliver({caller: [FirstSampled(name, ((5, None),), 3, (), last_rows(states))]})
    (event,) = events(caller)
    assert len(event.first.hidden) == MOST_BYTES
    response = prefill_pb2.PrefillResponse(events=[event])
    (found,) = events_from(response, 100, {}, form)
    assert torch.equal(found.hidden, states[-4:])
    assert next(events_from(response, 100, {})).hidden is None
    with pytest.raises(BatonError, match="65536 bytes of hidden states, of 24576 bytes a token"):
        list(events_from(response, 100, {}, replace(form, values=3 * 4096)))
    wide = torch.randn(2, 2**17)
    node._deliver({caller: [FirstSampled(name, ((5, None),), 3, (), last_rows(wide))]})
    assert events(caller)[0].first.hidden == wide[1:].numpy().tobytes()


@pytest.mark.parametrize("layers", [[3, 1], [1, 1], list(range(17))])
def test_a_prefill_node_refuses_layers_out_of_order(layers):
    with pytest.raises(BatonError, match="hidden_layers ascend and are at most 16"):
        Prefill(PrefillConfig()).open(prefill_pb2.PrefillHello(incarnation=3, hidden_layers=layers))


@pytest.mark.parametrize("grammar", [None, common_pb2.Grammar(regex="a+")])
def test_a_prefill_node_compiles_what_an_output_must_be(grammar):
    node, compiled, told = Prefill(PrefillConfig()), [], []
    node.model_info = node_pb2.ModelInfo(vocab_size=100, context_length=64, grammars=True)
    node.compile_grammar = lambda source, done: compiled.append(done)
    node.handle_command(prefill_start(sampling=common_pb2.SamplingParams(grammar=grammar)), LeaseStream(3))
    assert len(compiled) == (grammar is not None) and len(node.calls) == 1
    for done in compiled:
        done("a grammar")
    core = SimpleNamespace(compiled=lambda *arguments: told.append(arguments[2]))
    for call in node.calls[1:]:
        call(core, 5.0)
    assert told == ["a grammar"] * len(compiled)


@pytest.mark.parametrize("given", ["", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"])
def test_a_span_belongs_to_the_callers_trace(given):
    node, begun = Decode(DecodeConfig()), []
    node.recorder.begin_span = lambda *name, operation, traceparent: begun.append(traceparent) or ""
    node.handle_command(decode_start(traceparent=given), DecodeStream(3))
    assert begun == [given] * bool(given)


@pytest.mark.parametrize("given", ["", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"])
def test_a_prefill_nodes_span_belongs_to_the_callers_trace(given):
    node, begun = Prefill(PrefillConfig()), []
    node.recorder.begin_span = lambda *name, operation, traceparent: begun.append((operation, traceparent))
    node.handle_command(prefill_start(traceparent=given), LeaseStream(3))
    assert begun == [("prefill", given)] * bool(given)


@pytest.mark.parametrize(("remaining", "expected"), [(float("inf"), 0), (2.5, 2500), (-1.0, 1)])
def test_a_prefill_node_is_told_how_much_time_is_left(remaining, expected):
    params = SamplingParams()
    request = EngineRequest("key", (1, 2, 3), params)
    name = AttemptName(1, 2, 3, 4)
    effect = StartPrefill("a:1", name, request, params, (1, 2, 3), 0, 1, remaining)
    start = request_for(effect, False).start
    assert (start.HasField("timeout_ms"), start.timeout_ms) == (expected > 0, expected)


def test_what_a_step_yields_for_a_caller_is_one_message():
    node, callers = Decode(DecodeConfig()), [DecodeStream(3), DecodeStream(4)]
    node.page_bytes, node.peers.perform = 64, lambda effects: None
    done = DoneOutput(1, 2, decode_pb2.RequestStats())
    node._deliver(9, [(caller, done) for caller in callers * 2], [])
    assert node.messages == 2 and [len(events(caller)) for caller in callers] == [2, 2]


@pytest.mark.parametrize(("device", "full_step"), [("cpu", sys.maxsize), ("cuda", FULL_STEP)])
def test_limits_of_a_prefill_node(device, full_step):
    node = Prefill(PrefillConfig(max_leased_fraction=0.25, lease_grace_seconds=7.0, max_waiting=9))
    node.device, node.model_info = device, node_pb2.ModelInfo(context_length=64)
    core = node.make_core(KvCacheManager(PageAllocator(40), PrefixTree(4)))
    limits = core.scheduler.config
    assert (limits.full_step, limits.max_waiting, limits.context_length) == (full_step, 9, 64)
    assert limits.prompt_only and not core.scheduling.prompt_only
    assert (core.leases._max_pages, core.leases._grace) == (10, 7.0)


def test_a_prefill_node_reports_its_leases_and_counters():
    node = Prefill(PrefillConfig())
    assert node.load() == node_pb2.Load(rows=5)
    counters, prompts = LeaseCounters(1, 2, 3, 4, 5), PrefillCounters(6, 7, 8)
    leases = SimpleNamespace(announced=10, oldest=lambda now: now - 98.5, counters=counters)
    node.core_or_none = SimpleNamespace(leases=leases, requests=11, counters=prompts)
    reported = {name: getattr(counters, name) for name in ("finished", "failed", "cancelled")}
    reported |= asdict(prompts)
    assert node.load() == node_pb2.Load(
        rows=5,
        leases=10,
        requests=11,
        oldest_lease_ms=1500,
        leases_expired=counters.leases_expired,
        leases_revoked=counters.leases_revoked,
        **reported,
    )


@pytest.mark.parametrize("cost", [None, PullCost(0.25, 0.5)])
def test_a_decode_node_reports_its_handoffs_and_counters(cost):
    node = Decode(DecodeConfig())
    assert node.load() == node_pb2.Load(rows=5)
    node.page_bytes, node.messages = 64, 9
    node.peers.pull_meter = SimpleNamespace(cost=cost)
    counters = FetchCounters(pulled_pages=10, retries={"SILENT": 2, "PEER_LOST": 3})
    node.core_or_none = SimpleNamespace(
        requests=11,
        fetches=SimpleNamespace(running=range(12), pulls=range(13), counters=counters),
        counters=DecodeCounters(1, 2, 3, 4, 5, 6, 7),
        scheduler=SimpleNamespace(local_prompts=14),
        paused=15,
        overload=SimpleNamespace(first_token=SimpleNamespace(value=1.5), wait=2.5),
    )
    assert node.load() == node_pb2.Load(
        rows=5,
        requests=11,
        handing_off=12,
        pulls=13,
        pulled_pages=10,
        pulled_bytes=640,
        handoff_retries=5,
        handoff_retry_reasons=counters.retries,
        messages=9,
        prompt_tokens=1,
        cached_tokens=2,
        output_tokens=3,
        finished=4,
        failed=5,
        cancelled=6,
        refused=7,
        local_prefills=14,
        paused=15,
        first_token_ms=1500,
        wait_ms=2500,
        pull_cost=cost and node_pb2.PullCost(fixed=0.25, token=0.5),
    )


@pytest.mark.parametrize(
    "module",
    ["backpressure", "decode_client", "preparation", "request", "resume", "routing", "runtime", "shell"],
)
def test_what_the_simulator_runs_of_a_gateway_has_no_clock_or_connection_of_its_own(module):
    """Its names, but for those of code that only a process runs."""
    source = (Path(gateway.__file__).parent / f"{module}.py").read_text()
    imported = set(re.findall(r"^(?:import|from) (asyncio|time|grpc\.aio)\b", source, re.MULTILINE))
    allowed = {"backpressure": {"asyncio"}, "routing": {"time"}}  # writes to clients; a default
    assert imported == allowed.get(module, set())
