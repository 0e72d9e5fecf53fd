"""Attempts at a request, and the liveness of a decode node: no network, no clock."""

import pytest

from baton.gateway.decode_client import Liveness
from baton.gateway.resume import ResumeAttempts, ResumePolicy, Wait
from baton.gateway.token_log import TokenLog
from baton.rpc.errors import BatonError, exhausted, internal, unavailable
from baton.v1 import common_pb2, decode_pb2
from baton.worker.convert import delivered_from

LENGTH = common_pb2.FINISH_REASON_LENGTH

A, B = "a", "b"


def first(addresses):
    return addresses[0]


LOST = unavailable("a was lost", "DECODE_LOST")


def attempts(n=1, max_resumes=8, **options):
    log = TokenLog("x", n=n)
    return log, ResumeAttempts(log, ResumePolicy(max_resumes, 10.0), **options)


def placed(made, nodes, now=0.0):
    address = made.choose(nodes, now, first)
    made.begin(address)
    return address


def test_a_lost_node_is_left_for_another_with_all_that_was_received():
    log, made = attempts(n=3)
    assert placed(made, [A, B]) == "a" and made.delivered() == ()
    made.progress()
    log.choices[0].append([1, 2], "")
    log.choices[1].append([3], "", finish_reason=LENGTH)
    made.ended(LOST, 1.0, lost=True)
    assert not made.current("a", 0)
    assert placed(made, [A, B], 1.0) == "b"
    assert made.current("b", 1) and not made.current("b", 0) and not made.current("a", 1)
    assert made.delivered() == ((1, 2), None, ())
    assert made.resumed == 1


def test_a_node_that_failed_is_asked_again_a_little_later():
    _, made = attempts()
    placed(made, [A])
    made.ended(LOST, 5.0, lost=True)
    wait = made.choose([A], 5.0, first)
    assert isinstance(wait, Wait) and 0 < wait.seconds <= 0.1
    assert made.choose([A], 5.0 + wait.seconds, first) == "a"


def test_a_node_may_refuse_for_as_long_as_the_request_waits():
    log = TokenLog("x", n=1)
    made, now = ResumeAttempts(log, ResumePolicy(0, 7200.0)), 0.0
    for _ in range(2000):
        placed(made, [A], now)
        made.ended(unavailable("no prefill node", "NO_PREFILL_NODE"), now, lost=False)
        now += 1.0
    assert placed(made, [A], now) == "a"


def test_refusals_cost_no_resume_and_full_nodes_end_what_has_no_output():
    _, made = attempts(max_resumes=0)
    for _ in range(2):
        placed(made, [A, B])
        made.ended(exhausted("full", "QUEUE_FULL"), 0.0, lost=False)
    with pytest.raises(BatonError, match="full"):
        made.choose([A, B], 0.0, first)
    assert made.resumed == 0


def test_a_request_that_drained_nodes_hand_back_uses_up_no_resume():
    """Found by the simulator, seed 98000192 with changes of role: planned changes ended a request."""
    log, made = attempts(max_resumes=1)
    for count in range(1, 4):
        placed(made, [A, B], 10.0 * count)
        made.progress()
        log.choices[0].append([count], "")
        made.ended(unavailable("the node drains", "DRAINING"), 10.0 * count, lost=False)
        assert made.resumed == count, "it is told of all of them"
    placed(made, [A, B], 50.0)
    made.ended(LOST, 50.0, lost=True)
    placed(made, [A, B], 60.0)
    with pytest.raises(BatonError) as raised:
        made.ended(LOST, 60.0, lost=True)
    assert raised.value.reason == "TOO_MANY_RESUMES", "those of lost nodes count"


def test_a_full_node_says_so_although_another_one_was_lost_since():
    """Found by the simulator, seed 934: the request failed with the loss, as if nothing could be reached."""
    _, made = attempts()
    placed(made, [A, B])
    made.ended(exhausted("full", "QUEUE_FULL"), 0.0, lost=False)
    placed(made, [B])
    made.ended(unavailable("b was lost", "DECODE_LOST"), 0.0, lost=True)
    with pytest.raises(BatonError) as raised:
        made.choose([A], 5.0, first)
    assert raised.value.reason == "QUEUE_FULL"


def test_waiting_for_a_node_ends():
    _, made = attempts()
    assert isinstance(made.choose([], 100.0, first), Wait)
    assert isinstance(made.choose([], 109.9, first), Wait)
    with pytest.raises(BatonError) as error:
        made.choose([], 110.1, first)
    assert error.value.reason == "NO_DECODE_NODE"


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"max_resumes": 0}, LOST, "TOO_MANY_RESUMES"),
        ({"resumable": False}, LOST, "DECODE_LOST"),
        ({}, internal("x"), "INTERNAL"),
    ],
)
def test_what_ends_a_request_with_output(options, error, reason):
    log, made = attempts(**options)
    placed(made, [A])
    made.progress()
    log.choices[0].append([1], "")
    with pytest.raises(BatonError) as raised:
        made.ended(error, 0.0, lost=error is LOST)
    assert raised.value.reason == reason


def test_with_every_last_token_there_is_nothing_to_resume():
    log, made = attempts()
    placed(made, [A])
    log.choices[0].append([1], "", finish_reason=LENGTH)
    made.ended(LOST, 0.0, lost=True)
    assert made.done and made.resumed == 0


def test_a_pulse_asks_once_and_tells_silence():
    liveness = Liveness(8.0)
    assert not liveness.tick(0.0, active=False)
    assert liveness.tick(1.0, active=True) and not liveness.tick(2.0, active=True)
    assert not liveness.silent(8.9)
    for now in range(3, 11):
        liveness.tick(float(now), active=True)
    assert liveness.silent(9.1)
    liveness.received()
    assert not liveness.silent(9.1)


def test_a_pause_of_its_own_is_no_silence_of_the_node():
    liveness = Liveness(8.0)
    assert liveness.tick(0.0, active=True)
    assert liveness.tick(60.0, active=True) and not liveness.silent(60.0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"choices": [{"token_ids": [1]}], "n": 2}, "choices"),
        ({"choices": [{"token_ids": [1]}], "delivered": 1}, "choices"),
        ({"choices": [{"finished": True}]}, "choices"),
        ({"choices": [{"token_ids": [1, 2, 3]}]}, "choices[0].token_ids"),
        ({"choices": [{}, {}], "n": 2, "sampling": {"prompt_logprobs": 1}}, "sampling.prompt_logprobs"),
    ],
)
def test_a_resume_that_cannot_be_is_refused(fields, field):
    start = decode_pb2.DecodeStart(**{"token_ids": [1, 2], "sampling": {"max_tokens": 3}, **fields})
    with pytest.raises(BatonError) as error:
        delivered_from(start, start.n or 1, 100)
    assert error.value.field == field


def test_what_a_start_says_to_have_been_delivered():
    choices = [{"token_ids": [1]}, {"finished": True}, {}]
    start = decode_pb2.DecodeStart(token_ids=[9], sampling=common_pb2.SamplingParams(), choices=choices)
    assert delivered_from(start, 3, 100) == ((1,), None, ())
    assert delivered_from(decode_pb2.DecodeStart(token_ids=[9, 1], delivered=1), 1, 100) == ((1,),)
    assert delivered_from(decode_pb2.DecodeStart(token_ids=[9, 1]), 1, 100) == ()
