"""JSON Schemas with literals that go in as text, as rules of Lark: what stands above such a literal is said
here, all else remains the library's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from baton.grammar.json_reach import SchemaValue, each_schema, refers
from baton.grammar.json_schema import Exact, SchemaError, rewrite

WHITESPACE = r"[ \n\r\t]{1,20}"
"""Between the tokens of a JSON text: enough to indent it. Without a limit some models write spaces for
ever."""
_TOKENS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|<[^<>\s]+>|(?P<keyword>%(?:json|regex|llguidance))\s*'
)
"""Tokens of Lark: strings, comments, expressions, special tokens, and what is followed by JSON."""
_DEFINITIONS = ("$defs", "definitions")


def dumps(schema: SchemaValue) -> str:
    """The schema as JSON, the exact literals as well."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), default=lambda exact: exact.value)


def is_exact(schema: SchemaValue) -> bool:
    return any(isinstance(each, Exact) for each in _each(schema))


def as_lark(schema: SchemaValue, name: str) -> tuple[str, list[str]]:
    """An expression for the values of a rewritten schema, and the rules that it needs, whose names begin with
    `name`. Raises SchemaError for a literal that cannot be said where it stands."""
    if not is_exact(schema):
        return f"%json {dumps(schema)}", []
    try:
        writer = _Writer(schema, name)
        return writer.value(schema, ""), writer.rules
    except (AttributeError, KeyError, TypeError):  # of what else the library would say
        raise SchemaError("beside a literal beyond ±2^53, a keyword has a value of a wrong type") from None


def rewrite_lark(text: str) -> str:
    """A text of Lark, with what the library can take for every `%json`. Raises SchemaError."""
    prefix = "json"
    while prefix in text.replace("%json", ""):
        prefix += "_"
    parts: list[str] = []
    rules: list[str] = []
    at, decoder = 0, json.JSONDecoder()
    while (found := _TOKENS.search(text, at)) is not None:
        begin, at = at, found.end()
        if found["keyword"]:
            try:
                inner, at = decoder.raw_decode(text, at)
            except RecursionError:
                raise SchemaError("recursion limit: a schema is nested too deeply") from None
        if found["keyword"] == "%json":
            expression, more = as_lark(rewrite(inner).schema, f"{prefix}_{len(parts)}")
            parts += [text[begin : found.start()], expression]
            rules += more
        else:
            parts.append(text[begin:at])
    return "\n".join(["".join([*parts, text[at:]]), *rules])


class _Writer:
    def __init__(self, root: dict[str, SchemaValue], name: str) -> None:
        self.rules: list[str] = []
        self._name = name
        self._definitions = {
            f"#/{key}/{step.replace('~', '~0').replace('/', '~1')}": schema
            for key in _DEFINITIONS
            for step, schema in root.get(key, {}).items()
        }
        self._exact: set[str] = set()
        """Definitions with an exact literal, or that refer to one."""
        while more := {
            at for at in self._definitions.keys() - self._exact if self._has_exact(self._definitions[at])
        }:
            self._exact |= more
        self._named: dict[str, str] = {}
        """Rules of definitions."""
        options = root.get("x-guidance", {})
        if not isinstance(options, dict) or options.keys() - {"whitespace_pattern"}:
            raise SchemaError("x-guidance: with a literal beyond ±2^53 it can have a whitespace_pattern only")
        space = options.get("whitespace_pattern", WHITESPACE)
        self._options = {"x-guidance": options} if options else {}
        self._space = f"{name.upper()}_SPACE?" if space else ""
        if space:
            escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", space)
            self.rules.append(f"{name.upper()}_SPACE: /{escaped}/")

    def value(self, schema: SchemaValue, path: str) -> str:
        if not self._has_exact(schema):
            return f"%json {dumps(self._whole(schema, path))}"
        kept = {
            key: each for key, each in schema.items() if key not in (*_DEFINITIONS, "x-guidance", "$schema")
        }
        keys = kept.keys()
        if keys == {"$ref"}:
            return self._definition(kept["$ref"])
        if keys == {"anyOf"}:
            options = [
                self.value(each, f"{path}.anyOf[{number}]") for number, each in enumerate(kept["anyOf"])
            ]
            return f"({' | '.join(options)})"
        if keys <= {"const", "type"} or keys <= {"enum", "type"}:
            values = [kept["const"]] if "const" in kept else kept["enum"]
            found = [each.value if isinstance(each, Exact) else each for each in values]
            texts = [self._literal(each) for each in found if _is_of(each, kept.get("type"))]
            if texts:
                return f"({' | '.join(texts)})"
        closed = kept.get("additionalProperties", False) in (False, True)
        if closed and kept.get("type") == "object" and keys <= _OF_OBJECTS:
            return self._object(kept, path)
        if kept.get("type") == "array" and keys <= {"type", "items", "minItems", "maxItems"}:
            least, most = kept.get("minItems", 0), kept.get("maxItems")
            item = self._rule(self.value(kept["items"], f"{path}.items"))
            return self._array(item, least, most)
        said = ", ".join(sorted(keys))
        text = "a literal beyond ±2^53 is exact only in plain objects, arrays, anyOf and definitions"
        raise SchemaError(f"{path.lstrip('.') or 'the schema'} ({said}): {text}")

    def _has_exact(self, schema: SchemaValue) -> bool:
        return is_exact(schema) or any(
            refers(each) and each["$ref"] in self._exact for each in each_schema(schema)
        )

    def _whole(self, schema: SchemaValue, path: str) -> SchemaValue:
        """The schema with the definitions that it may refer to."""
        references = {each["$ref"] for each in each_schema(schema) if refers(each)}
        if not references <= self._definitions.keys():
            raise SchemaError(
                f"{path.lstrip('.')}: beside a literal beyond ±2^53, references are to definitions only"
            )
        if not isinstance(schema, dict):
            return schema
        made: dict[str, SchemaValue] = {**schema, **self._options}
        for at in self._definitions.keys() - self._exact if references else ():
            _, key, name = at.split("/")
            name = name.replace("~1", "/").replace("~0", "~")
            made[key] = {**made.get(key, {}), name: self._definitions[at]}
        return made

    def _definition(self, at: str) -> str:
        if at not in self._named:
            self._named[at] = name = f"{self._name}_d{len(self._named)}"
            self.rules.append(f"{name}: {self.value(self._definitions[at], at)}")
        return self._named[at]

    def _rule(self, expression: str) -> str:
        self.rules.append(f"{self._name}_r{len(self.rules)}: {expression}")
        return self.rules[-1].partition(":")[0]

    def _object(self, schema: dict[str, SchemaValue], path: str) -> str:
        required = list(dict.fromkeys(schema.get("required", [])))
        names = list(dict.fromkeys([*schema.get("properties", {}), *required]))
        members, must = [], []
        for name in names:
            property_schema = schema.get("properties", {}).get(name, True)
            if property_schema is False and name not in required:
                continue
            value = self.value(property_schema, f"{path}.properties.{name}")
            members.append(self._rule(f'{_text(dumps(name))} {self._space} ":" {self._space} {value}'))
            must.append(name in required)
        return self._members(members, must)

    def _members(self, members: list[str], must: list[bool]) -> str:
        """An object: those that must be, and others, in this order."""
        rests = [""]
        for member, needed in zip(reversed(members), reversed(must), strict=True):
            more = f'{self._space} "," {self._space} {member}'
            rests.insert(0, self._rule(f"{more if needed else f'({more})?'} {rests[0]}"))
        firsts = range(must.index(True) + 1 if True in must else len(members))
        starts = [f"{members[first]} {rests[first + 1]}" for first in firsts]
        inner = f"({' | '.join(starts)}){'' if True in must else '?'}" if starts else ""
        return f'"{{" {self._space} {inner} {self._space} "}}"'

    def _array(self, item: str, least: int, most: int | None) -> str:
        more = f'({self._space} "," {self._space} {item})'
        end = "" if most is None else max(most - 1, 0)
        inner = f"{item} {more}{{{max(least - 1, 0)},{end}}}" if most != 0 else ""
        optional = f"({inner}){'' if least else '?'}" if inner else ""
        return f'"[" {self._space} {optional} {self._space} "]"'

    def _literal(self, value: SchemaValue) -> str:
        if isinstance(value, dict):
            members = [
                f'{_text(dumps(key))} {self._space} ":" {self._space} {self._literal(each)}'
                for key, each in value.items()
            ]
            return f'"{{" {self._space} {self._joined(members)} {self._space} "}}"'
        if isinstance(value, list):
            return f'"[" {self._space} {self._joined(list(map(self._literal, value)))} {self._space} "]"'
        return _text(dumps(value))

    def _joined(self, parts: list[str]) -> str:
        return f' {self._space} "," {self._space} '.join(parts)


_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties"))
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "object": dict,
    "array": list,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
}


def _is_of(value: SchemaValue, kinds: SchemaValue) -> bool:
    """The value is of one of the JSON types."""
    if kinds is None:
        return True
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind in ("integer", "number") and isinstance(value, bool):
            continue
        if kind == "integer" and (
            isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        ):
            return True
        if isinstance(value, _TYPES.get(kind, ())):
            return True
    return False


def _each(schema: SchemaValue) -> Iterator[SchemaValue]:
    yield schema
    if isinstance(schema, dict | list):
        for each in schema.values() if isinstance(schema, dict) else schema:
            yield from _each(each)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
