"""What is wrong is refused by Decode.Generate, asked directly; it serves everybody else on."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from deployment import Deployment
from worker_streams import INVALID, PROMPT, WRONG_STARTS, Command, Decode, Sampling, Start, ended, numbers

from baton.rpc.errors import BatonError, from_status
from baton.v1 import decode_pb2

ONE = Sampling(max_tokens=1, ignore_eos=True)


@pytest.fixture
def decode(demo: Deployment) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(demo.decode.address) as channel:
        yield channel


NO_HELLO = [
    Command(start=Start(request=1, token_ids=PROMPT)),
    Command(cancel=decode_pb2.DecodeCancel(request=1)),
    Command(hello=decode_pb2.DecodeHello(incarnation=0)),
    b"",
]


def several(*commands: Command) -> Command:
    return Command(several=decode_pb2.DecodeCommands(commands=commands))


@pytest.mark.parametrize("first", NO_HELLO, ids=["start", "cancel", "incarnation 0", "nothing"])
def test_decode_wants_a_hello(decode, first):
    stream = Decode(decode, hello=False)
    stream.send(first)
    ended(stream, INVALID, "INVALID_FIELD", "hello.incarnation")


@pytest.mark.parametrize(
    ("message", "reason", "field"),
    [
        (Command(hello=decode_pb2.DecodeHello(incarnation=7)), "INVALID_FIELD", "kind"),
        (several(Command(hello=decode_pb2.DecodeHello(incarnation=7))), "INVALID_FIELD", "kind"),
        (several(several(Command(heartbeat=decode_pb2.DecodeHeartbeat()))), "INVALID_FIELD", "kind"),
        (
            several(*[Command(cancel=decode_pb2.DecodeCancel(request=1))] * 131_073),
            "TOO_MANY_ENTRIES",
            "message",
        ),
        (b"", "INVALID_FIELD", "kind"),
        (b"\xff", "MALFORMED_MESSAGE", "message"),
        (b"\x12\x07\x1a\x01\x05\x52\x02\xff\xfe", "INVALID_UTF8", "start.namespace"),
    ],
)
def test_decode_stream_ends_with_what_it_cannot_answer(decode, message, reason, field):
    stream = Decode(decode)
    stream.send(message)
    ended(stream, INVALID, reason, field)


def test_decode_refuses_starts_and_serves_on(decode):
    stream = Decode(decode)
    for number, (fields, field) in enumerate(WRONG_STARTS.values(), 1):
        stream.start(number, **fields)
        error = stream.ends(number)[number]
        assert isinstance(error, BatonError) and (error.code, error.field) == (INVALID, field), error
    stream.start(100, timeout_ms=0)
    error = stream.ends(100)[100]
    assert isinstance(error, BatonError) and error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    stream.start(101, timeout_ms=2**64 - 1, priority=2**31 - 1)
    assert stream.ends(101) == {101: 4}
    stream.half_close()
    assert stream.next() is None


def test_decode_duplicate_request(decode, demo: Deployment):
    stream = Decode(decode)
    stream.start(1, sampling=Sampling(max_tokens=500, ignore_eos=True))
    stream.start(1)
    ended(stream, INVALID, "DUPLICATE_REQUEST", "start.request")
    demo.assert_idle()


def test_decode_callers_may_use_the_same_names(decode, demo: Deployment):
    """Numbers are unique on a stream only: neither the node nor its prefill node may mix them up."""
    before = len(demo.decode.log.read_text())
    with grpc.insecure_channel(demo.decode.address) as other:
        streams = [Decode(decode), Decode(other), Decode(other)]
        for number in range(1, 5):
            for index, stream in enumerate(streams):
                where = f"{index}-{number}-{next(numbers)}"
                stream.start(number, prefill=[demo.prefill.address], namespace=where)
        for stream in streams:
            assert stream.ends(1, 2, 3, 4) == {1: 4, 2: 4, 3: 4, 4: 4}
            stream.leave()
    again = Decode(decode)
    again.start(1, prefill=[demo.prefill.address], namespace=f"again-{next(numbers)}")
    assert again.ends(1) == {1: 4}
    again.leave()
    # Other tests' peers, which answer wrongly, are cut off in the same log.
    assert f'"link down" address={demo.prefill.address}' not in demo.decode.log.read_text()[before:]


def test_decode_cancel_of_what_does_not_run(decode):
    stream = Decode(decode)
    stream.send(Command(cancel=decode_pb2.DecodeCancel(request=5)))
    event = stream.next().events[0]
    error = from_status(event.failed)
    assert (event.request, error.code, error.reason) == (5, grpc.StatusCode.NOT_FOUND, "UNKNOWN_ATTEMPT")
    stream.start(6, attempt=3, sampling=Sampling(max_tokens=50, ignore_eos=True))
    stream.send(Command(cancel=decode_pb2.DecodeCancel(request=6, attempt=2)))
    kinds = []
    while "finished" not in kinds:
        for event in stream.next().events:
            kinds.append(event.WhichOneof("kind"))
            assert event.attempt == (2 if kinds[-1] == "failed" else 3)
    assert kinds.count("failed") == 1, "the running attempt is not the one that was cancelled"


def test_decode_several_cancels_of_some_that_run(decode):
    """One message, of an attempt that runs, one that does not and a request never heard of."""
    stream = Decode(decode)
    for request in (6, 7):
        stream.start(request, sampling=Sampling(max_tokens=900, ignore_eos=True))
    named = [(6, 0), (7, 2), (8, 0)]
    cancels = [decode_pb2.DecodeCancel(request=request, attempt=attempt) for request, attempt in named]
    stream.send(several(*(Command(cancel=cancel) for cancel in cancels)))
    reasons, before = {}, 0
    while len(reasons) < 3:
        message = stream.next()
        before += sum(len(delta.token_ids) for delta in message.tokens if delta.request == 7)
        for event in message.events:
            if event.HasField("failed"):
                reasons[event.request, event.attempt] = from_status(event.failed).reason
    assert reasons == {(6, 0): "CANCELLED", (7, 2): "UNKNOWN_ATTEMPT", (8, 0): "UNKNOWN_ATTEMPT"}
    assert stream.ends(7) == {7: 900 - before}


def test_decode_10000_starts_at_once(decode, demo: Deployment):
    stream, patient = Decode(decode), Decode(decode, incarnation=8)
    every = range(1, 10_001)
    for number in every:
        stream.start(
            number, token_ids=[5, 6, number % 4000], sampling=Sampling(max_tokens=1, ignore_eos=True)
        )
    ends = stream.ends(*every, seconds=60.0)
    failures = [error for error in ends.values() if isinstance(error, BatonError)]
    assert {error.code for error in failures} <= {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert len(failures) < 10_000 and set(ends.values()) - set(failures) == {1}
    patient.start(1)
    assert patient.ends(1) == {1: 4}


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1:1", "127.0.0.1:2"],
        ["", "no address", "127.0.0.1", "127.0.0.1:99999", "unix:/nowhere", "dns:///"],
        ["a" * 10_000 + ":1"],
        [chr(0x6F22) * 100],
    ],
    ids=["nobody listens", "no addresses", "long", "not ASCII"],
)
def test_decode_unreachable_prefill_nodes(decode, addresses):
    """The prompt is computed here in the end, or refused; at once where the address is wrong."""
    stream = Decode(decode)
    stream.start(1, prefill=addresses, namespace=f"unreachable {next(numbers)}")
    end = stream.ends(1)[1]
    assert end == 4 or (isinstance(end, BatonError) and end.field == "prefill"), end
