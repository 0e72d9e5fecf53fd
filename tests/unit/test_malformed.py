"""Messages that cannot be parsed: the field is named, where finding it costs little."""

from __future__ import annotations

import time

import pytest
from google.protobuf.message import DecodeError

from baton.rpc.interceptors import error_of
from baton.v1 import inference_pb2

REQUEST = inference_pb2.GenerateRequest.DESCRIPTOR
SEARCH_SECONDS = 0.1
"""Of CPU time."""


def request_with(stops: int) -> bytes:
    """A GenerateRequest with so many empty stop strings, and with an id that is not UTF-8."""
    start = inference_pb2.GenerateStart(id="IDENT")
    start.sampling.stop.extend([""] * stops)
    data = inference_pb2.GenerateRequest(start=start).SerializeToString().replace(b"IDENT", b"IDEN\xff")
    with pytest.raises(DecodeError):
        inference_pb2.GenerateRequest.FromString(data)
    return data


def test_the_field_of_a_small_message_is_named():
    error = error_of(request_with(3), REQUEST)
    assert (error.reason, error.field) == ("INVALID_UTF8", "start.id")


def test_a_large_message_costs_no_search():
    data = request_with(2_000_000)
    before = time.thread_time()
    error = error_of(data, REQUEST)
    assert time.thread_time() - before < SEARCH_SECONDS
    assert (error.reason, error.field) == ("MALFORMED_MESSAGE", "message")
