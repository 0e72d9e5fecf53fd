"""What a decode node sends to one caller: merged tokens, and events without delay."""

import asyncio
import time

from baton.decode.callers import Caller, merge
from baton.v1 import decode_pb2


def tokens(*ids, request=1, choice=0, finish=0):
    delta = decode_pb2.TokenDelta(request=request, choice=choice, token_ids=ids, finish_reason=finish)
    return decode_pb2.StepEvents(step=1, tokens=[delta])


def test_tokens_of_one_choice_are_joined_in_order():
    merged = merge(merge(tokens(5), tokens(6, choice=1)), tokens(7, 8, finish=1))
    assert [(d.choice, list(d.token_ids), d.finish_reason) for d in merged.tokens] == [
        (0, [5, 7, 8], 1),
        (1, [6], 0),
    ]


async def test_tokens_gather_and_events_do_not_wait():
    caller = Caller(1)

    async def paused(message):
        pause = asyncio.create_task(caller.pause(0.2))
        await asyncio.sleep(0)
        started = time.monotonic()
        caller.send(message)
        await pause
        return time.monotonic() - started

    assert await paused(tokens(5)) > 0.1
    finished = decode_pb2.DecodeEvent(request=1, finished=decode_pb2.DecodeFinished())
    assert await paused(decode_pb2.StepEvents(events=[finished])) < 0.1
    assert list((await anext(caller.outbox)).tokens[0].token_ids) == [5]
