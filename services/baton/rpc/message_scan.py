"""Counts what is in a serialized message before it is parsed.

Two bytes on the wire may become a message of a hundred bytes, and a parser holds the interpreter for as long
as it runs. The scan follows the wire format (protobuf.dev/programming-guides/encoding), makes nothing, lets
other threads run, and ends at the first limit.
"""

from __future__ import annotations

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from baton.rpc.errors import invalid, invalid_field

TOO_MANY = "TOO_MANY_ENTRIES"
MAX_FIELDS = 2**17
"""In one message, nested and unknown ones included. A field takes 0.4 microseconds, and 0.15 to be parsed."""
MAX_NUMBERS = 2**22
"""In one packed field, such as the token ids of a prompt: more than any model's context."""
MAX_ENTRIES = 2**13
"""Most entries of a repeated field that MOST_ENTRIES does not name. A message that is not scanned has no
room for more."""
MAX_MESSAGES = 2**15
"""Most messages of a conversation."""
MOST_ENTRIES = {
    "baton.v1.ChatPrompt.messages": MAX_MESSAGES,
    "baton.v1.DecodeCommands.commands": 2**16,
    "baton.v1.PrefillRequests.requests": 2**16,
    "baton.v1.DetokenizeRequest.items": 2**16,
    "baton.v1.EncodeRequest.inputs": 2**16,
    "baton.v1.DecodeRequest.sequences": 2**16,
}
MAX_DEPTH = 100
"""The parser refuses deeper ones."""

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_NUMBER_BYTES = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}
"""Other numbers are varints."""


class _Field:
    """A field that is a message, repeated, or both."""

    def __init__(self, field: FieldDescriptor) -> None:
        texts = (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)
        self.name = field.name
        self.message: Descriptor | None = field.message_type
        self.most = MOST_ENTRIES.get(field.full_name, MAX_ENTRIES) if field.is_repeated else 0
        """Entries; 0: it is not repeated."""
        self.packed = field.is_repeated and field.cpp_type not in texts
        self.number_bytes = _NUMBER_BYTES.get(field.type, 0)


_Outer = list[tuple[int, dict[int, _Field], dict[int, int], int]]
"""The messages around a field, the outermost first: the end of each, its fields, how many entries they had so
far, and the tag of the next one."""


class MessageScan:
    """Scans messages of one type."""

    def __init__(self, descriptor: Descriptor | None) -> None:
        """None: the type is not known, and all fields are counted as unknown ones."""
        self._descriptor = descriptor
        self._types: dict[str, dict[int, _Field]] = {}
        """By the message's full name, its fields by their tags on the wire."""

    def check(self, data: bytes) -> None:
        """Raises BatonError (TOO_MANY_ENTRIES), naming the field, for a message with too much in it. What is
        no message at all is left to the parser, which gets no further than the scan."""
        try:
            self._walk(data)
        except IndexError:
            return

    def _walk(self, data: bytes) -> None:
        position, end = 0, len(data)
        fields = self._fields(self._descriptor)
        counts: dict[int, int] = {}
        outer: _Outer = []
        left = MAX_FIELDS
        while True:
            if position >= end:
                if position > end or not outer:
                    return
                end, fields, counts, _ = outer.pop()
                continue
            left -= 1
            if left < 0:
                text = f"the message has more than {MAX_FIELDS} fields, nested ones included"
                raise invalid("message", text, TOO_MANY)
            tag = data[position]
            position += 1
            if tag > 127:
                tag, position = _varint(data, position - 1)
            wire = tag & 7
            if wire == _DELIMITED:
                size = data[position]
                position += 1
                if size > 127:
                    size, position = _varint(data, position - 1)
                field = fields.get(tag)
                if field is not None:
                    if field.most:
                        counts[tag] = count = counts.get(tag, 0) + 1
                        if count > field.most:
                            text = f"has more than {field.most} entries"
                            raise invalid_field(_path(outer, field.name), text, TOO_MANY)
                        if field.packed:
                            _check_numbers(data, position, size, field, outer)
                    if field.message is not None and size:
                        if len(outer) >= MAX_DEPTH or position + size > end:
                            return
                        outer.append((end, fields, counts, tag))
                        end, fields, counts = position + size, self._fields(field.message), {}
                        continue
                position += size
            elif wire == _VARINT:
                while data[position] > 127:
                    position += 1
                position += 1
            elif wire == _FIXED32:
                position += 4
            elif wire == _FIXED64:
                position += 8
            # Else it begins or ends a group, whose fields follow.

    def _fields(self, descriptor: Descriptor | None) -> dict[int, _Field]:
        if descriptor is None:
            return {}
        found = self._types.get(descriptor.full_name)
        if found is None:
            found = self._types[descriptor.full_name] = {
                field.number << 3 | _DELIMITED: _Field(field)
                for field in descriptor.fields
                if field.is_repeated or field.message_type is not None
            }
        return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number that begins there, and the position behind it. Raises IndexError where there is none."""
    value = shift = 0
    while shift < 70:
        octet = data[position]
        position += 1
        value |= (octet & 127) << shift
        if octet < 128:
            return value, position
        shift += 7
    raise IndexError


def _check_numbers(data: bytes, position: int, size: int, field: _Field, outer: _Outer) -> None:
    if size <= MAX_NUMBERS:  # a byte each, at least
        return
    if field.number_bytes:
        count = size // field.number_bytes
    else:  # the last byte of each varint is less than 128
        octets = np.frombuffer(data, np.uint8)[position : position + size]
        count = int(np.count_nonzero(octets < 128))
    if count > MAX_NUMBERS:
        text = f"has {count} numbers; {MAX_NUMBERS} are allowed"
        raise invalid_field(_path(outer, field.name), text, TOO_MANY)


def _path(outer: _Outer, name: str) -> str:
    steps = []
    for _, fields, counts, tag in outer:
        field = fields[tag]
        steps.append(f"{field.name}[{counts[tag] - 1}]" if field.most else field.name)
    return ".".join([*steps, name])
