"""Messages are counted before they are parsed: at little cost, to the same end as the parser."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from baton.rpc import message_scan
from baton.rpc.errors import BatonError
from baton.rpc.message_scan import MAX_ENTRIES, MAX_FIELDS, MAX_NUMBERS, MOST_ENTRIES, MessageScan
from baton.v1 import (
    cache_pb2,
    common_pb2,
    decode_pb2,
    inference_pb2,
    node_pb2,
    prefill_pb2,
    tokenizer_pb2,
    trace_pb2,
)

FILES = (cache_pb2, common_pb2, decode_pb2, inference_pb2, node_pb2, prefill_pb2, tokenizer_pb2, trace_pb2)
SCAN_SECONDS = 0.15
"""Of CPU time, for what is refused last. A quiet machine takes half of it."""
REQUEST = inference_pb2.GenerateRequest.DESCRIPTOR
BYTES = 16 * 2**20


def message_types() -> Iterator[Descriptor]:
    for file in FILES:
        yield from file.DESCRIPTOR.message_types_by_name.values()


def refused(data: bytes, descriptor: Descriptor | None = REQUEST) -> BatonError:
    with pytest.raises(BatonError) as raised:
        MessageScan(descriptor).check(data)
    assert raised.value.reason == "TOO_MANY_ENTRIES"
    return raised.value


def length(size: int) -> bytes:
    octets = b""
    while size > 127:
        octets, size = octets + bytes([size & 127 | 128]), size >> 7
    return octets + bytes([size])


def nested(data: bytes, *numbers: int) -> bytes:
    for number in reversed(numbers):
        data = bytes([number << 3 | 2]) + length(len(data)) + data
    return data


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (nested(b"\x22\x00" * (BYTES // 2), 1, 4, 1), "start.chat.messages[0].tool_calls"),
        (
            nested(nested(b"", 1) * 3 + nested(b"\x22\x00" * (MAX_ENTRIES + 1), 1), 1, 4),
            "start.chat.messages[3].tool_calls",
        ),
        (nested(b"\x0a\x00" * (BYTES // 2), 1, 4), "start.chat.messages"),
        (nested(b"\x62\x00" * (BYTES // 2) + b"\x62\x01\xff", 1, 6), "start.sampling.stop"),
        (nested(b"\x42\x00" * (BYTES // 2), 1, 6), "start.sampling.logit_bias"),
        (b"\x7a\x00" * (BYTES // 2), "message"),
        (b"\x78\x01" * (BYTES // 2), "message"),
        (b"\x7b\x7c" * (BYTES // 2), "message"),
        (nested(nested(b"\x22\x00" * MAX_ENTRIES, 1) * 1000, 1, 4), "message"),
        (nested(b"\x08\x01" * (BYTES // 2), 1, 5), "message"),
        (nested(b"\x01" * (MAX_NUMBERS + 1), 1, 5, 1), "start.tokens.token_ids"),
    ],
    ids=range(11),
)
def test_what_is_too_much_is_refused_soon(data, field):
    assert refused(data).field == field
    before = time.thread_time()
    refused(data)
    assert time.thread_time() - before < SCAN_SECONDS


def test_a_long_prompt_costs_little():
    for token in (1, 300, 2**31):
        tokens = inference_pb2.TokenPrompt(token_ids=[token] * 1_000_000)
        data = inference_pb2.GenerateRequest(
            start=inference_pb2.GenerateStart(tokens=tokens)
        ).SerializeToString()
        before = time.thread_time()
        MessageScan(REQUEST).check(data)
        assert time.thread_time() - before < 0.01


def test_every_repeated_field_has_a_limit():
    named = set()
    for descriptor in message_types():
        for field in descriptor.fields:
            if field.is_repeated and (field.message_type is not None or field.type == field.TYPE_STRING):
                most = MOST_ENTRIES.get(field.full_name, MAX_ENTRIES)
                named.add(field.full_name)
                entry = length(field.number << 3 | 2) + b"\x00"
                scan = MessageScan(descriptor)
                scan.check(entry * min(most, MAX_FIELDS))
                wrong = field.name if most < MAX_FIELDS else "message"
                assert refused(entry * (most + 1), descriptor).field == wrong
    assert named >= MOST_ENTRIES.keys()


def filled(descriptor: Descriptor, rng: random.Random, depth: int = 0) -> Message:
    """A message with random fields, as often as they may occur."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if rng.random() < 0.5 or depth > 3:
            continue
        for _ in range(rng.randrange(1, 4) if field.is_repeated else 1):
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            if field.message_type is not None:
                inner = filled(field.message_type, rng, depth + 1)
                slot = getattr(message, field.name)
                slot.append(inner) if field.is_repeated else slot.CopyFrom(inner)
                continue
            kind = field.cpp_type
            value: object = rng.randrange(2)
            if kind == field.CPPTYPE_STRING:
                text = "é" * rng.choice((0, 3, 200))
                value = text.encode() if field.type == field.TYPE_BYTES else text
            elif kind in (field.CPPTYPE_UINT64, field.CPPTYPE_INT64):
                value = rng.choice((0, 127, 128, 2**62))
            elif kind in (field.CPPTYPE_UINT32, field.CPPTYPE_INT32):
                value = rng.choice((0, 127, 128, 2**30))
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
    return message


def test_whole_messages_pass_and_the_scan_sees_their_end(monkeypatch):
    monkeypatch.setattr(message_scan, "MAX_FIELDS", most := 2**14)  # the scan of more takes long
    rng = random.Random(7)
    for descriptor in message_types():
        scan = MessageScan(descriptor)
        for _ in range(5):
            data = filled(descriptor, rng).SerializeToString()
            scan.check(data)
        # The scan ends at a border of fields, or the unknown ones behind it would not be counted.
        assert refused(data + b"\xfa\x7f\x00" * (most + 1), descriptor).field == "message"


def test_what_is_no_message_is_left_to_the_parser():
    rng, given = random.Random(3), inference_pb2.GenerateRequest
    whole = [filled(REQUEST, rng).SerializeToString() for _ in range(50)]
    broken = [bytes(b ^ (rng.random() < 0.05) * 64 for b in data) for data in whole]
    broken += [data[: rng.randrange(len(data) + 1)] for data in whole] + [
        nested(b"", *[1] * 5000),
        b"\xff" * 99,
    ]
    unparsed = 0
    for data in broken:
        MessageScan(REQUEST).check(data)
        try:
            given.FromString(data)
        except DecodeError:
            unparsed += 1
    assert unparsed > 20
