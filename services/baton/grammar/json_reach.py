"""What can be foreseen of a schema that the library finds only in the middle of an answer: references that
never end, and positions where too much may follow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

SchemaValue = Any
"""A JSON value in a schema, or Exact for a number that is written digit by digit."""


MAX_ITEMS = 2000
"""Items of the library's parser at one position; counted as it has been seen to count."""
_PER_ARRAY = 6
IN_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose values are schemas by name."""
_NAMED = {"$id", "id", "$anchor"}
"""Keywords by which schemas are found otherwise than by where they stand."""
_MAX_STEPS = 64
"""References that are followed to count items."""
_UNIONS = ("anyOf", "oneOf")
_WIDE = {"anyOf", "oneOf", "enum", "properties"}


def unresolved(root: SchemaValue) -> Iterator[dict[str, SchemaValue]]:
    """Schemas with a reference to nothing, or to something elsewhere."""
    if not any(_NAMED & each.keys() for each in each_schema(root)):
        for schema in each_schema(root):
            if refers(schema) and _target(root, schema["$ref"]) is None:
                yield schema


def without_endless(root: SchemaValue) -> SchemaValue:
    """The schema, with `false` for references to schemas that no finite value fits."""
    endless = _endless(root)
    return _replaced(root, endless) if endless else root


def _endless(root: SchemaValue) -> set[str]:
    targets = {each["$ref"]: _target(root, each["$ref"]) for each in each_schema(root) if refers(each)}
    targets = {at: schema for at, schema in targets.items() if schema is not None}
    used_by: dict[str, list[str]] = defaultdict(list)
    for at, schema in targets.items():
        for each in each_schema(schema):
            if refers(each):
                used_by[each["$ref"]].append(at)
    endless, waiting = set(targets), list(targets)
    while waiting:
        at = waiting.pop()
        if at in endless and _ends(targets[at], endless):
            endless.remove(at)
            waiting += used_by[at]
    return endless


def _ends(schema: SchemaValue, endless: set[str]) -> bool:
    """Some finite value fits, as far as references and what is required say."""
    if not isinstance(schema, dict):
        return schema is not False
    if refers(schema) and schema["$ref"] in endless:
        return False
    if not all(_ends(each, endless) for each in _list(schema, "allOf")):
        return False
    for key in _UNIONS:
        if _list(schema, key) and not any(_ends(each, endless) for each in _list(schema, key)):
            return False
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        properties = schema["properties"]
        return all(
            _ends(properties.get(name, True), endless) for name in _list(schema, "required") if _is_name(name)
        )
    least = schema.get("minItems", 0)
    if schema.get("type") == "array" and isinstance(least, int) and least > 0:
        items = [*_list(schema, "prefixItems"), schema.get("items", True)][:least]
        return all(_ends(each, endless) for each in items)
    return True


def _replaced(schema: SchemaValue, endless: set[str], names: bool = False) -> SchemaValue:
    """names: it is one of schemas by name."""
    if isinstance(schema, list):
        return [_replaced(each, endless) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if not names and refers(schema) and schema["$ref"] in endless:
        return False
    return {
        key: each
        if not names and key in ("const", "enum")
        else _replaced(each, endless, not names and key in IN_MAPS)
        for key, each in schema.items()
    }


def check_width(root: SchemaValue, refuse: Callable[[dict[str, SchemaValue], str, int], None]) -> None:
    """refuse: called with each schema where too much may follow, the keyword, and how many of the library's
    items."""
    known: dict[int, int] = {}

    def width(schema: SchemaValue, steps: int) -> int:
        """Number of items behind the beginning of a value."""
        if not isinstance(schema, dict):
            return _PER_ARRAY if schema is True else 0
        if id(schema) not in known:
            known[id(schema)] = 1  # for what refers to itself
            known[id(schema)] = sum(_widths(schema, steps, root, width).values())
        return known[id(schema)]

    for schema in [each for each in each_schema(root) if not _WIDE.isdisjoint(each)]:
        for key, count in _widths(schema, 0, root, width).items():
            if count > MAX_ITEMS and key in schema:
                refuse(schema, key, count)
        run = max(_runs(schema)) if "properties" in schema else 0
        if run > MAX_ITEMS:
            refuse(schema, "properties", run)


def _widths(
    schema: dict[str, SchemaValue], steps: int, root: SchemaValue, width: Callable[[SchemaValue, int], int]
) -> dict[str, int]:
    found = {key: sum(width(each, steps) for each in _list(schema, key)) for key in _UNIONS}
    found["enum"] = sum(not isinstance(each, str | int | float | None) for each in _list(schema, "enum"))
    if refers(schema) and steps < _MAX_STEPS:
        found["$ref"] = width(_target(root, schema["$ref"]), steps + 1)
    kind = schema.get("type")
    if kind == "array":
        found["items"] = 1 if schema.get("minItems") else _PER_ARRAY
    if kind == "object":
        found["properties"] = max(next(_runs(schema)), 1)
    return found


def _runs(schema: dict[str, SchemaValue]) -> Iterator[int]:
    """Items of properties one after the other that need not be there; the first: at the beginning."""
    properties, required = schema.get("properties"), _list(schema, "required")
    run, needed = 0, {name for name in required if _is_name(name)}
    for name, each in properties.items() if isinstance(properties, dict) else ():
        if name in needed:
            yield 4 * run
            run = 0
        elif each is not False:
            run += 1
    yield (4 * run - 1 if run else 0) + (0 if schema.get("additionalProperties") is False else 8)


def each_schema(value: SchemaValue) -> Iterator[dict[str, SchemaValue]]:
    """All schemas in it that are objects, it included."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            yield each
            for key, below in each.items():
                if key in IN_MAPS and isinstance(below, dict):
                    waiting += below.values()
                elif key not in ("const", "enum"):
                    waiting.append(below)


def refers(schema: dict[str, SchemaValue]) -> bool:
    return isinstance(schema.get("$ref"), str)


def _target(root: SchemaValue, at: str) -> SchemaValue:
    """What a reference within the schema is to; None: it is another, or to nothing."""
    if at not in ("", "#") and not at.startswith("#/"):
        return None
    found = root
    for name in steps(at)[1:]:
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def steps(at: str) -> list[str]:
    """What stands between the slashes of a reference."""
    return [step.replace("~1", "/").replace("~0", "~") for step in unquote(at).split("/")]


def _list(schema: dict[str, SchemaValue], key: str) -> list[SchemaValue]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _is_name(name: SchemaValue) -> bool:
    return isinstance(name, str)
