"""Streams to the inner services from stock stubs, and starts that they must refuse."""

from __future__ import annotations

from itertools import count

import grpc
from streams import ANSWER_SECONDS, Stream

from baton.rpc.errors import BatonError, from_rpc_error, from_status
from baton.v1 import common_pb2, decode_pb2, prefill_pb2

Command, Start = decode_pb2.GenerateCommand, decode_pb2.DecodeStart
Sampling = common_pb2.SamplingParams
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PROMPT = [*range(5, 205)]
FOUR = Sampling(temperature=0, max_tokens=4, ignore_eos=True)
numbers = count(1)
"""For names that no other test has used."""

WRONG_STARTS = {
    "no tokens": ({"token_ids": []}, "token_ids"),
    "too long": ({"token_ids": [5] * 2049}, "token_ids"),
    "fills the context": ({"token_ids": [5] * 2048}, "token_ids"),
    "vocabulary": ({"token_ids": [5, 4096]}, "token_ids[1]"),
    "all delivered": ({"delivered": len(PROMPT)}, "delivered"),
    "delivered all it may": ({"delivered": 4}, "delivered"),
    "choices of a resume": ({"delivered": 2, "n": 2}, "n"),
    "n 0": ({"n": 0}, "n"),
    "n 17": ({"n": 17}, "n"),
    "stop strings": ({"sampling": Sampling(stop=["a"])}, "sampling.stop"),
    "top_p": ({"sampling": Sampling(top_p=2)}, "sampling.top_p"),
    "max_tokens": ({"sampling": Sampling(max_tokens=10**12)}, "sampling.max_tokens"),
    "beyond the context": ({"sampling": Sampling(max_tokens=2048)}, "sampling.max_tokens"),
}


class Decode(Stream):
    def __init__(self, channel: grpc.Channel, incarnation: int = 7, hello: bool = True) -> None:
        super().__init__(channel, "Decode/Generate", decode_pb2.StepEvents)
        if hello:
            self.send(Command(hello=decode_pb2.DecodeHello(incarnation=incarnation)))
            assert self.next().events[0].welcome.incarnation

    def start(self, request: int, **fields) -> None:
        self.send(Command(start=Start(**{"token_ids": PROMPT, "sampling": FOUR, **fields}, request=request)))

    def ends(self, *requests: int, seconds: float = ANSWER_SECONDS) -> dict[int, BatonError | int]:
        """How each of them ended: its error, or the number of its tokens. Exactly once each."""
        tokens, ended = dict.fromkeys(requests, 0), {}
        while len(ended) < len(requests):
            message = self.next(seconds)
            assert isinstance(message, decode_pb2.StepEvents), message
            for delta in message.tokens:
                assert delta.request not in ended
                tokens[delta.request] += len(delta.token_ids)
            for event in message.events:
                if event.WhichOneof("kind") in ("finished", "failed"):
                    assert event.request in tokens and event.request not in ended
                    failed = event.WhichOneof("kind") == "failed"
                    ended[event.request] = from_status(event.failed) if failed else tokens[event.request]
        return ended


class Prefill(Stream):
    def __init__(self, channel: grpc.Channel, hello: prefill_pb2.PrefillHello | None) -> None:
        super().__init__(channel, "Prefill/Run", prefill_pb2.PrefillResponse)
        self._events: list[prefill_pb2.PrefillEvent] = []
        if hello is not None:
            self.say(hello=hello)
            assert self.event().welcome.incarnation

    def say(self, **fields) -> None:
        self.send(prefill_pb2.PrefillRequest(**fields))

    def start(self, attempt: common_pb2.Attempt, **fields) -> None:
        fields = {"token_ids": PROMPT, "sampling": FOUR, **fields}
        self.say(start=prefill_pb2.PrefillStart(attempt=attempt, **fields))

    def event(self) -> prefill_pb2.PrefillEvent:
        if not self._events:
            message = self.next()
            assert isinstance(message, prefill_pb2.PrefillResponse), message
            self._events += message.events
        return self._events.pop(0)

    def until(self, kind: str) -> prefill_pb2.PrefillEvent:
        while True:
            event = self.event()
            if event.WhichOneof("kind") == kind:
                return event
            assert event.WhichOneof("kind") not in ("finished", "failed"), event


def attempt(gateway: int = 99) -> common_pb2.Attempt:
    return common_pb2.Attempt(gateway=gateway, request=next(numbers))


def ended(stream: Stream, code: grpc.StatusCode, reason: str, field: str | None, text: str = "") -> None:
    """The whole call has been refused, with a message that contains `text`."""
    answer = stream.next()
    while not isinstance(answer, grpc.RpcError):
        assert answer is not None
        answer = stream.next()
    error = from_rpc_error(answer)
    assert (error.code, error.reason, error.field) == (code, reason, field), error
    assert text in error.message, error
