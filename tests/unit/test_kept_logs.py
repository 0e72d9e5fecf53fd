"""What a decode node keeps of requests whose gateway is gone."""

from types import SimpleNamespace

import pytest
from decode_node import Node
from test_shells import Decode, decode_start, events

from baton.config import DecodeConfig
from baton.engine.request import EngineFinishReason, EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.rpc.errors import BatonError, exhausted
from baton.v1 import common_pb2, decode_pb2
from baton.worker.decode import kept_logs
from baton.worker.decode import stream as decode_stream
from baton.worker.decode.kept_logs import KEEP_SECONDS
from baton.worker.decode.stream import DecodeStream
from baton.worker.decode.types import DoneOutput, FailedOutput, Key, TokensOutput, Turn

LENGTH, ENTRY = common_pb2.FINISH_REASON_LENGTH, common_pb2.PositionLogprobs()


class Kept:
    """A decode node with one request of a gateway, and what its core is told."""

    def __init__(self, **fields):
        self.node, self.now, self.told = Decode(DecodeConfig()), 100.0, []
        self.node.clock = lambda: self.now
        self.node.page_bytes, self.node.peers.perform = 64, lambda effects: None
        self.node.streams = SimpleNamespace(open=set())
        self.caller = DecodeStream(3)
        self.node.handle_command(decode_start(**{"keep_log": True, **fields}), self.caller)
        self.node.calls.clear()

    def say(self, *outputs):
        self.node._deliver(1, [(self.caller, output) for output in outputs], [])

    def tokens(self, *ids, choice=0, finish=None):
        self.say(*(TokensOutput(1, 2, choice, id, None, finish) for id in ids))

    def core(self):
        """What it is told: who is gone with what goes on, and what is cancelled."""
        calls, self.node.calls[:] = list(self.node.calls), []
        told = []
        core = SimpleNamespace(
            caller_gone=lambda caller, going_on: told.append(set(going_on)),
            cancel=lambda key: told.append(key.request),
            pause=lambda key, paused: told.append((key.request, paused)),
        )
        for call in calls:
            call(core, self.now)
        return told

    def take(self, gateway=3, request=1):
        return self.node.take_log(decode_pb2.TakeLogRequest(gateway=gateway, request=request))

    def refuses(self, **name):
        with pytest.raises(BatonError) as refused:
            self.take(**name)
        return refused.value.reason == "UNKNOWN_LOG"


def test_a_request_goes_on_without_its_gateway_and_is_handed_over_once():
    kept = Kept(n=2)
    kept.tokens(5, 6)
    kept.node.drop(kept.caller)
    assert kept.core() == [{1}, (1, False)]
    kept.tokens(7, choice=1)
    kept.tokens(8, finish=EngineFinishReason.LENGTH)
    kept.say(DoneOutput(1, 2, decode_pb2.RequestStats()))
    assert kept.refuses(gateway=4) and kept.refuses(request=2) and kept.core() == []
    log = kept.take()
    assert [list(choice.token_ids) for choice in log.choices] == [[5, 6, 8], [7]]
    assert [choice.finish_reason for choice in log.choices] == [LENGTH, 0]
    assert kept.core() == [1] and kept.refuses()


def test_the_log_begins_with_what_earlier_attempts_have_delivered():
    had = [decode_pb2.DeliveredChoice(token_ids=[4])]
    kept = Kept(choices=had)
    kept.tokens(5)
    kept.node.drop(kept.caller)
    assert list(kept.take().choices[0].token_ids) == [4, 5]


def test_a_request_that_has_finished_is_known_while_its_gateway_may_lose_it():
    kept = Kept()
    kept.tokens(5, finish=EngineFinishReason.LENGTH)
    kept.say(DoneOutput(1, 2, decode_pb2.RequestStats()))
    kept.node.drop(kept.caller)
    assert list(kept.take().choices[0].token_ids) == [5]


def test_a_gateway_whose_end_has_not_been_noticed_loses_its_request():
    kept = Kept()
    kept.node.streams.open.add(kept.caller)
    kept.tokens(5)
    assert list(kept.take().choices[0].token_ids) == [5] and kept.core() == [1]


@pytest.mark.parametrize("why", ["not asked", "cancelled", "slow", "too much", "too large"])
def test_what_is_not_kept_is_cancelled(why, monkeypatch):
    kept = Kept(keep_log=why != "not asked")
    if why == "too much":
        monkeypatch.setattr(decode_stream, "MAX_LOGPROBS", 1)
        delta = decode_pb2.TokenDelta(request=1, attempt=2, token_ids=[5, 6], logprobs=[ENTRY, ENTRY])
        kept.caller.send(decode_pb2.StepEvents(tokens=[delta]))
    if why == "too large":
        monkeypatch.setattr(kept_logs, "MAX_ANSWER_BYTES", 2)
        kept.tokens(5, 6, 7)
    if why == "cancelled":
        kept.say(FailedOutput(1, 2, "CANCELLED", "CANCELLED", "cancelled by its caller"))
    if why == "slow":
        kept.caller.close(exhausted("the caller does not read", "SLOW_READER"))
    kept.node.drop(kept.caller)
    assert kept.core() == ([{1}, (1, False)] if why == "too large" else [set()])
    assert kept.refuses()


@pytest.mark.parametrize("why", ["time", "return", "count", "bytes"])
def test_what_is_kept_no_longer_is_cancelled(why, monkeypatch):
    kept = Kept()
    kept.tokens(5)
    kept.node.drop(kept.caller)
    kept.core()
    if why == "time":
        kept.now += KEEP_SECONDS - 0.1
        kept.node.let_logs_go()
        assert kept.core() == []
        kept.now += 0.2
        kept.node.let_logs_go()
    elif why == "return":
        kept.node.require_turning, kept.node.make_stream = lambda: None, DecodeStream
        kept.node.open(decode_pb2.DecodeHello(incarnation=4))
        assert kept.core() == []
        kept.node.open(decode_pb2.DecodeHello(incarnation=3))
    else:
        monkeypatch.setattr(kept_logs, *(("MAX_LOGS", 1) if why == "count" else ("MAX_BYTES", 3)))
        other = DecodeStream(9)
        kept.node.handle_command(decode_start(keep_log=True), other)
        kept.node.calls.clear()
        kept.node.drop(other)
        assert kept.core() == [{1}, (1, False), 1] and kept.take(gateway=9).choices
    assert kept.refuses() and (why in ("count", "bytes") or kept.core() == [1])


def test_others_do_not_notice():
    kept = Kept()
    kept.tokens(5)
    assert not events(kept.caller) and not len(kept.node.kept)


def test_the_core_goes_on_with_what_is_kept():
    node = Node()
    for number in (1, 2):
        node.start(number, max_tokens=5)
    node.core.caller_gone("caller", {1})
    assert list(node.core.unfinished) == [Key("caller", 1)]
    node.core.cancel(Key("caller", 1))
    assert not node.core.unfinished


def test_a_suspect_whose_gateway_is_gone_ends_and_the_next_has_its_turn():
    """Nobody says `begin` for it."""
    node, prompt = Node(), tuple(range(8))
    for number in (1, 2):
        key, params = Key(f"caller {number}", number), SamplingParams(max_tokens=5)
        node.core.start(key, 1, 0, EngineRequest(key, prompt, params, deadline=60.0, suspect=True), (), 0.0)
    node.run(2)
    turns = [output for output in node.outputs if isinstance(output, Turn)]
    assert [turn.request for turn in turns] == [1]
    node.core.caller_gone("caller 1", {1})
    node.run(2)
    assert list(node.core.unfinished) == [Key("caller 2", 2)]
    assert [output.request for output in node.outputs if isinstance(output, Turn)] == [1, 2]
