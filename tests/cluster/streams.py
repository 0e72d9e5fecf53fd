"""One bidirectional gRPC call, driven message by message; bytes go out as they are."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from baton.v1 import common_pb2, inference_pb2

CALL_SECONDS = 280.0
"""A file's tests may share a call."""
ANSWER_SECONDS = 30.0
"""Within which whatever is wrong must have been refused; two cores shared with others."""
TERMINAL = ("finished", "failed", "rejected")


class Stream:
    def __init__(self, channel: grpc.Channel, method: str, answer: type[Message]) -> None:
        self._out: queue.SimpleQueue[Message | bytes | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[Any] = queue.SimpleQueue()
        open_call = channel.stream_stream(
            f"/baton.v1.{method}",
            request_serializer=lambda message: (
                message if isinstance(message, bytes) else message.SerializeToString()
            ),
            response_deserializer=answer.FromString,
        )
        self._call = open_call(iter(self._out.get, None), timeout=CALL_SECONDS)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._in.put(message)
            self._in.put(None)
        except grpc.RpcError as error:
            self._in.put(error)

    def send(self, message: Message | bytes) -> None:
        self._out.put(message)

    def half_close(self) -> None:
        self._out.put(None)

    def leave(self) -> None:
        self._call.cancel()
        self._out.put(None)

    def next(self, seconds: float = ANSWER_SECONDS) -> Any:
        """The next message; None: the stream ended well; an RpcError: it did not. Raises queue.Empty."""
        return self._in.get(timeout=seconds)

    def silent(self, seconds: float = 0.2) -> bool:
        try:
            self._in.get(timeout=seconds)
        except queue.Empty:
            return True
        return False


class Inference(Stream):
    """A call of Inference.Generate."""

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__(channel, "Inference/Generate", inference_pb2.GenerateResponse)

    def start(self, id: str = "one", **fields: Any) -> None:
        self.send(inference_pb2.GenerateRequest(start=inference_pb2.GenerateStart(id=id, **fields)))

    def cancel(self, id: str) -> None:
        self.send(inference_pb2.GenerateRequest(cancel=inference_pb2.GenerateCancel(id=id)))

    def terminal(self, id: str | None = None, seconds: float = ANSWER_SECONDS) -> Any:
        """The next terminal event (of that request), or what ended the stream."""
        while True:
            event = self.next(seconds)
            if not isinstance(event, inference_pb2.GenerateResponse):
                return event
            if event.WhichOneof("kind") in TERMINAL and id in (None, event.id):
                return event

    def serves(self, id: str = "good") -> None:
        """The stream lives: it answers a request."""
        sampling = common_pb2.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        self.start(id, text="hello", sampling=sampling)
        event = self.terminal(id)
        assert event.finished.usage.output_tokens == 3, event


@contextmanager
def inference(address: str) -> Iterator[Inference]:
    with grpc.insecure_channel(address) as channel:
        stream = Inference(channel)
        try:
            yield stream
        finally:
            stream.leave()
