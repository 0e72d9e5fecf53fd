"""Bodies of HTTP requests: JSON, read into models, with bounds on what a body may cost.

How much there is in a body is counted before anything is made of it: JSON of a few bytes a value takes up to
thirty times its size as Python objects.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from baton.api.field_names import OPENAI, FieldNames
from baton.api.openai_errors import ApiError, from_validation
from baton.api.openai_fields import Reading

MAX_VALUES = 3 * 2**17
"""JSON values in a body, such as token ids. Parsing and checking so many takes less than 100 ms."""
MAX_KEYS = 2048
"""In one object; logit_bias may have 1,024."""
MAX_FIELDS = 2**16
"""Objects, arrays and the keys of objects in a body. They take more time and memory than other values."""
MAX_ESCAPES = 2**21
"""Backslashes in a body. The parser holds the interpreter while it copies a string escape by escape."""
MAX_QUOTES = 2 * (MAX_VALUES + MAX_FIELDS)
"""Quotes in a body beside escaped ones: each string has two, and is a value or a key."""
_SCAN_BYTES = 2**16

BodyModel = TypeVar("BodyModel", bound=BaseModel)
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class ParsedBody(Generic[BodyModel, Made]):
    """What was made of a body."""

    request: BodyModel
    made: Made
    ignored: set[str]
    """Fields that were given and have no effect here."""
    dropped: set[str]
    """Types of tools that the model is not shown."""


def parse_body(
    body: bytearray,
    kind: type[BodyModel],
    convert: Callable[[BodyModel], Made],
    names: FieldNames = OPENAI,
    *,
    omit_images: bool = False,
) -> ParsedBody[BodyModel, Made]:
    """The checked request, and what `convert` makes of it. Raises ApiError (400), naming the field, and what
    `convert` raises."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        text = f"the body is not valid UTF-8 at byte {error.start}"
        raise ApiError(400, text, None, "invalid_utf8") from None
    _check_amount(body)
    try:
        reading = Reading(omit_images)
        request = kind.model_validate(json.loads(text, object_pairs_hook=_object), context=reading)
        return ParsedBody(request, convert(request), reading.ignored, reading.dropped)
    except RecursionError:
        raise _invalid_json("it is nested too deeply") from None
    except ValidationError as error:  # a ValueError as well
        raise from_validation(error, names) from None
    except UnicodeEncodeError:
        raise _invalid_json("a string has a lone surrogate") from None
    except ValueError as error:
        raise _invalid_json(str(error)) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _too_complex(f"an object has {len(pairs)} keys; {MAX_KEYS} are allowed")
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0][:80]
        raise ApiError(400, f"{twice!r} is given twice in one object", twice, "duplicate_parameter")
    "".join(found).encode()  # Raises UnicodeEncodeError for a lone surrogate, as `convert` does for values.
    return found


def _check_amount(body: bytearray) -> None:
    """Counts what is outside of strings; may take seconds, but never holds the interpreter for long."""
    backslashes = body.count(b"\\")
    if backslashes > MAX_ESCAPES:
        raise _too_complex(f"the body has more than {MAX_ESCAPES} backslashes")
    if body.count(b'"') > MAX_QUOTES + backslashes:
        raise _too_complex(f"the body has more than {MAX_QUOTES} quotes that are not escaped")
    values = fields = start = 0
    while start < len(body):
        quote = body.find(b'"', start)
        end = quote if quote >= 0 else len(body)
        for begin in range(start, end, _SCAN_BYTES):
            part = body[begin : min(end, begin + _SCAN_BYTES)]
            values += part.count(b",")
            fields += part.count(b"[") + part.count(b"{") + part.count(b":")
            if values > MAX_VALUES or fields > MAX_FIELDS:
                limits = f"{MAX_VALUES} values, or more than {MAX_FIELDS} objects, arrays and keys"
                raise _too_complex(f"the body has more than {limits}")
        start = _string_end(body, quote) if quote >= 0 else end


def _string_end(body: bytearray, quote: int) -> int:
    """The index behind the string that begins at `quote`."""
    closing = quote
    while True:
        opened, closing = closing + 1, body.find(b'"', closing + 1)
        if closing < 0:
            return len(body)
        last = closing - 1
        while last >= opened and body[last] == ord("\\"):
            last -= 1
        if (closing - last) % 2 == 1:  # an even number of backslashes before the quote
            return closing + 1


def _too_complex(message: str) -> ApiError:
    return ApiError(400, message, None, "body_too_complex")


def _invalid_json(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {why}", None, "invalid_json")
