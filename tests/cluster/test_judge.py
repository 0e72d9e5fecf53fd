"""What watches the streams in test_chaos.py sees what is wrong with one."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import status_pb2
from stress import clients
from stress.clients import Judge, ask, judge_event
from stress.tasks import Task

from baton.rpc.errors import BatonError, to_status
from baton.v1 import inference_pb2

TASK = Task(prompt=(1, 2), tokens=(3, 4, 5), text="abc")
Response = inference_pb2.GenerateResponse
ACCEPTED = Response(id="it", accepted=inference_pb2.Accepted())


def delta(*ids: int, text: str) -> inference_pb2.GenerateResponse:
    return Response(id="it", delta=inference_pb2.Delta(token_ids=ids, text=text))


def finished(tokens: int = 3) -> inference_pb2.GenerateResponse:
    usage = inference_pb2.Usage(output_tokens=tokens)
    return Response(id="it", finished=inference_pb2.Finished(usage=usage))


def failed(code: grpc.StatusCode, reason: str = "WHY") -> inference_pb2.GenerateResponse:
    return Response(id="it", failed=to_status(BatonError(code, reason, "because")))


GOOD = [ACCEPTED, delta(3, text="a"), delta(4, 5, text="bc"), finished()]
LOST = failed(grpc.StatusCode.UNAVAILABLE, "DECODE_LOST")
WRONG = {
    "another token": [ACCEPTED, delta(3, 9, text="a")],
    "a token twice": [ACCEPTED, delta(3, text="a"), delta(3, text="a")],
    "a token left out": [ACCEPTED, delta(3, text="a"), delta(5, text="c"), finished()],
    "one token too few": [ACCEPTED, delta(3, 4, text="abc"), finished(2)],
    "one token too many": [*GOOD[:3], delta(6, text=""), finished(4)],
    "another text": [ACCEPTED, delta(3, text="b")],
    "half the text": [ACCEPTED, delta(3, 4, 5, text="ab"), finished()],
    "wrong usage": [*GOOD[:3], finished(7)],
    "accepted twice": [ACCEPTED, ACCEPTED],
    "finished twice": [*GOOD, finished()],
    "failed after it finished": [*GOOD, LOST],
    "no terminal event": GOOD[:3],
    "nothing at all": [],
    "an untyped error": [ACCEPTED, failed(grpc.StatusCode.INTERNAL)],
    "an error without a code": [ACCEPTED, Response(id="it", failed=status_pb2.Status())],
    "somebody else's event": [ACCEPTED, Response(id="other", delta=inference_pb2.Delta())],
    "an empty event": [ACCEPTED, Response(id="it")],
}


async def outcome(events: list[inference_pb2.GenerateResponse], hang: bool = False) -> clients.Outcome:
    judge = Judge(TASK)

    async def come():
        for event in events:
            judge_event(judge, event)
            yield
        if hang:
            await asyncio.sleep(60)

    return await ask(judge, come(), 0.0)


async def test_a_good_stream():
    assert (await outcome(GOOD)).exact


@pytest.mark.parametrize("case", WRONG)
async def test_a_broken_stream(case):
    result = await outcome(WRONG[case])
    assert result.broken and not result.exact


async def test_a_typed_error_is_no_broken_stream():
    result = await outcome([ACCEPTED, delta(3, text="a"), LOST])
    assert (result.error, result.broken, result.exact) == ("DECODE_LOST", "", False)


async def test_a_stream_that_hangs(monkeypatch):
    monkeypatch.setattr(clients, "LATE_SECONDS", 0.05)
    assert "hung" in (await outcome(GOOD[:2], hang=True)).broken
