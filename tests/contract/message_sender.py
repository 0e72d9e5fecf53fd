"""Sends serialized messages by stock gRPC, and returns the reason and field of the error. Imports little:
it runs in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from baton.rpc.errors import BatonError, from_rpc_error, from_status
from baton.v1 import inference_pb2

Said = tuple[str, str | None]


def _said(error: BatonError) -> Said:
    return error.reason, error.field


@contextmanager
def _channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        yield channel


def generate(address: str, file: Path) -> Said:
    with _channel(address) as channel:
        call = channel.stream_stream("/baton.v1.Inference/Generate")(iter([file.read_bytes()]), timeout=60)
        answer = [inference_pb2.GenerateResponse.FromString(each) for each in call][-1]
        rejected = answer.WhichOneof("kind") == "rejected"
        return _said(from_status(answer.rejected.status if rejected else answer.failed))


def complete(address: str, file: Path) -> Said:
    with _channel(address) as channel:
        try:
            channel.unary_unary("/baton.v1.Inference/Complete")(file.read_bytes(), timeout=60)
        except grpc.RpcError as error:
            return _said(from_rpc_error(error))
    raise AssertionError("it was answered")
