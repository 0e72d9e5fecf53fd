"""Random JSON Schemas of numbers at the borders of what types and 64-bit floating-point numbers hold."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

Schema = dict[str, Any]

POWERS = (7, 8, 15, 16, 31, 32, 53, 63, 64)
LIMITS = sorted({sign * 2**power + more for power in POWERS for sign in (1, -1) for more in (-1, 0, 1)})
FLOATS = [
    *(1e-7, 0.1, -2.5, 1e15, 1e15 + 0.125, 9007199254740991.0, 9007199254740993.0, 1e16, -1e16, 2.0**63),
    *(-(2.0**63), 3.4028234663852886e38, -1.7976931348623157e308, 1e300),
]
TYPES = {
    "minimum": {-(2**63), 1 - 2**63, -1.7976931348623157e308},
    "exclusiveMinimum": {-(2**63) - 1, -1.7976931348623157e308},
    "maximum": {2**63 - 1, 2**63, 2**64 - 1, 2**64, 3.4028234663852886e38},
    "exclusiveMaximum": {2**63, 2**64, 3.4028234663852886e38},
}
"""Bounds that are only a type's limits."""


def number(rng):
    return rng.choice(FLOATS) if rng.random() < 0.3 else rng.choice(LIMITS)


def bounded(rng):
    """A schema of numbers in a range."""
    schema = {"type": rng.choice(("integer", "number"))}
    for bound in ("inimum", "aximum"):
        if rng.random() < 0.8:
            key = rng.choice((f"m{bound}", f"exclusiveM{bound}"))
            schema[key] = rng.choice([*sorted(TYPES[key]), number(rng), number(rng), rng.randint(-300, 300)])
    return schema


def case(seed):
    """A schema, what puts a value where its numbers are, and values to try."""
    rng = random.Random(seed)
    kind = rng.random()
    if kind < 0.3:
        schema = {"const": number(rng)}
    elif kind < 0.55:
        schema = {"enum": [number(rng) for _ in range(rng.randint(1, 4))]}
    else:
        schema = bounded(rng)
    near = [each for each in schema.values() if not isinstance(each, str | list)] + schema.get("enum", [])
    values = {int(each) + more for each in near for more in (-1, 0, 1)} | {0, *rng.sample(LIMITS, 6)}
    values |= {0.5, -300.25, *near}
    if "type" in schema:  # beyond a type's limits nothing is enforced
        values = {each for each in values if -(2**63) < each < 2**63}
    values = sorted(values)
    place = rng.randrange(7)
    if place == 1:
        return {"type": "object", "properties": {"id": schema}, "required": ["id"]}, {"id": None}, values
    if place == 2:
        return {"type": "array", "items": schema, "maxItems": 2}, [None], values
    if place == 3:
        return {"anyOf": [{"type": "null"}, schema]}, None, values
    if place == 4:
        return (
            {"$defs": {"a": schema}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}},
            {"x": None},
            values,
        )
    if place == 5 and "const" in schema:
        return {"const": [1, {"a": schema["const"]}]}, [1, {"a": None}], values
    if place == 6:
        return {**schema, "default": 1e300, "examples": [-(2**63)]}, None, values
    return schema, None, values


def put(shape, value):
    if isinstance(shape, dict):
        return {key: put(each, value) for key, each in shape.items()}
    return (
        [put(each, value) for each in shape] if isinstance(shape, list) else value if shape is None else shape
    )


def written(value):
    """The forms of a number that a model may write: as Python does, and without an exponent."""
    whole = isinstance(value, int) or value.is_integer()
    return {
        repr(value),
        *[repr(float(value))] * (float(value) == value),
        str(int(value)) if whole else format(Decimal(repr(value)), "f"),
    }


def texts(shape, value):
    return {json.dumps(put(shape, "?")).replace('"?"', each) for each in written(value)}


def must_be_refused(schema):
    """A bound that is outside and no type's limit."""
    if isinstance(schema, list):
        return any(map(must_be_refused, schema))
    if not isinstance(schema, dict):
        return False
    for key in TYPES:
        bound = schema.get(key, 0)
        large = abs(bound) > 2**53 or (abs(bound) == 2**53 and key.startswith("exclusive"))
        large = large or (abs(bound) > 1e15 and not float(bound).is_integer())
        if large and bound not in TYPES[key]:
            return True
    return any(must_be_refused(each) for key, each in schema.items() if key not in ("default", "examples"))


def nested(seed: int) -> Schema:
    """The schema of `case`, some with multipleOf, as a member of an object, up to two levels deeper. Seed 0:
    the constant that ends the library's process when it gets it as a number."""
    rng = random.Random(-seed - 1)
    schema = {"const": -(2**63)} if seed == 0 else case(seed)[0]
    definitions = schema.pop("$defs", {})
    for each in (schema, *definitions.values()):
        if "type" in each and each["type"] in ("integer", "number") and rng.random() < 0.4:
            each["multipleOf"] = rng.choice((1, 3, 0.5, 0.1, 2**32, 2**53 + 1, 1e16))
    for _ in range(rng.randint(0, 2)):
        schema = rng.choice(
            (
                {"anyOf": [schema, {"type": "boolean"}]},
                {"type": "array", "items": schema, "minItems": 1, "maxItems": 2},
                {"type": "object", "properties": {"n": schema}, "required": ["n"]},
            )
        )
    return {
        "type": "object",
        "properties": {"value": schema},
        "required": ["value"],
        "additionalProperties": False,
        **({"$defs": definitions} if definitions else {}),
    }


def without_limits(schema: Any) -> Any:
    """The schema without the bounds that are only a type's limits, which nothing enforces."""
    if isinstance(schema, list):
        return [without_limits(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_limits(each)
        for key, each in schema.items()
        if key not in TYPES or each not in TYPES[key]
    }
