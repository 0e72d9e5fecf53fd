"""Schemas as the grammar library can take them: none ends its process, and what it takes fits exactly."""

import json
import random
import re
import subprocess
import sys

import jsonschema
import pytest

from baton.grammar.json_literals import as_lark, is_exact, rewrite_lark
from baton.grammar.json_patterns import without_look_around
from baton.grammar.json_schema import FORMATS, Exact, SchemaError, rewrite
from number_schemas import case, must_be_refused, put, texts
from random_schemas import random_schema

CHILD = """
import json, sys
import numpy as np
from baton.grammar.base import GrammarError, GrammarSpec
from baton.grammar.llguidance import LlguidanceBackend
tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
backend = LlguidanceBackend(tokens, set(), [256], 257, lambda text: list(text.encode()))
words = np.empty(9, np.int32)
def fits(grammar, text):
    matcher = grammar.matcher()
    try:
        matcher.accept(list(text.encode()))
        matcher.fill(words)
    except GrammarError:
        return False
    return not whole or bool(words[8] & 1)
for line in sys.stdin:
    kind, source, texts, whole = json.loads(line)
    try:
        grammar = backend.compile(GrammarSpec(kind, source))
        verdict = [fits(grammar, text) for text in texts]
    except GrammarError as error:
        verdict = str(error)
    print(json.dumps(verdict), flush=True)
"""


class Library:
    """The library in a child process, which may die."""

    def __init__(self):
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begins(self, source, *texts):
        """Whether each of the texts is the beginning of one that fits; a string: the error."""
        return self.fits(source, *texts, whole=False)

    def fits(self, source, *texts, kind="json_schema", whole=True):
        """Whether each of the texts fits; a string: the error."""
        source = source if isinstance(source, str) else json.dumps(source)
        self._child.stdin.write(json.dumps([kind, source, texts, whole]) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        assert line, f"the process has ended with {self._child.wait(10)}: {source}"
        return json.loads(line)

    def close(self):
        self._child.kill()
        self._child.communicate()


@pytest.fixture(scope="module")
def library():
    made = Library()
    yield made
    made.close()


# --- numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_numbers_at_every_limit(library, first):
    compiled = 0
    for seed in range(first, first + 50):
        schema, shape, values = case(seed)
        forms = [sorted(texts(shape, value)) for value in values]
        found = library.fits(schema, *(text for each in forms for text in each))
        if must_be_refused(schema):
            assert re.match(r"([\w$.\[\]]+\.)?(exclusiveM|m)(in|ax)imum: ", found), (schema, found)
            continue
        if isinstance(found, str):  # the bounds leave nothing
            assert re.search(
                "(?i)greater than|empty|no token may follow|unsatisfiable|invalid range", found
            ), (schema, found)
            assert not any(valid(put(shape, value), schema) for value in values), (schema, found)
            continue
        compiled += 1
        for value, each in zip(values, forms, strict=True):
            fit = [found.pop(0) for _ in each]
            assert any(fit) == valid(put(shape, value), schema), (schema, each)
    assert compiled > 20


def valid(value, schema):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_the_schema_that_ended_processes(library):
    smallest = -(2**63)
    assert library.fits({"const": smallest}, f"{smallest}", f"{smallest + 1}") == [True, False]
    lark = f'start: "f(" %json {{"const": {smallest}}} ")" # %json {{"const": 1e400}}\n'
    assert library.fits(lark, f"f({smallest})", "f(1)", kind="lark") == [True, False]
    # Wherever a reference may find it.
    for at in ("/components/schemas/F", "/required/0", "/minimum", "/default/0"):
        schema = {"const": smallest}
        for step in reversed(at[1:].split("/")):
            schema = [schema] if step == "0" else {step: schema}
        assert "±2^53" in library.fits({**schema, "$ref": f"#{at}"})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": [12345678901234567891, "a"]}, ['"a"', "12345678901234567891"], ["12345678901234567000"]),
        ({"enum": [2**53 + 1, "a"], "type": "integer"}, [f"{2**53 + 1}"], ['"a"']),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "string"}, "id": {"const": 2**53 + 1}, "b": {"type": "null"}},
            },
            ["{}", '{ "a":"" }', f'{{"id": {2**53 + 1}, "b": null}}', '{"a": "x","b" :null}'],
            [f'{{"id": {2**53}}}', '{"b": null, "a": ""}', '{"a": "",}', '{"c": 1}'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "string"}, "id": {"const": 2**53 + 1}, "b": {"type": "null"}},
                "required": ["id", "b"],
            },
            [f'{{"id": {2**53 + 1}, "b": null}}', f'{{"a": "", "id": {2**53 + 1}, "b": null}}'],
            ["{}", f'{{"id": {2**53 + 1}}}', '{"b": null}'],
        ),
        (
            {"type": "array", "items": {"const": 2**60 + 1}, "minItems": 1, "maxItems": 2},
            [f"[{2**60 + 1}]", f"[ {2**60 + 1}, {2**60 + 1} ]"],
            ["[]", f"[{', '.join([str(2**60 + 1)] * 3)}]", f"[{2**60}]"],
        ),
        (
            {"const": {"a": [1e300, "é"], "b": {}}},
            ['{"a": [1e+300, "é"], "b": { }}'],
            ['{"a": [1], "b": {}}'],
        ),
    ],
)
def test_literals_are_written_exactly(library, schema, good, bad):
    assert library.fits(schema, *good, *bad) == [True] * len(good) + [False] * len(bad)


def test_what_cannot_be_exact_is_refused_by_name(library):
    for schema, where in (
        ({"properties": {"n": {"type": "number", "minimum": -1e20}}}, r"properties\.n\.minimum: "),
        ({"multipleOf": 2**53 + 2}, "multipleOf: "),
        ({"minLength": 2**31}, "minLength: "),
        ({"allOf": [{"multipleOf": 4294967291}, {"multipleOf": 4294967279}]}, r"allOf\[1\]\.multipleOf: "),
        ({"enum": [1e400]}, "enum has a number"),
        ({"allOf": [{"const": 2**60}]}, r"the schema \(allOf\)"),
        ({"const": 2**60, "minimum": 3}, r"the schema \(const, minimum\)"),
    ):
        assert re.match(where, library.fits(schema)), schema


# --- what says nothing, and what is said otherwise ------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "propertyNames": {"type": "string"}}, ['{"a": 1}'], ["1"]),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "type": "object"},
            ['{"a": 1}', '{"b": 1}', "{}"],
            ['{"c": 1}'],
        ),
        (
            {
                "type": "object",
                "propertyNames": {"type": "string", "enum": ["a", "b"]},
                "additionalProperties": {"type": "number"},
                "required": ["a"],
            },
            ['{"a": 1}', '{"a": 1, "b": 2}'],
            ['{"b": 1}', '{"a": ""}', '{"a": 1, "c": 1}'],
        ),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"xy": 1}'], ['{"y": 1}']),
        ({"type": "array", "uniqueItems": False}, ["[1, 1]"], ["1"]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1, 1]"]),
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, ["[1]"], ["[]", "[1, 1, 1]"]),
        ({"not": False, "type": "null"}, ["null"], ["1"]),
        ({"type": "object", "properties": {"a": {"not": {}}}}, ["{}"], ['{"a": 1}']),
        (
            {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
            ['{"a": 1}'],
            ['{"b": 1}'],
        ),
        ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, ["[1]"], ["[1, 2]"]),
        ({"type": "null", "then": False, "minContains": 2, "dependentRequired": {}}, ["null"], ["1"]),
        ({"type": "string", "if": {"minLength": 3}, "then": True}, ['"a"'], ["1"]),
        ({"type": "string", "format": "password"}, ['"a"'], ["1"]),
        ({"type": "string", "format": "path", "pattern": "^/"}, ['"/a"'], ['"a"']),
        ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ["1"]),
        ({"type": "string", "maxLength": 2**63 - 1}, ['"a"'], ["1"]),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 1},
            ['{"a": 1}', '{"a": 1, "b": 1}'],
            ["{}"],
        ),
        (
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False, "maxProperties": 1},
            ['{"a": 1}', "{}"],
            ['{"b": 1}'],
        ),
        (
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False, "minProperties": 1},
            ['{"a": 1}'],
            ["{}"],
        ),
    ],
)
def test_keywords_that_say_nothing_or_can_be_said_by_others(library, schema, good, bad):
    assert library.fits(schema, *good, *bad) == [True] * len(good) + [False] * len(bad)
    validator = jsonschema.Draft202012Validator(schema)
    assert all(validator.is_valid(json.loads(text)) for text in good)
    assert not any(validator.is_valid(json.loads(text)) for text in bad)


def test_what_says_something_is_still_refused(library):
    for keyword, schema in (
        ("uniqueItems", {"uniqueItems": True}),
        ("not", {"not": {"type": "null"}}),
        ("propertyNames", {"propertyNames": {"minLength": 2}}),
        ("unevaluatedProperties", {"allOf": [{}], "unevaluatedProperties": False}),
        ("contains", {"contains": {}, "minContains": 0, "maxContains": 1}),
        ("if", {"if": {"type": "null"}, "then": False}),
        ("look-around", {"pattern": "(?=a)b"}),
        ("min/maxProperties", {"properties": {"a": {}}, "minProperties": 1}),
        ("min/maxProperties", {"properties": {"a": {}}, "maxProperties": 1}),
    ):
        assert keyword in library.fits(schema), schema
        assert rewrite({"items": schema}).unenforced


def test_formats_that_the_library_knows(library):
    for name in FORMATS:
        assert library.fits({"type": "string", "format": name}, '"-"') == [False]


def test_references_keep_what_they_point_at(library):
    schema = {
        "components": {
            "schemas": {"format": {"type": "integer", "example": 1e400}, "Unused": {"not": {"a": 1}}}
        },
        "$ref": "#/components/schemas/format",
    }
    assert library.fits(schema, "1", '"a"') == [True, False]


def test_a_keyword_is_no_name(library):
    properties = {"const": {"type": "integer"}, "minimum": {"type": "string"}, "default": {"type": "null"}}
    schema = {"type": "object", "properties": properties, "required": ["const", "default"]}
    assert library.fits(schema, '{"const": 1, "minimum": "", "default": null}', '{"const": 1}') == [
        True,
        False,
    ]


# --- what the library would find only in the middle of an answer ----------------------------------------


def test_what_never_ends_fits_nothing(library):
    endless = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}, "required": ["next"]}
    name = {"properties": {"const": {"$ref": "#/$defs/a"}, "$ref": {"type": "string"}}}
    for schema, good, bad in (
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, ["null"], ["{"]),
        ({"type": "object", **name}, ['{"$ref": ""}'], ['{"const"']),
        ({"type": "array", "items": {"$ref": "#/$defs/a"}}, ["[]"], ["[{"]),
        ({"const": {"$ref": "#/$defs/a"}}, ['{"$ref": "#/$defs/a"}'], ["false"]),
    ):
        schema = {"$defs": {"a": endless}, **schema}
        assert library.fits(schema, *good) == [True] * len(good)
        assert library.begins(schema, *bad) == [False] * len(bad), schema
    assert "never ends" in library.fits({"$defs": {"a": endless}, "$ref": "#/$defs/a"})
    leaf = {
        "$defs": {"a": {"anyOf": [endless, {"type": "array", "items": {"$ref": "#"}}]}},
        "$ref": "#/$defs/a",
    }
    assert library.fits(leaf, '{"next": {"next": [[]]}}', '{"next": null}') == [True, False]


def chosen(count, optional):
    """A union of objects with so many properties that need not be there, inside of an object."""
    objects = [
        {
            "type": "object",
            "properties": {f"{number}.{name}": {"type": "null"} for name in range(optional + 1)},
            "required": [f"{number}.{optional}"],
            "additionalProperties": False,
        }
        for number in range(count)
    ]
    return {"type": "object", "properties": {"a": {"anyOf": objects}}, "required": ["a"]}


def test_too_many_ways_to_go_on(library):
    """They are refused before the answer begins, and what is not refused goes on behind that place."""
    for served, refused in (
        (chosen(1900, 0), chosen(3000, 0)),
        (chosen(240, 2), chosen(260, 2)),
        (chosen(1, 495), chosen(1, 505)),
    ):
        assert library.begins(served, '{"a": {"0.0": null') == [True]
        assert re.match(r"(anyOf|properties): about \d+ parts may follow", library.fits(refused)), refused
    union = {"$defs": {"u": chosen(1500, 0)["properties"]["a"]}, "anyOf": [{"$ref": "#/$defs/u"}] * 2}
    assert library.fits(union).startswith("anyOf: about 3000 parts")
    loose = rewrite(chosen(3000, 0), loose=True)
    assert loose.unenforced == ["anyOf"] and library.fits(loose.schema, '{"a": {"x": 1}}') == [True]


# --- what is left out of a tool that is not strict ------------------------------------------------------


def test_loose_schemas_are_enforced_as_far_as_they_can_be(library):
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "uniqueItems": True, "items": {"type": "number", "minimum": -1e20}},
            "b": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "c": {"type": "string", "pattern": r"(a)\1"},
        },
        "required": ["a"],
        "if": {"required": ["b"]},
        "then": {"required": ["c"]},
    }
    made = rewrite(schema, loose=True)
    assert sorted(set(made.unenforced)) == ["if", "minimum", "oneOf", "pattern", "then", "uniqueItems"]
    assert library.fits(made.schema, '{"a": [1, 1], "b": 2.5}', "{}", '{"a": [""]}') == [True, False, False]
    assert not rewrite({"type": "object", "propertyNames": {"type": "string"}}, loose=True).unenforced
    broken = {"type": "object", "properties": {"a": {"$ref": "#/definitions/A"}, "b": {"$ref": "x.json"}}}
    assert rewrite(broken, loose=True).unenforced == ["$ref", "$ref"] == rewrite(broken).unenforced
    assert library.fits(rewrite(broken, loose=True).schema, '{"a": 1, "b": 2}', "[]") == [True, False]
    at = ("#/%24defs/a~1b", "#/allOf/0", "#/$defs/a~1b", "#/%24defs/a%7E1b")
    found = {"$defs": {"a/b": {"type": "null"}}, "allOf": [{"type": "array"}]}
    for each in at:
        given = {**found, "items": {"$ref": each}}
        assert rewrite(given).unenforced == [] and not isinstance(library.fits(given, "[]"), str), each
    named = {"$defs": {"a": {"$anchor": "A", "type": "null"}}, "items": {"$ref": "#A"}, "type": "array"}
    assert rewrite(named).unenforced == [] and library.fits(named, "[null]", "[1]") == [True, False]


# --- patterns -------------------------------------------------------------------------------------------

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"


@pytest.mark.parametrize(
    ("pattern", "letters"),
    [
        (EMAIL, "a.@b-'"),
        (EMAIL.replace("A-Za-z", "A-Z"), "A.@B-'"),
        (DURATION, "P1YMDTHSW."),
        (DECIMAL + r"\d*\.?\d*$", "+-.01"),
        (DECIMAL + r"\d*\.?\d{0,2}0*$", "+-.01"),
        (DECIMAL + r"\d*\.?\d{0,0}0*$", "+-.01"),
    ],
)
def test_patterns_with_look_around_are_said_without(pattern, letters):
    said = without_look_around(pattern)
    assert said and "(?=" not in said and "(?!" not in said
    rng, fitting = random.Random(1), 0
    for _ in range(60_000):
        text = "".join(rng.choices(letters, k=rng.randint(0, 9)))
        if pattern.startswith("^(?!\\.)") and rng.random() < 0.7:
            text += f"@{letters[0]}.{letters[0] * 2}"
        fits = re.search(pattern, text, re.ASCII) is not None
        assert fits == (re.search(said, text, re.ASCII) is not None), text
        fitting += fits
    assert fitting > 10


@pytest.mark.parametrize(("whole", "places", "most"), [(3, 2, 5), (0, 2, 2), (2, 0, 2), (None, None, 3)])
def test_decimals_of_so_many_digits(whole, places, most):
    ahead = rf"(?=[\d.]{{1,{most + 1}}}0*$)"
    if whole is None:
        pattern = DECIMAL + rf"(?:\d{{0,{most}}}|{ahead}\d*\.\d*0*$)"
    else:
        pattern = DECIMAL + rf"(?:\d{{0,{whole}}}|{ahead}\d{{0,{whole}}}\.\d{{0,{places}}}0*$)"
    said = without_look_around(pattern)
    whole_ones = re.compile(f"(?:{pattern})$", re.ASCII)
    rng, fitting = random.Random(2), 0
    for _ in range(20_000):
        text = "".join(rng.choices("+.01123", k=rng.randint(0, 8)))
        fits = whole_ones.search(text) is not None
        assert fits == (re.search(said, text, re.ASCII) is not None), text
        fitting += fits
    assert fitting > 100


def test_other_patterns():
    assert without_look_around(r"^a\(?=b[(?=]$") == r"^a\(?=b[(?=]$"
    assert without_look_around(r"(?<!a)b") is None and without_look_around(r"(a)\1") is None
    assert without_look_around(DECIMAL + r"\d{1}$") is None


# --- whatever is sent -----------------------------------------------------------------------------------


def wrong(rng, value):
    """The value with something else at one place."""
    large = [2**60, {"const": -(2**63)}, {"enum": [2**60]}, {"const": 1e300}]
    other = rng.choice([*large, None, [], {}, True, "object", large, {"$ref": "#/$defs/node"}])
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(sorted(value))
        return {**value, rng.choice((key, key, "const", "minItems", "enum")): wrong(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], wrong(rng, value[index]), *value[index + 1 :]]
    return other


@pytest.mark.parametrize("loose", [False, True])
def test_wrong_schemas_are_refused_in_words(library, loose):
    refused = exact = 0
    for seed in range(600):
        rng, schema = random.Random(seed), random_schema(seed)
        for _ in range(rng.randint(1, 3)):
            schema = wrong(rng, schema)
        if not isinstance(schema, dict):
            continue
        try:
            made = rewrite(schema, loose=loose)
            exact += bool(as_lark(made.schema, "x")[1])
        except SchemaError:
            refused += 1
            continue
        if seed % 6 == 0:
            library.fits(json.dumps(schema), "1")
    assert refused > 50 and exact > 10


# --- Lark -----------------------------------------------------------------------------------------------


def test_what_is_no_schema_in_lark_stays():
    text = (
        'start: "%json 1e400" /%json {"const":1e400}/ <|%json|> x # %json {"a":1e400}\nx: %regex {"a": 1e99}'
    )
    assert rewrite_lark(text) == text


def test_a_schema_that_is_no_json():
    with pytest.raises(SchemaError, match="recursion limit"):
        rewrite(json.loads("[" * 200 + "]" * 200))
    with pytest.raises(ValueError):
        rewrite_lark('start: %json {"a"')
    assert is_exact(rewrite({"items": {"const": 2**60}}).schema)
    assert rewrite({"const": 2**60}).schema == {"const": Exact(2**60)}
    assert rewrite({"const": 1e3}).schema == {"const": 1000}
