"""What is wrong is refused by Prefill.Run and PageSource.Fetch, asked directly; others are served on."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from deployment import Deployment
from streams import Stream
from worker_streams import INVALID, WRONG_STARTS, Prefill, attempt, ended

from baton.rpc.errors import from_status
from baton.v1 import common_pb2, prefill_pb2


def several(*requests: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(several=prefill_pb2.PrefillRequests(requests=requests))


@pytest.fixture
def prefill(demo: Deployment) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(demo.prefill.address) as channel:
        yield channel


@pytest.fixture
def layout(demo: Deployment) -> common_pb2.Layout:
    return demo.prefill.info().layout


@pytest.fixture
def hello(layout: common_pb2.Layout) -> prefill_pb2.PrefillHello:
    return prefill_pb2.PrefillHello(incarnation=99, layout=layout)


@pytest.mark.parametrize("first", [{"heartbeat": {}}, {"start": {"token_ids": [5]}}, {}])
def test_prefill_wants_a_hello(prefill, first):
    stream = Prefill(prefill, None)
    stream.say(**first)
    ended(stream, INVALID, "INVALID_FIELD", "hello.incarnation")


def test_prefill_two_hellos_and_malformed_messages(prefill, hello):
    for message, reason, field in (
        (prefill_pb2.PrefillRequest(hello=hello), "INVALID_FIELD", "kind"),
        (several(prefill_pb2.PrefillRequest(hello=hello)), "INVALID_FIELD", "kind"),
        (several(several(prefill_pb2.PrefillRequest(heartbeat={}))), "INVALID_FIELD", "kind"),
        (several(*[prefill_pb2.PrefillRequest(cancel={})] * 131_073), "TOO_MANY_ENTRIES", "message"),
        (b"", "INVALID_FIELD", "kind"),
        (b"\xff", "MALFORMED_MESSAGE", "message"),
    ):
        stream = Prefill(prefill, hello)
        stream.send(message)
        ended(stream, INVALID, reason, field)


def test_prefill_refuses_another_layout(prefill, hello):
    for name, value in (
        ("page_size", 32),
        ("model_fingerprint", "00"),
        ("version", hello.layout.version + 1),
    ):
        stream = Prefill(prefill, None)
        wrong = prefill_pb2.PrefillHello()
        wrong.CopyFrom(hello)
        setattr(wrong.layout, name, value)
        stream.say(hello=wrong)
        text = f"{name} is {getattr(hello.layout, name)} at the prefill node and {value} at the decode node"
        ended(stream, grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_MISMATCH", None, text)
    wrong = prefill_pb2.PrefillHello()
    wrong.CopyFrom(hello)
    wrong.layout.groups[0].dtype = "float8"
    stream = Prefill(prefill, None)
    stream.say(hello=wrong)
    text = "groups[0].dtype is float32 at the prefill node and float8 at the decode node"
    ended(stream, grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_MISMATCH", None, text)


def test_prefill_duplicate_attempt_on_one_stream(prefill, hello, demo: Deployment):
    stream, name = Prefill(prefill, hello), attempt()
    stream.start(name)
    stream.start(name)
    ended(stream, INVALID, "DUPLICATE_ATTEMPT", "start.attempt")
    demo.assert_idle()


def test_prefill_attempts_of_others(prefill, hello, demo: Deployment):
    """A name that runs on another stream can neither be started again, nor released, nor cancelled."""
    owner, other, name = Prefill(prefill, hello), Prefill(prefill, hello), attempt()
    owner.start(name)
    owner.until("first")
    other.start(name)
    assert from_status(other.until("failed").failed).reason == "DUPLICATE_ATTEMPT"
    other.say(release=prefill_pb2.LeaseRelease(attempt=name))
    assert from_status(other.until("failed").failed).reason == "UNKNOWN_ATTEMPT"
    other.say(cancel=prefill_pb2.PrefillCancel(attempt=name))
    assert from_status(other.until("failed").failed).reason == "UNKNOWN_ATTEMPT"
    assert demo.prefill.load().leases == 1
    owner.say(release=prefill_pb2.LeaseRelease(attempt=name))
    assert owner.until("finished").finished.stood
    owner.leave()
    other.leave()
    demo.assert_idle()


def test_prefill_names_never_heard_of(prefill, hello):
    stream = Prefill(prefill, hello)
    for fields in (
        {"cancel": prefill_pb2.PrefillCancel(attempt=attempt())},
        {"several": prefill_pb2.PrefillRequests(requests=[{"cancel": {"attempt": attempt()}}])},
        {"release": prefill_pb2.LeaseRelease(attempt=attempt())},
        {"release": prefill_pb2.LeaseRelease()},
    ):
        stream.say(**fields)
        error = from_status(stream.until("failed").failed)
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_ATTEMPT")
    for case, (fields, field) in WRONG_STARTS.items():
        if case not in ("fills the context", "beyond the context"):  # of prompt and output together: decode's
            stream.start(attempt(), **fields)
            assert from_status(stream.until("failed").failed).code is INVALID, field
    stream.start(attempt(), keep_pages=False)
    assert stream.until("finished").finished.stood


def test_holders_that_leave_lose_their_leases(prefill, hello, demo: Deployment):
    stream = Prefill(prefill, hello)
    for _ in range(8):
        stream.start(attempt())
    for _ in range(8):
        stream.until("first")
    assert demo.prefill.load().leases == 8
    stream.leave()
    demo.assert_idle()


def test_fetch_of_pages_that_are_none(prefill, layout):
    stream = Stream(prefill, "PageSource/Fetch", prefill_pb2.FetchResponse)
    for pages in ([2**32 - 1], [0, 10**6]):
        stream.send(prefill_pb2.FetchRequest(id=3, page_ids=pages))
        answer = stream.next()
        assert answer.id == 3 and from_status(answer.error).field == "page_ids"
    stream.send(prefill_pb2.FetchRequest(id=4))
    assert stream.next() == prefill_pb2.FetchResponse(id=4, last=True)
    stream.send(prefill_pb2.FetchRequest(id=5, page_ids=[0]))
    page = stream.next()
    assert page.last and len(page.data) == 16 * sum(
        group.layers * group.bytes_per_token for group in layout.groups
    )
    stream.send(b"\xff")
    ended(stream, INVALID, "MALFORMED_MESSAGE", "message")
