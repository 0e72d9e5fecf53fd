"""Messages that parse, with anything in them: hypothesis strategies made from the protobuf descriptors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from baton.api.openai_chat import ChatRequest
from baton.api.openai_protocol import CompletionRequest
from fuzzing.cases import FOR_FRIENDS, HELLO, HTTP, NOWHERE, Case, Method
from fuzzing.seeds import BODIES, SEEDS

DEPTH = 4
MOST_MESSAGES = 12
_F = FieldDescriptor
_SIZES = {
    _F.TYPE_INT32: (-(2**31), 2**31 - 1),
    _F.TYPE_INT64: (-(2**63), 2**63 - 1),
    _F.TYPE_UINT32: (0, 2**32 - 1),
    _F.TYPE_UINT64: (0, 2**64 - 1),
    _F.TYPE_FIXED64: (0, 2**64 - 1),
    _F.TYPE_ENUM: (-(2**31), 2**31 - 1),
}
_STRINGS = st.sampled_from(["", "user", "assistant", "a", "\x00", "\u202e", "😀" * 40, "x" * 5000]) | st.text(
    max_size=12
)


def _number(least: int, most: int) -> st.SearchStrategy[int]:
    edges = [value for value in (least, -1, 0, 1, 16, 17, 319, 320, most) if least <= value <= most]
    return st.sampled_from(edges) | st.integers(max(least, -20), 340)


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in _SIZES:
        return _number(*_SIZES[field.type])
    if field.type in (_F.TYPE_FLOAT, _F.TYPE_DOUBLE):
        return st.sampled_from([0.0, 0.5, 1.0, -1.0, float("nan"), float("inf"), 1e-40]) | st.floats(width=32)
    if field.type == _F.TYPE_BOOL:
        return st.booleans()
    if field.type == _F.TYPE_STRING:
        return st.sampled_from(NOWHERE) if field.name == "prefill" else _STRINGS
    if field.type == _F.TYPE_BYTES:
        return st.binary(max_size=64)
    raise AssertionError(field.type)


@st.composite
def messages(draw: Callable[..., Any], descriptor: Descriptor, depth: int = DEPTH) -> Message:
    """Any message of the type, with up to four of its fields."""
    message = GetMessageClass(descriptor)()
    fields = list(descriptor.fields)
    if not fields:
        return message
    for field in draw(st.lists(st.sampled_from(fields), max_size=4, unique_by=lambda field: field.name)):
        if field.type == _F.TYPE_MESSAGE and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            entries = getattr(message, field.name)
            if value.type != _F.TYPE_MESSAGE:
                entries.update(draw(st.dictionaries(_scalar(key), _scalar(value), max_size=3)))
            elif depth:
                inner = messages(value.message_type, depth - 1)
                for name, each in draw(st.dictionaries(_scalar(key), inner, max_size=3)).items():
                    entries[name].CopyFrom(each)
        elif field.type == _F.TYPE_MESSAGE:
            if depth:
                inner = messages(field.message_type, depth - 1)
                if field.is_repeated:
                    getattr(message, field.name).extend(draw(st.lists(inner, max_size=3)))
                else:
                    getattr(message, field.name).CopyFrom(draw(inner))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(_scalar(field), max_size=6)))
        else:
            setattr(message, field.name, draw(_scalar(field)))
    return message


@st.composite
def _near(draw: Callable[..., Any], method: Method) -> Message:
    """A message that would be good, with something else merged into it."""
    message = method.request()
    message.CopyFrom(draw(st.sampled_from(SEEDS[method.path])))
    if draw(st.booleans()):
        message.MergeFrom(draw(messages(method.request.DESCRIPTOR)))
    return message


@st.composite
def _calls(draw: Callable[..., Any], method: Method) -> Case:
    one = (_near(method) | messages(method.request.DESCRIPTOR)).map(lambda m: m.SerializeToString())
    sent = draw(st.lists(one, min_size=1, max_size=MOST_MESSAGES if method.stream else 1))
    if method.hello and draw(st.integers(0, 9)):
        sent.insert(0, HELLO)
    return Case(draw(st.sampled_from(method.targets)), tuple(sent))


def _json() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | _STRINGS
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_STRINGS, inner, max_size=4)
    )


@st.composite
def _bodies(draw: Callable[..., Any], path: str) -> Case:
    """A body that would be good, with other values in some of its fields, known ones or not."""
    model = ChatRequest if path == "/v1/chat/completions" else CompletionRequest
    body = dict(draw(st.sampled_from(BODIES[path])))
    names = st.sampled_from(sorted(model.model_fields)) | _STRINGS
    numbers = st.sampled_from([0, 1, -1, 2.5, 1e308, 2**31, 2**63, 2**64])
    body |= draw(st.dictionaries(names, numbers | _json(), max_size=3))
    return Case(path, (json.dumps(body).encode("utf-8", "surrogatepass"),))


def strategy() -> st.SearchStrategy[Case]:
    calls = [_calls(method) for method in FOR_FRIENDS]
    return st.one_of([*calls, *(_bodies(path) for path in HTTP)])


def structured(count: int, seed: int) -> list[Case]:
    """`count` cases; the same for the same seed."""
    made: list[Case] = []

    @seeded(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy())
    def collect(case: Case) -> None:
        made.append(case)

    collect()
    return made
