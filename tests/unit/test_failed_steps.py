"""Steps that fail: what requests in them are told, which are tried again, and when the device is given up."""

from __future__ import annotations

import pytest
from core_shell import Shell
from decode_node import PAGES, SIZE, Node, Runner
from test_attempts import A, B, attempts, placed

from baton.config import PrefillConfig
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.step_loop import MAX_FAILED_STEPS as MAX_IN_A_ROW
from baton.engine.step_loop import StepPipeline
from baton.gateway.resume import PROVEN_TOKENS
from baton.handoff.messages import (
    AttemptName,
    Beat,
    ChunkAnnounced,
    FirstSampled,
    GroupPages,
    PrefillFailed,
    StartPrefill,
)
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.rpc.errors import BatonError, unavailable
from baton.worker.decode.remote_prefill import CANCEL_SECONDS
from baton.worker.decode.types import MAX_FAILED_STEPS, DoneOutput, FailedOutput, Key, Peer
from baton.worker.prefill.core import PrefillCore

STEP_FAILED = unavailable("the step could not be computed", "STEP_FAILED")
NODE_FAILED = unavailable("the node ended", "NODE_FAILED")


def failures(node):
    return [(o.request, o.code, o.reason) for o in node.outputs if isinstance(o, FailedOutput)]


def test_who_was_in_a_failed_step_goes_on_elsewhere_once():
    node = Node()
    node.start(1)
    node.start(2, failed_steps=1)
    node.runner.fail = [RuntimeError("no answer")]
    node.run(3)
    assert failures(node) == [
        (1, "UNAVAILABLE", "STEP_FAILED"),
        (2, "INTERNAL", "REPEATED_STEP_FAILURE"),
    ]
    assert node.core.step_stats.limit(1.0) == 1.0, "no step is in flight"
    node.core.cache.check(idle=True)


def test_prompts_of_a_failed_step_are_handed_back():
    outputs = []
    shell = Shell(lambda step, by_holder, effects: outputs.extend(by_holder["holder"]))
    core = PrefillCore(
        KvCacheManager(PageAllocator(PAGES), PrefixTree(SIZE)),
        SchedulerConfig(context_length=512, token_budget=64, max_rows=8),
        PrefillConfig(),
        shell,
    )
    runner = Runner()
    runner.fail = [RuntimeError("no answer")]
    pipeline = StepPipeline(core, runner, False, lambda: 1.0)

    def compute(number):
        name = AttemptName(7, number, 0, 0)
        core.start("holder", name, EngineRequest(name, tuple(range(10)), SamplingParams()), True, 1.0)
        for _ in range(3):
            if (due := pipeline.begin()) is not None:
                pipeline.finish(due)

    compute(1)
    assert [(output.code, output.reason) for output in outputs] == [("UNAVAILABLE", "STEP_FAILED")]
    assert core.step_stats.limit(1.0) == 1.0, "no step is in flight"
    assert not shell.retired, "pulls that wait for the step would begin"
    core.cache.check(idle=True)
    compute(2)
    assert shell.retired == [2] and isinstance(outputs[-1], FirstSampled | ChunkAnnounced)


def test_requests_that_may_have_made_a_step_fail_are_computed_one_at_a_time():
    node = Node(max_rows=8)
    for number in range(4):
        node.start(number, max_tokens=12, failed_steps=1)
    node.start(9, max_tokens=12)
    most = 0
    for _ in range(100):
        node.run(1)
        scheduler = node.core.scheduler
        admitted = [*scheduler.prompts, *scheduler.running]
        most = max(most, sum(s.request.failed_steps > 0 for s in admitted))
        if len(scheduler.running) == 3:
            assert not all(s.request.failed_steps for s in scheduler.running), "cleared by its tokens"
    assert most == 1
    assert sum(isinstance(o, DoneOutput) for o in node.outputs) == 5


def test_a_node_that_ends_names_the_requests_that_it_had_admitted():
    node = Node(max_rows=2)
    node.start(1)
    node.start(2, failed_steps=1)
    node.start(3)
    node.run(2)
    del node.outputs[:]
    node.core.node_failed("it ended")
    assert failures(node) == [
        (1, "UNAVAILABLE", "NODE_FAILED"),
        (2, "INTERNAL", "REPEATED_STEP_FAILURE"),
    ]


class HandedOff:
    """A request that is handed off to p or q, in this order."""

    def __init__(self, local_tokens=0, up="pq"):
        self.node, self.asked, self.cancelled = Node(), [], []
        self.core = self.node.core
        self.core.shell = Shell(self.flushed)
        for address in "pq":
            self.set(address, address in up)
        self.request = EngineRequest(Key("caller", 1), tuple(range(8)), SamplingParams(max_tokens=9))
        self.core.start(self.request.key, 7, 0, self.request, ("p", "q"), 0.0, local_tokens=local_tokens)
        self.node.run(2)

    def flushed(self, step, outputs, effects):
        self.asked += [(each.address, each.name) for each in effects if isinstance(each, StartPrefill)]

    @property
    def addresses(self):
        return "".join(address for address, _ in self.asked)

    def set(self, address, up):
        self.core.peer_changed(address, Peer(up, 0.0, "shm"), "")

    def retract(self):
        self.core.scheduler.requeue(self.core.scheduler.handoffs[0])

    def fail(self, address, number, code="UNAVAILABLE", reason="NODE_FAILED"):
        """The answer of `address` to its hand-off of this number."""
        self.core.receive(address, [PrefillFailed(self.asked[number][1], code, reason, "it ended")], 0.0)


def test_a_failed_step_counts_although_its_hand_off_was_just_given_up():
    case = HandedOff()
    case.retract()
    case.fail("q", 0)
    assert case.request.failed_steps == 0, "another node's word"
    case.fail("p", 0)
    case.fail("p", 0)
    assert case.request.failed_steps == 1
    case.node.run(2)
    assert case.addresses == "pq", "not again there"


@pytest.mark.parametrize("answer", ["CANCELLED", "down"])
def test_a_prompt_stays_where_a_step_with_it_may_be_in_flight(answer):
    case = HandedOff(up="q")
    case.set("p", True)
    case.retract()
    case.core.unfinished[case.request.key].local_tokens = 8
    case.node.run(2)
    assert case.addresses == "qq", "neither at p nor here, until q has answered"
    case.fail("q", 0, "CANCELLED", "CANCELLED")
    case.retract()
    if answer == "down":
        case.set("q", False)
    else:
        case.fail("q", 1, "CANCELLED", "CANCELLED")
    case.node.run(1)
    assert case.addresses == "qq" and case.core.scheduler.running, "here"
    assert not case.core.handoffs.given_up


@pytest.mark.parametrize("answer", ["NODE_FAILED", "CANCELLED", "down", "none"])
def test_a_prompt_waits_for_a_node_that_may_have_it_in_a_step(answer):
    """Pages could not be pulled while the prompt was still being computed."""
    case = HandedOff()
    case.core.receive("p", [ChunkAnnounced(case.asked[0][1], (GroupPages(0, (30,), (1,)),), False)], 0.0)
    (fetch,) = case.core.fetches.running.values()
    case.core.fetches.pull_ended(fetch.pull, "no route", None, 0.0)
    case.node.run(3)
    assert case.addresses == "p" and not case.core.fetches.running, "the answer is awaited"
    if answer == "down":
        case.set("p", False)
    elif answer == "none":
        case.node.now += CANCEL_SECONDS
    else:
        case.fail("p", 0, "UNAVAILABLE", answer)
    case.node.run(1)
    assert case.addresses == "pq"
    assert case.request.failed_steps == (answer == "NODE_FAILED")


def test_a_node_that_never_answers_does_not_hide_the_one_that_may_have_the_prompt():
    case = HandedOff()
    case.core.receive("p", [ChunkAnnounced(case.asked[0][1], (GroupPages(0, (30,), (1,)),), False)], 0.0)
    (fetch,) = case.core.fetches.running.values()
    case.core.fetches.pull_ended(fetch.pull, "no route", None, 0.0)
    case.node.now += CANCEL_SECONDS
    case.node.run(2)
    assert case.addresses == "pq"
    case.retract()
    case.core.unfinished[case.request.key].local_tokens = 8
    case.node.run(2)
    assert case.addresses == "pqq", "not here, while q may have the prompt in a step"


def test_a_request_does_not_go_where_another_one_was_given_up():
    case = HandedOff()
    case.retract()
    other = EngineRequest(Key("caller", 2), tuple(range(9, 17)), SamplingParams(max_tokens=9))
    case.core.start(other.key, 7, 0, other, ("p", "q"), 0.0, local_tokens=8)
    case.node.run(2)
    assert case.addresses == "pp" and case.core.scheduler.running, "the other one is computed here"


def test_one_failure_of_two_hand_offs_at_a_node_counts_once():
    case = HandedOff()
    case.retract()
    case.node.run(2)
    assert case.addresses == "pp"
    case.fail("p", 0)
    case.fail("p", 1)
    assert case.request.failed_steps == 1
    case.node.run(2)
    assert case.addresses == "ppq"


@pytest.mark.parametrize("local", [0, 8])
def test_a_failed_step_counts_at_a_node_that_has_refused_the_request_meanwhile(local):
    case = HandedOff()
    case.retract()
    case.node.run(2)
    case.core.unfinished[case.request.key].local_tokens = local
    case.fail("p", 1, "UNAVAILABLE", "DRAINING")
    case.node.run(2)
    assert case.addresses == ("pp" if local else "ppq"), "here, or at the next"
    case.fail("p", 0)
    assert case.request.failed_steps == 1


def test_a_node_that_was_not_connected_when_another_was_chosen_has_not_been_tried():
    """Else the node that the request has ended would be followed by this one, as if there were no other."""
    case = HandedOff(up="q")
    assert case.addresses == "q"
    case.set("p", True)
    case.fail("q", 0)
    case.node.run(2)
    assert case.addresses == "qp" and case.request.failed_steps == 1


def test_an_ended_request_awaits_no_answer():
    case = HandedOff()
    case.retract()
    assert case.core.handoffs.given_up
    case.core.cancel(case.request.key)
    assert not case.core.handoffs.given_up
    case.fail("p", 0)


@pytest.mark.parametrize("waits", [False, True])
def test_a_prompt_is_handed_off_when_no_step_with_it_is_in_flight_here(waits):
    case = HandedOff(local_tokens=8)
    case.core.scheduler.requeue(case.core.scheduler.running[0])
    case.core.unfinished[case.request.key].local_tokens = 0
    case.request.sequences[0].last_step = case.core.scheduler.retired_step + waits
    case.node.run(1)
    assert case.addresses == ("" if waits else "p")
    case.core.node_failed("it ended")
    assert case.request.failed_steps == 1, "it was in a step, though it waits" if waits else "admitted"


@pytest.mark.parametrize(("silence", "grace"), [(1.0, 8.0), (8.0, 1.0)])
def test_heartbeats_are_more_frequent_than_silence_and_a_leases_grace_are_long(silence, grace):
    node = Node(silence=silence)
    core, beats = node.core, []
    core.fetches.shorten_beat(grace)
    core.shell = Shell(
        lambda step, outputs, effects: beats.extend(node.now for each in effects if isinstance(each, Beat))
    )
    core.peer_changed("p", Peer(True, 0.0, "shm"), "")
    request = EngineRequest(Key("caller", 1), tuple(range(8)), SamplingParams())
    core.start(request.key, 7, 0, request, ("p",), 0.0, local_tokens=0)
    for _ in range(65):
        node.run(1)
        node.now += 1 / 64
    assert beats == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("errors", "broken"),
    [
        ([RuntimeError("x")] * (MAX_IN_A_ROW - 1), ""),
        ([RuntimeError("x")] * MAX_IN_A_ROW, "3 steps failed one after the other: x"),
        ([RuntimeError("x"), None] * MAX_IN_A_ROW, ""),
        ([RuntimeError("CUDA error: unspecified launch failure")], "the device is lost: CUDA error"),
        ([RuntimeError("CUDA error: out of memory")], ""),
    ],
)
@pytest.mark.parametrize("where", ["launch", "read"])
def test_a_device_is_given_up_when_its_steps_keep_failing(errors, broken, where):
    node = Node(runner=Runner(where=where))
    node.runner.fail = list(errors)
    for number in range(len(errors)):
        node.start(number, max_tokens=1)
        node.run(2)
    assert node.pipeline.broken.startswith(broken) and bool(node.pipeline.broken) == bool(broken)


def test_the_gateway_retries_a_failed_step_once_at_no_cost():
    _, made = attempts(max_resumes=0)
    placed(made, [A, B])
    assert made.failed_steps == 0
    made.ended(STEP_FAILED, 0.0, lost=False)
    assert placed(made, [A, B]) == B, "elsewhere"
    assert (made.resumed, made.failed_steps) == (0, 1)
    with pytest.raises(BatonError, match="given up"):
        made.ended(STEP_FAILED, 0.0, lost=False)


@pytest.mark.parametrize("error", [STEP_FAILED, NODE_FAILED])
def test_progress_clears_a_request(error):
    log, made = attempts()
    for tokens, failed_steps in [(0, 1), (PROVEN_TOKENS - 1, 2), (PROVEN_TOKENS, 1)]:
        made.begin(A)
        if tokens:
            made.progress()
            log.choices[0].append([1] * tokens, "")
        made.ended(error, 0.0, lost=False)
        assert made.failed_steps == failed_steps


def test_a_node_that_fails_with_a_request_counts_as_a_resume():
    _, made = attempts(max_resumes=1)
    made.begin(A)
    made.ended(NODE_FAILED, 0.0, lost=False)
    assert made.resumed == 1
    made.begin(B)
    with pytest.raises(BatonError) as raised:
        made.ended(NODE_FAILED, 0.0, lost=False)
    assert raised.value.reason == "TOO_MANY_RESUMES"


def test_the_limits_of_both_sides_agree():
    from baton.gateway import resume as gateway
    from baton.worker.decode import suspects, types

    assert suspects.PROVEN_TOKENS == gateway.PROVEN_TOKENS and types.STEP_FAILURES == gateway.STEP_FAILURES
    assert gateway.MAX_FAILED_STEPS == MAX_FAILED_STEPS == 2
