"""An error survives the way over the wire and back."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.rpc.address import new_incarnation
from baton.rpc.errors import DOMAIN, MAX_TEXT_BYTES, BatonError, from_status, invalid, to_status

CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


@given(
    code=st.sampled_from(CODES),
    reason=st.from_regex(r"[A-Z][A-Z_]{0,20}", fullmatch=True),
    message=st.text(min_size=1, max_size=200),
    field=st.none() | st.text(max_size=60),
    retry=st.none() | st.integers(0, 10**9),
)
def test_round_trip(code, reason, message, field, retry):
    error = BatonError(code, reason, message, field=field, retry_after_ms=retry)
    wire = to_status(error).SerializeToString()
    back = from_status(status_pb2.Status.FromString(wire))
    assert (back.code, back.reason, back.message, back.field, back.retry_after_ms) == (
        code, reason, message, field, retry,
    )  # fmt: skip
    assert to_status(back) == to_status(error)


def test_details_are_the_standard_ones():
    status = to_status(invalid("inputs[0].text", "inputs[0].text is too long"))
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.domain, info.reason) == (DOMAIN, "INVALID_FIELD") == ("baton.v1", "INVALID_FIELD")
    assert bad.field_violations[0].field == "inputs[0].text"


@pytest.mark.parametrize("text", ["x" * 100_000, "漢" * 100_000, "x" + "😀" * 100_000])
def test_long_texts_are_cut_between_characters(text):
    status = to_status(BatonError(grpc.StatusCode.INTERNAL, "R", text, field=text))
    assert len(status.message.encode()) <= MAX_TEXT_BYTES
    assert status.message.endswith("...")
    assert text.startswith(status.message[:-3])
    assert status.ByteSize() < 4 * MAX_TEXT_BYTES


def test_a_foreign_status_is_understood():
    status = status_pb2.Status(code=999, message="")
    assert from_status(status).code is grpc.StatusCode.UNKNOWN
    status = status_pb2.Status(code=5, message="gone")
    status.details.add(type_url="type.googleapis.com/some.Other", value=b"\xff\xff")
    error = from_status(status)
    assert (error.code, error.reason, error.message) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "gone")


def test_incarnations():
    drawn = {new_incarnation() for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(1 <= x < 2**64 for x in drawn)
