"""Steps that fail: what requests in them are told, which are tried again, and when the device is given up."""

from __future__ import annotations

import pytest
from decode_node import PAGES, SIZE, Node, Runner
from test_attempts import A, B, attempts, placed

from baton.decode.core import MAX_FAILED_STEPS
from baton.decode.types import Done, Failed, Key, Peer
from baton.engine.request import Request
from baton.engine.sampling import SamplingParams
from baton.engine.scheduler import SchedulerConfig
from baton.engine.step_loop import MAX_FAILED_STEPS as MAX_IN_A_ROW
from baton.engine.step_loop import StepPipeline
from baton.gateway.attempts import PROVEN_TOKENS
from baton.handoff.messages import AttemptName, ChunkAnnounced, FirstSampled, PrefillFailed, StartPrefill
from baton.kvcache import KvCache, PageAllocator, PrefixTree
from baton.prefill.core import PrefillCore
from baton.rpc.errors import BatonError, unavailable

STEP_FAILED = unavailable("the step could not be computed", "STEP_FAILED")
NODE_FAILED = unavailable("the node ended", "NODE_FAILED")


def failures(node):
    return [(o.request, o.code, o.reason) for o in node.outputs if isinstance(o, Failed)]


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
    outputs, retired = [], []
    core = PrefillCore(
        KvCache(PageAllocator(PAGES), PrefixTree(SIZE)),
        SchedulerConfig(context_length=512, token_budget=64, max_rows=8),
        lease_grace=9.0,
        max_leased_pages=PAGES,
        flush_to=lambda by_holder: outputs.extend(by_holder["holder"]),
        retire=retired.append,
    )
    runner = Runner()
    runner.fail = [RuntimeError("no answer")]
    pipeline = StepPipeline(core, runner, False, lambda: 1.0)

    def compute(number):
        name = AttemptName(7, number, 0, 0)
        core.side.start("holder", name, Request(name, tuple(range(10)), SamplingParams()), True, 1.0)
        for _ in range(3):
            if (due := pipeline.begin()) is not None:
                pipeline.finish(due)

    compute(1)
    assert [(output.code, output.reason) for output in outputs] == [("UNAVAILABLE", "STEP_FAILED")]
    assert core.step_stats.limit(1.0) == 1.0, "no step is in flight"
    assert not retired, "pulls that wait for the step would begin"
    core.cache.check(idle=True)
    compute(2)
    assert retired == [2] and isinstance(outputs[-1], FirstSampled | ChunkAnnounced)


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
    assert sum(isinstance(o, Done) for o in node.outputs) == 5


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


def test_a_failed_step_counts_although_its_hand_off_was_just_given_up():
    node = Node()
    core, request = node.core, Request(Key("caller", 1), tuple(range(8)), SamplingParams(max_tokens=9))
    asked = []
    core.flush_to = lambda step, outputs, effects: asked.extend(
        (each.address, each.name) for each in effects if isinstance(each, StartPrefill)
    )
    for address in "pq":
        core.peer_changed(address, Peer(True, 0.0, "shm"), "", 0.0)
    core.start(request.key, 7, 0, request, ("p", "q"), 0.0, local_tokens=0)
    node.run(2)
    [(_, name)] = asked
    core.scheduler.requeue(core.scheduler.handoffs[0])
    failed = PrefillFailed(name, "UNAVAILABLE", "NODE_FAILED", "it ended")
    core.receive("q", [failed], 0.0)
    assert request.failed_steps == 0, "another node's word"
    core.receive("p", [failed, failed], 0.0)
    assert request.failed_steps == 1
    node.run(2)
    assert [address for address, _ in asked] == ["p", "q"], "not again there"


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
    from baton.decode import core
    from baton.gateway import attempts as gateway

    assert core.PROVEN_TOKENS == gateway.PROVEN_TOKENS and core.STEP_FAILURES == gateway.STEP_FAILURES
    assert MAX_FAILED_STEPS == 2
