"""What a decode node sends to one caller: merged tokens, and events without delay."""

import asyncio

import pytest

from baton.engine.plan import Logprobs
from baton.engine.request import EngineFinishReason
from baton.v1 import common_pb2, decode_pb2
from baton.worker.decode import stream
from baton.worker.decode.stream import DecodeStream, add_output, merge, pieces
from baton.worker.decode.types import DoneOutput, TokensOutput
from virtual_time import skip_waits


@pytest.fixture(autouse=True)
async def virtual_time(monkeypatch):
    skip_waits(monkeypatch, stream)


def tokens(*ids, request=1, choice=0, finish=0):
    delta = decode_pb2.TokenDelta(request=request, choice=choice, token_ids=ids, finish_reason=finish)
    return decode_pb2.StepEvents(step=1, tokens=[delta])


def test_tokens_of_one_choice_are_joined_in_order():
    merged = merge(merge(tokens(5), tokens(6, choice=1)), tokens(7, 8, finish=1))
    assert [(d.choice, list(d.token_ids), d.finish_reason) for d in merged.tokens] == [
        (0, [5, 7, 8], 1),
        (1, [6], 0),
    ]


def prompt(request):
    return decode_pb2.DecodeEvent(request=request, prompt=decode_pb2.PromptDone())


def finished(request):
    return decode_pb2.DecodeEvent(request=request, finished=decode_pb2.DecodeFinished())


def test_of_a_large_message_prompts_come_before_tokens_and_ends_behind(monkeypatch):
    monkeypatch.setattr(stream, "MAX_ANSWER_BYTES", 100)
    monkeypatch.setattr(stream, "PIECE_BYTES", 60)
    deltas = [decode_pb2.TokenDelta(request=number, token_ids=range(20)) for number in range(5)]
    message = decode_pb2.StepEvents(step=3, events=[finished(1), prompt(2)], tokens=deltas)
    order = []
    for piece in pieces(message):
        assert piece.step == 3 and piece.ByteSize() <= 60
        order += [event.WhichOneof("kind") for event in piece.events if event.HasField("prompt")]
        order += [delta.request for delta in piece.tokens]
        order += [event.WhichOneof("kind") for event in piece.events if event.HasField("finished")]
    assert order == ["prompt", 0, 1, 2, 3, 4, "finished"]


class Written:
    """What a caller's stream writes, and when."""

    def __init__(self, caller):
        self.messages = []
        self.at = []
        self.task = asyncio.create_task(self._write(caller))

    async def _write(self, caller):
        async for message in caller.messages():
            self.messages.append(
                ([e.request for e in message.events], {d.request: list(d.token_ids) for d in message.tokens})
            )
            self.at.append(asyncio.get_running_loop().time())

    async def end(self, caller):
        caller.close()
        await asyncio.wait_for(self.task, 5)


async def started(caller, *requests):
    """A stream on which everybody has had a first token, and tokens gather."""
    written = Written(caller)
    for request in requests:
        caller.begin(request, 1)
        caller.send(tokens(0, request=request))
    await asyncio.sleep(0.01)
    caller.send(tokens(0, request=requests[0]))
    await asyncio.sleep(0.01)
    assert sum(len(given) for _, given in written.messages) == len(requests) + 1
    written.messages.clear()
    written.at.clear()
    return written


async def test_tokens_gather():
    caller = DecodeStream(1, 0.2)
    written = await started(caller, 1, 2)
    before = asyncio.get_running_loop().time()
    for id in (5, 6, 7):
        caller.send(tokens(id, request=1))
        caller.send(tokens(id + 10, request=2))
        await asyncio.sleep(0.02)
    assert not written.messages
    await asyncio.sleep(0.2)
    assert written.messages == [([], {1: [5, 6, 7], 2: [15, 16, 17]})] and written.at[0] - before > 0.1
    await written.end(caller)


async def test_what_leaves_early_and_hurries_nobody_leaves_whole():
    """A timer may end a little early."""
    caller = DecodeStream(1, 0.2)
    for now, id in ((10.0, 5), (10.1, 6)):
        left = caller.leaving(tokens(id), now)
        assert [list(delta.token_ids) for delta in left.tokens] == [[id]] and not len(caller.outbox)
        assert caller.due(now) == pytest.approx(now + 0.2)


async def test_an_end_takes_along_only_its_own_tokens():
    caller = DecodeStream(1, 0.3)
    written = await started(caller, 1, 2, 3)
    for request in (1, 2, 3):
        caller.send(tokens(request, request=request))
    caller.send(decode_pb2.StepEvents(step=9, events=[finished(2)]))
    await asyncio.sleep(0.02)
    assert written.messages == [([2], {2: [2]})]
    caller.send(tokens(11, request=1))
    await asyncio.sleep(0.35)
    assert written.messages[1:] == [([], {1: [1, 11], 3: [3]})], "the others gathered on, in order"
    await written.end(caller)


async def test_a_first_token_does_not_wait_even_after_its_event():
    caller = DecodeStream(1, 0.3)
    written = await started(caller, 1)
    caller.send(tokens(5, request=1))
    caller.begin(2, 1)
    caller.send(decode_pb2.StepEvents(events=[prompt(2)]))
    await asyncio.sleep(0.02)
    caller.send(tokens(8, request=2))
    await asyncio.sleep(0.02)
    caller.send(tokens(9, request=2))
    await asyncio.sleep(0.02)
    assert written.messages == [([2], {}), ([], {2: [8]})]
    await asyncio.sleep(0.3)
    assert written.messages[2:] == [([], {1: [5], 2: [9]})]
    await written.end(caller)


async def test_what_does_not_wait_does_not_make_the_next_step_wait():
    caller = DecodeStream(1, 0.3)
    written = await started(caller, 1)
    await asyncio.sleep(0.35)
    caller.begin(2, 1)
    caller.send(tokens(8, request=2))
    await asyncio.sleep(0.02)
    caller.send(tokens(5, request=1))
    await asyncio.sleep(0.02)
    assert written.messages == [([], {2: [8]}), ([], {1: [5]})]
    caller.send(decode_pb2.StepEvents(step=9, events=[finished(2)]))
    caller.send(tokens(6, request=1))
    await asyncio.sleep(0.02)
    assert written.messages[2:] == [([2], {})], "these had been everybody's: from then on tokens gather"
    await written.end(caller)


async def test_events_all_the_time_do_not_keep_the_others_waiting():
    caller = DecodeStream(1, 0.1)
    written = await started(caller, 1)
    before = asyncio.get_running_loop().time()
    caller.send(tokens(5, request=1))
    for request in range(2, 32):
        caller.begin(request, 1)
        caller.send(decode_pb2.StepEvents(events=[prompt(request)]))
        await asyncio.sleep(0.01)
    (at,) = [at for at, (_, given) in zip(written.at, written.messages, strict=True) if 1 in given]
    assert at - before < 0.2
    await written.end(caller)


async def test_nothing_is_kept_back_from_a_stream_that_ends():
    caller = DecodeStream(1, 30.0)
    written = await started(caller, 1, 2)
    for request in (1, 2):
        caller.send(tokens(7, request=request))
    caller.send(decode_pb2.StepEvents(events=[finished(2)]))
    await written.end(caller)
    assert written.messages == [([2], {1: [7], 2: [7]})]


async def test_a_caller_that_has_closed_its_side_gets_all_ends():
    caller = DecodeStream(1, 0.0)
    written = await started(caller, 1, 2)
    caller.half_closed()
    caller.send(decode_pb2.StepEvents(events=[finished(1)]))
    await asyncio.sleep(0.01)
    caller.send(decode_pb2.StepEvents(events=[finished(2)]))
    await asyncio.wait_for(written.task, 5)
    assert [ended for ended, _ in written.messages if ended] == [[1], [2]]


def test_what_a_step_yields_is_one_message_with_finish_reasons_and_log_probabilities():
    message = decode_pb2.StepEvents(step=3)
    add_output(message, TokensOutput(1, 2, 0, 5, Logprobs(5, -0.5, ((6, -1.0),)), None), 64)
    add_output(message, TokensOutput(1, 2, 1, 7, None, EngineFinishReason.STOP), 64)
    add_output(message, TokensOutput(4, 0, 0, 8, None, EngineFinishReason.LENGTH), 64)
    add_output(message, DoneOutput(4, 0, decode_pb2.RequestStats(pulled_pages=3)), 64)
    running, stopped, longest = message.tokens
    assert (running.request, running.attempt, running.choice, list(running.token_ids)) == (1, 2, 0, [5])
    assert running.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
    assert running.logprobs[0].chosen.logprob == -0.5 and running.logprobs[0].top[0].token_id == 6
    assert (stopped.choice, stopped.finish_reason) == (1, common_pb2.FINISH_REASON_STOP)
    assert longest.finish_reason == common_pb2.FINISH_REASON_LENGTH and not stopped.logprobs
    assert message.events[0].finished.stats.pulled_bytes == 3 * 64


def test_what_is_said_of_an_ended_attempt_is_dropped_and_of_one_that_never_was_refused():
    caller = DecodeStream(3)
    caller.begin(1, 2)
    caller.send(decode_pb2.StepEvents(events=[finished(1)]))
    refused = []
    caller.refuse = lambda request, attempt, error: refused.append((request, attempt))
    assert not caller.runs(1, 2) and not refused
    caller.begin(1, 3)
    assert caller.runs(1, 3) and not caller.runs(1, 4) and not caller.runs(9, 1)
    assert refused == [(1, 4), (9, 1)]
