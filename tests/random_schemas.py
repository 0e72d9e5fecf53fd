"""Random JSON Schemas of the keywords that llguidance enforces, each satisfiable."""

from __future__ import annotations

import random
import string
from typing import Any

Schema = dict[str, Any]
FORMATS = ("date", "uuid", "ipv4")
PATTERNS = ("^[a-c]{2,5}$", "^x-[0-9]+(\\.[0-9]{1,2})?$", "^(ab|cd|é)*$")
WORDS = ("red", "green", 'a "quoted" word', "back\\slash", "é€😀", "", "null", "{", "0")


def random_schema(seed: int) -> Schema:
    rng = random.Random(seed)
    definitions = {name: _value(rng, 1, ()) for name in rng.sample(("node", "item"), rng.randint(0, 2))}
    schema = _value(rng, rng.randint(1, 3), tuple(definitions))
    if definitions:
        schema["$defs"] = definitions
    return schema


def _value(rng: random.Random, depth: int, references: tuple[str, ...]) -> Schema:
    if depth == 0:
        return _leaf(rng, references)
    kinds = (_object, _object, _array, _any_of, _all_of, _leaf)
    kind = rng.choice(kinds)
    return kind(rng, references) if kind is _leaf else kind(rng, depth - 1, references)


def _leaf(rng: random.Random, references: tuple[str, ...]) -> Schema:
    if references and rng.random() < 0.25:
        return {"$ref": f"#/$defs/{rng.choice(references)}"}
    return rng.choice((_string, _string, _integer, _number, _enum, _simple))(rng)


def _object(rng: random.Random, depth: int, references: tuple[str, ...]) -> Schema:
    names = rng.sample(("name", "id", "größe", "two words", 'q"', "$ref", "a.b", "x"), rng.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {n: _value(rng, depth, references) for n in names}}
    if names and rng.random() < 0.8:
        schema["required"] = rng.sample(names, rng.randint(1, len(names)))
    more = rng.random()
    if more < 0.6:
        schema["additionalProperties"] = False
    elif more < 0.8:
        schema["additionalProperties"] = _leaf(rng, ())
    return schema


def _array(rng: random.Random, depth: int, references: tuple[str, ...]) -> Schema:
    least = rng.randint(0, 3)
    schema: Schema = {"type": "array", "items": _value(rng, depth, references)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [_leaf(rng, references) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.7:
        schema["minItems"] = least
    if rng.random() < 0.7:
        schema["maxItems"] = least + rng.randint(0, 3)
    return schema


def _any_of(rng: random.Random, depth: int, references: tuple[str, ...]) -> Schema:
    return {"anyOf": [_value(rng, depth, references) for _ in range(rng.randint(2, 3))]}


def _all_of(rng: random.Random, depth: int, references: tuple[str, ...]) -> Schema:
    parts = [
        {"type": "object", "properties": {name: _value(rng, depth, references)}, "required": [name]}
        for name in rng.sample(string.ascii_lowercase, 2)
    ]
    return {"allOf": parts}


def _string(rng: random.Random) -> Schema:
    kind = rng.random()
    if kind < 0.2:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind < 0.4:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind < 0.6:
        return {"type": "string"}
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-1000, 1000)
    schema: Schema = {"type": "integer"}
    if rng.random() < 0.7:
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.7:
        schema["maximum"] = low + rng.randint(20, 2000)
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.choice((2, 5, 7))
    return schema


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50) / 4
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 80) / 8}


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample([*WORDS, 1, -2.5, None, True, [1, "a"], {"k": None}], rng.randint(1, 5))}


def _simple(rng: random.Random) -> Schema:
    simple = (
        {"type": "boolean"},
        {"type": "null"},
        {"const": rng.choice(WORDS)},
        {"type": ["null", "integer"]},
    )
    return dict(rng.choice(simple))
