"""JSON Schemas as the grammar library can take them. What it would die of, or enforce wrongly in silence, is
said otherwise or refused: it computes with 64-bit floating-point numbers.

- Literals outside of the numbers that it is given become `Exact`: they go in as text (json_literals).
- Bounds that are only a type's limits are left out, and so are annotations with all that is in them.
- Keywords that say nothing are left out, and some are said by others that the library knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from baton.grammar.json_patterns import without_look_around
from baton.grammar.json_reach import (
    IN_MAPS,
    MAX_ITEMS,
    SchemaValue,
    check_width,
    steps,
    unresolved,
    without_endless,
)

MAX_INTEGER = 2**53
MAX_FLOAT = 1e15
"""Beyond these no number reaches the library as a number."""
MAX_COUNT = 2**31 - 1
"""Most characters, items or properties: no output has more."""
MAX_MULTIPLE = 2**32 - 1
MAX_DEPTH = 128
"""Most levels of nested values; the library's own limit."""

_FLOATS = {
    int(each) for each in (1.7976931348623157e308, 3.4028234663852886e38, 3.4028235e38, 7.922816251426434e28)
}
_LIMITS = {
    "minimum": {-each for each in _FLOATS} | {more - 2**bits for bits in (63, 127) for more in (0, 1)},
    "exclusiveMinimum": {-each for each in _FLOATS} | {-(2**bits) - 1 for bits in (63, 127)},
    "maximum": _FLOATS | {2**bits - less for bits in (63, 64, 96, 127, 128) for less in (0, 1)},
    "exclusiveMaximum": _FLOATS | {2**bits for bits in (63, 64, 96, 127, 128)},
}
"""What integers of 64 and 128 bits, floating-point numbers and .NET's decimals hold at most; some are rounded
on their way."""

_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_TEXTS = {"format", "pattern", "patternProperties"}
_CONDITIONS = {"not", "if", "then", "else"}
_CONTAINS = {"contains", "minContains", "maxContains"}
_DEPENDENT = {"dependentRequired", "dependentSchemas", "dependencies"}
_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_DYNAMIC = {"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"}
_NOT_ENFORCED = {
    *_CONDITIONS,
    *_CONTAINS,
    *_DEPENDENT,
    *_UNEVALUATED,
    *_DYNAMIC,
    "propertyNames",
    "uniqueItems",
}
"""What the library knows and refuses."""
_KEYWORDS = {
    *("$ref", "$id", "id", "$schema", "$anchor", "type", "required", "allOf", "anyOf", "oneOf"),
    *("items", "prefixItems", "additionalItems", "additionalProperties"),
    *(IN_MAPS | _NUMBERS | _COUNTS | _TEXTS | _NOT_ENFORCED),
}
"""With const and enum; all others are annotations."""
_APPLICATORS = {
    "allOf",
    "anyOf",
    "oneOf",
    "dependentSchemas",
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    *_CONDITIONS,
}
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
"""Formats that the library enforces; all others are annotations."""


class SchemaError(ValueError):
    """A schema cannot be enforced; says in one line where and why."""


@dataclass(frozen=True, slots=True)
class Exact:
    """A literal that has a number which must not reach the library: its value."""

    value: SchemaValue


@dataclass(frozen=True, slots=True)
class Rewritten:
    schema: SchemaValue
    """The schema as JSON values, but for Exact in const and enum."""
    unenforced: list[str]
    """What the library refuses in it: keywords, with where they stand. Loose: keywords that were left out."""


def rewrite(schema: SchemaValue, *, loose: bool = False) -> Rewritten:
    """loose: what cannot be enforced is left out. Raises SchemaError."""
    return _Rewriter(schema, loose=loose).rewritten(schema)


class _Rewriter:
    def __init__(self, schema: SchemaValue, *, loose: bool) -> None:
        self._loose = loose
        self._unenforced: list[str] = []
        self._multiples: set[Fraction] = set()
        self._pointed = set(_pointed(schema, 0))

    def rewritten(self, schema: SchemaValue) -> Rewritten:
        made = self._schema(schema, "", 0)
        for each in list(unresolved(made)):
            self._not_enforced(each, "$ref", "")
        made = without_endless(made)
        check_width(made, self._too_wide)
        if made is False:
            raise SchemaError("nothing fits: the schema is false, or never ends")
        if self._loose and isinstance(made, dict) and "oneOf" in self._unenforced:
            options = made.get("x-guidance", {})
            if isinstance(options, dict):
                made["x-guidance"] = {**options, "coerce_one_of": True}
        return Rewritten(made, self._unenforced)

    def _schema(self, schema: SchemaValue, path: str, depth: int) -> SchemaValue:
        if depth > MAX_DEPTH:
            raise SchemaError(f"recursion limit: it is nested more than {MAX_DEPTH} levels deep")
        if isinstance(schema, list):
            return [self._schema(each, f"{path}[{number}]", depth + 1) for number, each in enumerate(schema)]
        if not isinstance(schema, dict):
            return schema
        made: dict[str, SchemaValue] = {}
        for key, value in schema.items():
            where = f"{path}.{key}" if path else key
            if key in IN_MAPS and isinstance(value, dict):
                made[key] = {
                    name: self._schema(each, f"{where}.{name}", depth + 2) for name, each in value.items()
                }
            elif key == "const":
                made[key] = self._literal(value, where, depth)
            elif key == "enum":
                if not isinstance(value, list):
                    raise SchemaError(f"{where} is no array")
                made[key] = [self._literal(each, where, depth) for each in value]
            elif key == "x-guidance":
                if depth == 0:  # the library's options
                    made[key] = value
            elif key in _KEYWORDS or key in self._pointed:
                made[key] = self._schema(value, where, depth + 1)
        for keywords, check in (
            (_NUMBERS, self._bounds),
            (_COUNTS, self._counts),
            (_TEXTS, self._texts),
            (_NOT_ENFORCED, self._others),
        ):
            if not keywords.isdisjoint(made):
                check(made, path)
        if self._loose and "oneOf" in made:
            self._unenforced.append("oneOf")
        return False if made.get("not") is True else made

    def _literal(self, value: SchemaValue, where: str, depth: int) -> SchemaValue:
        for number in _numbers(value, depth):
            if not _is_finite(number):
                raise SchemaError(f"{where} has a number that no 64-bit floating-point number holds")
        if any(_outside(number) for number in _numbers(value, depth)):
            return Exact(value)
        return _whole(value)

    def _bounds(self, made: dict[str, SchemaValue], path: str) -> None:
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(made.get(exclusive), bool) and made.pop(exclusive) and bound in made:  # of draft 4
                made[exclusive] = made.pop(bound)
            for key in (bound, exclusive):
                value: SchemaValue = made.get(key)
                if not _is_number(value):
                    continue
                if _whole(value) in _LIMITS[key]:
                    del made[key]
                elif _outside(value) or (key == exclusive and abs(value) >= MAX_INTEGER):
                    self._refuse(made, key, path, f"{value} is no type's limit and outside of {_RANGE}")
                else:
                    made[key] = _whole(value)
        multiple: SchemaValue = made.get("multipleOf")
        if _is_number(multiple) and _outside(multiple):
            self._refuse(made, "multipleOf", path, f"{multiple} is outside of {_RANGE}")
        elif _is_number(multiple):
            made["multipleOf"] = _whole(multiple)
            self._multiples.add(Fraction(str(abs(multiple))))
            largest = sorted(self._multiples)[-2:]
            scale = math.lcm(*(each.denominator for each in self._multiples))
            if len(largest) == 2 and math.prod(int(each * scale) for each in largest) > MAX_MULTIPLE:
                both = " and ".join(f"{float(each):g}" for each in largest)
                self._refuse(made, "multipleOf", path, f"multiples of {both} cannot be enforced together")

    def _counts(self, made: dict[str, SchemaValue], path: str) -> None:
        for key in _COUNTS.intersection(made):
            value = made[key]
            if _is_number(value):
                made[key] = value = _whole(value)
            if _is_number(value) and value > MAX_COUNT:
                if key.startswith("max"):
                    del made[key]
                else:
                    self._refuse(made, key, path, f"{value} is more than any output has")
        properties, required = made.get("properties", {}), made.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            return
        least: SchemaValue = made.get("minProperties")
        if _is_number(least) and least <= len(set(map(str, required))):
            del made["minProperties"]
        closed = made.get("additionalProperties") is False and "patternProperties" not in made
        most: SchemaValue = made.get("maxProperties")
        if closed and _is_number(most) and most >= len(properties):
            del made["maxProperties"]
        # Beside properties that need not be there, the library knows only that one must be.
        known = closed and made.get("minProperties") == 1 and "maxProperties" not in made
        if any(name not in required for name in properties) and not known:
            for key in ("minProperties", "maxProperties"):
                if key in made:
                    self._not_enforced(made, key, path)

    def _texts(self, made: dict[str, SchemaValue], path: str) -> None:
        format = made.get("format")
        if isinstance(format, str) and format not in FORMATS:
            del made["format"]
        pattern = made.get("pattern")
        if isinstance(pattern, str):
            if (known := without_look_around(pattern)) is not None:
                made["pattern"] = known
            else:
                self._not_enforced(made, "pattern", path)
        names = made.get("patternProperties")
        if isinstance(names, dict):
            found = {name: without_look_around(name) for name in names}
            if None not in found.values():
                made["patternProperties"] = {found[name]: each for name, each in names.items()}
            else:
                self._not_enforced(made, "patternProperties", path)
                if self._loose:
                    made["additionalProperties"] = True

    def _others(self, made: dict[str, SchemaValue], path: str) -> None:
        _simplify(made, any_name="$dynamicRef" not in self._pointed)
        if made.get("not") is True:
            return
        for key in sorted(_NOT_ENFORCED.intersection(made)):
            self._not_enforced(made, key, path)

    def _refuse(self, made: dict[str, SchemaValue], key: str, path: str, why: str) -> None:
        if not self._loose:
            raise SchemaError(f"{f'{path}.{key}' if path else key}: {why}")
        del made[key]
        self._unenforced.append(key)

    def _too_wide(self, schema: dict[str, SchemaValue], key: str, count: int) -> None:
        if key in schema:
            self._refuse(
                schema, key, "", f"about {count} parts may follow at one place; {MAX_ITEMS} can be followed"
            )
            schema["additionalProperties"] = True

    def _not_enforced(self, made: dict[str, SchemaValue], key: str, path: str) -> None:
        """The library says why, unless it is left out."""
        self._unenforced.append(key if self._loose or not path else f"{path}.{key}")
        if self._loose:
            del made[key]


_RANGE = "±2^53, with a fraction ±10^15, beyond which numbers are not exact"


def _simplify(made: dict[str, SchemaValue], *, any_name: bool) -> None:
    """Leaves out what says nothing, and says some keywords by others. If `not` is true then, nothing fits.

    any_name: no anchor is referred to dynamically.
    """
    if "not" in made and _fits_all(made["not"]):
        made["not"] = True
    elif made.get("not") is False:
        del made["not"]
    for key in ("then", "else"):
        if key in made and ("if" not in made or _fits_all(made[key])):
            del made[key]
    if not made.keys() & {"then", "else"}:
        made.pop("if", None)
    if made.get("uniqueItems") is False or made.get("maxItems") in (0, 1):
        made.pop("uniqueItems", None)
    if "contains" not in made or (made.get("minContains") == 0 and "maxContains" not in made):
        for key in _CONTAINS:
            made.pop(key, None)
    for key in _DEPENDENT:
        if made.get(key) == {}:
            del made[key]
    if any_name:
        made.pop("$dynamicAnchor", None)
        made.pop("$recursiveAnchor", None)
    for key, keyword in _UNEVALUATED.items():
        if key in made and _fits_all(made[key]):
            del made[key]
        elif made.get(key) is False and not made.keys() & _APPLICATORS and "contains" not in made:
            del made[key]
            made.setdefault("additionalItems" if isinstance(made.get(keyword), list) else keyword, False)
    _name_properties(made)


def _name_properties(made: dict[str, SchemaValue]) -> None:
    """propertyNames, if it says nothing, or which names or what pattern they have."""
    names = made.get("propertyNames")
    if names is None:
        return
    said = {key: each for key, each in names.items() if key != "type"} if isinstance(names, dict) else {}
    if names is not True and not (isinstance(names, dict) and names.get("type", "string") == "string"):
        return
    properties, more = made.get("properties", {}), made.get("additionalProperties", True)
    if not said:
        del made["propertyNames"]
    elif "patternProperties" in made or not isinstance(properties, dict):
        return
    elif said.keys() == {"enum"} and isinstance(said["enum"], list):
        allowed = {name: properties.get(name, more) for name in said["enum"] if isinstance(name, str)}
        made |= {"properties": {**dict.fromkeys(properties, False), **allowed}, "additionalProperties": False}
        del made["propertyNames"]
    elif said.keys() == {"pattern"} and not properties and isinstance(said["pattern"], str):
        made |= {"patternProperties": {said["pattern"]: more}, "additionalProperties": False}
        del made["propertyNames"]


def _fits_all(schema: SchemaValue) -> bool:
    return schema is True or schema == {}


def _is_number(value: SchemaValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(number: float) -> bool:
    return isinstance(number, int) or math.isfinite(number)  # large integers are no floats


def _outside(number: float) -> bool:
    if isinstance(number, float) and not number.is_integer():  # infinite ones as well
        return not abs(number) <= MAX_FLOAT
    return abs(number) > MAX_INTEGER


def _whole(value: SchemaValue) -> SchemaValue:
    """Whole numbers in it as integers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return {key: _whole(each) for key, each in value.items()} if isinstance(value, dict) else value


def _numbers(value: SchemaValue, depth: int) -> Iterator[float]:
    if depth > MAX_DEPTH:
        raise SchemaError(f"recursion limit: it is nested more than {MAX_DEPTH} levels deep")
    if _is_number(value):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each, depth + 1)


def _pointed(value: SchemaValue, depth: int) -> Iterator[str]:
    """The steps of all references: what stands below any of these names may be a schema."""
    if depth > MAX_DEPTH:
        raise SchemaError(f"recursion limit: it is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        for key, each in value.items():
            if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(each, str):
                yield key
                yield from steps(each)
            else:
                yield from _pointed(each, depth + 1)
    elif isinstance(value, list):
        for each in value:
            yield from _pointed(each, depth + 1)
