"""Grammars through the library: what may follow, what ends an output, and what is refused in which words."""

import json
import re
import threading

import numpy as np
import pytest

from baton.grammar.base import GrammarBusy, GrammarError, GrammarSpec
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.llguidance import LlguidanceBackend
from baton.model_path import resolve
from baton.tokenizer.hf_tokenizer import load
from baton.v1 import node_pb2
from baton.worker.grammar_requests import make_compiler

EOS, TOOL, UNDEFINED, WORD, PADDING = 256, 257, 258, 259, 260
VOCAB = 300
"""Bytes, an end, a special token, one that the tokenizer leaves undefined, a word; the rest is padding."""


def backend(**options):
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>", b"<|tool|>", None, b"ab"]
    given = {"tokens": tokens, "special": {TOOL}, "eos": [EOS], "vocab_size": VOCAB, "encode": encode}
    return LlguidanceBackend(**given | options)


def encode(text):
    return list(text.encode())


def allowed(matcher):
    words = np.empty(-(-VOCAB // 32), np.int32)
    matcher.fill(words)
    return set(np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def after(spec, text):
    matcher = backend().compile(spec).matcher()
    matcher.accept(encode(text))
    return allowed(matcher)


def ids(text):
    return set(encode(text))


def schema(**keywords):
    return GrammarSpec("json_schema", json.dumps(keywords))


def test_kinds():
    assert after(GrammarSpec("regex", "[0-9]+x"), "12") == ids("0123456789x")
    assert after(GrammarSpec("choice", choices=("a+b", "a(", "é\n")), "") == {ord("a"), 0xC3}
    assert after(GrammarSpec("choice", choices=("a+b", "a(", "é\n")), "a") == ids("+(")
    assert after(GrammarSpec("choice", choices=("a+b", "a(", "é\n")), "é") == ids("\n")
    assert after(GrammarSpec("json_object"), "") == ids("{")
    assert after(GrammarSpec("json_object"), "{") == ids('" \n\r\t}')
    assert after(schema(type="integer", minimum=10, maximum=12), "1") == ids("012")
    assert after(GrammarSpec("json_schema", " true "), "tr") == ids("u")
    assert after(GrammarSpec("lark", 'start: "f(" %json {"const": 7} ")"'), "f(7") == ids(")")


def test_only_the_end_follows_what_is_complete():
    assert after(GrammarSpec("regex", "xy"), "xy") == {EOS}
    assert after(GrammarSpec("regex", "xy+"), "xy") == {ord("y"), EOS}
    assert after(schema(type="object", additionalProperties=False), "{}") == {EOS}


def test_the_end_is_every_end_of_the_model_and_nothing_else():
    matcher = backend(eos=[EOS, ord("q")]).compile(GrammarSpec("regex", "(?s:.*)")).matcher()
    found = allowed(matcher)
    # "q" ends the output, so it is no text any more.
    assert {EOS, ord("q"), ord("p"), WORD} <= found
    assert found.isdisjoint({TOOL, UNDEFINED, *range(PADDING, VOCAB)})


def test_special_tokens_only_by_name():
    assert after(GrammarSpec("lark", 'start: <|tool|> "x"'), "") == {TOOL}
    assert after(GrammarSpec("regex", "<\\|tool\\|>"), "") == ids("<")
    # Any token: but not those that stand for nothing.
    assert after(GrammarSpec("lark", "start: <[*]>"), "").isdisjoint({UNDEFINED, *range(PADDING, VOCAB)})


def test_a_vocabulary_larger_than_the_models():
    tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"] + [b"zz"] * 100
    grammar = backend(tokens=tokens, special={290}, vocab_size=VOCAB).compile(GrammarSpec("regex", "z+"))
    assert max(allowed(grammar.matcher())) < VOCAB


def test_where_one_text_only_is_left_the_tokenizer_chooses_its_tokens():
    def words(text):
        return [WORD, *encode(text[2:])] if text.startswith("ab") else encode(text)

    first = backend(encode=words).compile(GrammarSpec("regex", "abc")).matcher()
    assert allowed(first) == {WORD}
    # One that adds something of its own, or reads special tokens in the text, is not followed.
    for wrong in (lambda text: encode(" " + text), lambda text: [TOOL, *encode(text)]):
        assert allowed(backend(encode=wrong).compile(GrammarSpec("regex", "abc")).matcher()) == {WORD}


def test_a_forced_text_is_encoded_once():
    asked = []
    grammar = backend(encode=lambda text: asked.append(text) or encode(text)).compile(
        schema(type="object", properties={"name": {"const": 1}}, required=["name"])
    )
    for _ in range(3):
        matcher = grammar.matcher()
        matcher.accept(encode('{"na'))
        assert allowed(matcher) == ids("m")
    assert asked and len(asked) == len(set(asked))


def test_the_encoding_of_a_long_forced_text_is_not_kept():
    asked = []
    own = backend(encode=lambda text: asked.append(text) or encode(text))
    for _ in range(2):
        own.compile(schema(const="a" * 300)).matcher().fill(np.empty(-(-VOCAB // 32), np.int32))
    longest = max(asked, key=len)
    assert len(longest) > 256 and asked.count(longest) > 1


def test_whitespace_is_bounded():
    spec = GrammarSpec("json_schema", '{"type": "array"}')
    assert ord(" ") in after(spec, "[" + " " * 19)
    assert ord(" ") not in after(spec, "[" + " " * 20)
    own = GrammarSpec("json_schema", '{"type": "array", "x-guidance": {"whitespace_pattern": "[ ]{1,2}"}}')
    assert ord(" ") not in after(own, "[  ")


def test_an_output_that_does_not_fit():
    matcher = backend().compile(GrammarSpec("regex", "abc")).matcher()
    with pytest.raises(GrammarError):
        matcher.accept(encode("ax"))
    with pytest.raises(GrammarError):
        matcher.fill(np.empty(-(-VOCAB // 32), np.int32))


def test_matchers_of_one_grammar_do_not_disturb_each_other():
    grammar = backend().compile(GrammarSpec("regex", "a(c|d)e"))
    first, second = grammar.matcher(), grammar.matcher()
    first.accept(encode("ac"))
    assert allowed(second) == ids("a")
    assert allowed(first) == ids("e")


# --- what is refused ------------------------------------------------------------------------------------


def nested(depth):
    return "".join('{"items":' for _ in range(depth)) + "{}" + "}" * depth


REFUSED = {
    "not JSON": (GrammarSpec("json_schema", '{"type":'), "Expecting value"),
    "no schema": (GrammarSpec("json_schema", "[]"), "object"),
    "nothing fits": (schema(type="integer", minimum=5, maximum=3), "minimum .5. is greater"),
    "contradiction": (schema(allOf=[{"type": "string"}, {"type": "integer"}]), "incompatible"),
    "false": (GrammarSpec("json_schema", "false"), "schema"),
    "endless": (schema(**{"$ref": "#"}), "."),
    "elsewhere": (schema(**{"$ref": "http://localhost/x"}), "http://localhost/x"),
    "not enforced": (schema(type="array", uniqueItems=True), "uniqueItems"),
    "deep": (GrammarSpec("json_schema", nested(500)), "recursion limit"),
    "very deep": (GrammarSpec("json_schema", nested(20_000)), "recursion limit"),
    "product": (
        schema(allOf=[{"anyOf": [{"required": [f"{i}.{j}"]} for j in range(4)]} for i in range(12)]),
        "too large",
    ),
    "many optional": (schema(type="object", properties={f"p{i}": {} for i in range(1500)}), "properties"),
    "regex": (GrammarSpec("regex", "(a"), "unclosed group"),
    "look-around": (GrammarSpec("regex", "(?=a)b"), "look-ahead"),
    "deep regex": (GrammarSpec("regex", "(" * 20_000 + "a" + ")" * 20_000), "nest"),
    "unknown rule": (GrammarSpec("lark", "start: foo"), "foo"),
    "unknown token": (GrammarSpec("lark", "start: <|nope|>"), "nope"),
    "deep rule": (GrammarSpec("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "deeply nested"),
    "no token": (GrammarSpec("regex", "é"), "no token may follow"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    spec, words = REFUSED[name]
    tokens = [bytes([byte]) if byte < 128 else None for byte in range(256)] + [b"<eos>"]
    with pytest.raises(GrammarError, match=words) as caught:
        backend(tokens=tokens, special=set()).compile(spec)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) <= 400


REFERENCES = {f"{i:x}": {"$ref": f"#/$defs/{i + 1:x}"} for i in range(12_000)}


@pytest.mark.parametrize(
    "spec",
    [
        # As deep as MAX_GRAMMAR_BYTES allows: the library recurses once a rule.
        GrammarSpec("lark", "start: r0\n" + "\n".join(f"r{i}:r{i + 1}" for i in range(8000)) + '\nr8000:"a"'),
        schema(
            **{
                "$defs": {f"{i:x}": {"$ref": f"#/$defs/{i + 1:x}"} for i in range(12_000)},
                "$ref": "#/$defs/0",
            }
        ),
    ],
)
def test_a_long_chain_ends_no_process(spec):
    outcome = GrammarCompiler(backend).submit(spec).result(60)
    if not isinstance(outcome, GrammarError):
        matcher = outcome.matcher()
        words = np.empty((1, -(-VOCAB // 32)), np.int32)
        type(matcher).fill_all([matcher], [[]], words)


def test_compiled_once_and_kept():
    compiled = []

    class Counting:
        def compile(self, spec):
            compiled.append(spec.text)
            if spec.text == "bad":
                raise GrammarError("no")
            if spec.text == "panic":
                raise KeyboardInterrupt("a panic")
            return spec.text

    loads = []
    compiler = GrammarCompiler(lambda: loads.append(1) or Counting(), capacity=2, threads=2)
    good, bad, panic = (GrammarSpec("regex", text) for text in ("good", "bad", "panic"))
    assert [compiler.submit(good).result(10) for _ in range(3)] == ["good"] * 3
    assert str(compiler.submit(bad).result(10)) == str(compiler.submit(bad).result(10)) == "no"
    assert "KeyboardInterrupt: a panic" in str(compiler.submit(panic).result(10))
    assert compiled == ["good", "bad", "panic"]
    compiler.submit(good).result(10)  # the oldest of three
    assert compiled == ["good", "bad", "panic", "good"]
    assert loads == [1]
    assert compiler.stats.compiled == 4


def test_few_wait_to_be_compiled():
    compiling, go_on = threading.Event(), threading.Event()

    class Slow:
        def compile(self, spec):
            compiling.set()
            assert go_on.wait(60)
            return spec.text

    compiler = GrammarCompiler(Slow, capacity=2, threads=1)
    first = compiler.submit(GrammarSpec("regex", "0"))
    assert compiling.wait(60)
    futures = [compiler.submit(GrammarSpec("regex", str(number))) for number in range(1, 5)]
    assert [isinstance(f.result(0), GrammarBusy) for f in futures if f.done()] == [True, True]
    go_on.set()
    assert [future.result(60) for future in (first, *futures[:2])] == ["0", "1", "2"]
    assert compiler.submit(GrammarSpec("regex", "4")).result(60) == "4"


def test_a_vocabulary_that_cannot_be_loaded():
    def load():
        raise GrammarError("no vocabulary")

    compiler = GrammarCompiler(load)
    for text in ("a", "b"):
        assert str(compiler.submit(GrammarSpec("regex", text)).result(10)) == "no vocabulary"


# --- with a real vocabulary -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo():
    path = resolve("demo")
    tokenizer = load(path)
    size = tokenizer.vocabulary.size
    info = node_pb2.ModelInfo(eos_token_ids=tokenizer.eos_token_ids, vocab_size=size)
    return tokenizer, make_compiler(path, info)


def random_output(grammar, vocabulary, eos, rng, most=60):
    """Tokens drawn from the masks, and the mask before each."""
    matcher, words = grammar.matcher(), np.empty(-(-vocabulary.size // 32), np.int32)
    output, masks = [], []
    while len(output) < most and not (output and output[-1] in eos):
        matcher.fill(words)
        masks.append(words.copy())
        output.append(int(rng.choice(np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0])))
        if output[-1] not in eos:
            matcher.accept(output[-1:])
    return output, masks


PATTERN = r"(ab|[a-f]{2,9}, )*[0-9]+\.[^a]x"


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", PATTERN),
        schema(type="object", properties={"a_long_name": {"type": "number"}, "b": {"enum": ["x", 1, None]}}),
    ],
)
def test_a_mask_is_a_function_of_the_tokens(demo, spec):
    """However they came: one by one, or at once after a resume."""
    tokenizer, compiler = demo
    vocabulary, grammar = tokenizer.vocabulary, compiler.submit(spec).result(60)
    rng = np.random.default_rng(1)
    for _ in range(20):
        output, masks = random_output(grammar, vocabulary, tokenizer.eos_token_ids, rng)
        words = np.empty_like(masks[0])
        for count in (0, len(output) // 2, len(output) - 1):
            matcher = grammar.matcher()
            matcher.accept(output[:count])
            matcher.fill(words)
            assert (words == masks[count]).all()
        if output[-1] in tokenizer.eos_token_ids and spec.kind == "regex":
            text = b"".join(vocabulary.tokens[token] for token in output[:-1]).decode()
            assert re.fullmatch(PATTERN, text)


def test_what_is_known_of_whole_sets_of_tokens_changes_no_mask(demo, monkeypatch):
    """Near the end of a string some of a set fit, and some do not."""
    tokenizer, compiler = demo
    spec = schema(type="array", items={"type": "string", "maxLength": 14}, minItems=9)
    with_sets = compiler.submit(spec).result(60)
    monkeypatch.setattr("baton.grammar.llguidance.SLICES", [])
    vocabulary, eos = tokenizer.vocabulary, tokenizer.eos_token_ids
    without = LlguidanceBackend(
        vocabulary.tokens,
        vocabulary.special,
        eos,
        vocabulary.size,
        lambda text: tokenizer.encode([text], add_special_tokens=False)[0],
    ).compile(spec)
    rng = np.random.default_rng(2)
    words = np.empty(-(-vocabulary.size // 32), np.int32)
    for _ in range(4):
        output, masks = random_output(with_sets, vocabulary, eos, rng)
        matcher = without.matcher()
        for token, mask in zip(output, masks, strict=True):
            matcher.fill(words)
            assert (words == mask).all()
            matcher.accept([token])


def test_several_at_once_as_one_by_one(demo):
    """A matcher that fails does not disturb the others, and stays failed."""
    tokenizer, compiler = demo
    spec = GrammarSpec(
        "json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    )
    grammar = compiler.submit(spec).result(60)
    texts = ["", "{", '{"a"', "no", '{"a": 1', "[", '{"a": 1}']
    outputs = [tokenizer.encode([text], add_special_tokens=False)[0] if text else [] for text in texts]
    together, alone = [grammar.matcher() for _ in texts], [grammar.matcher() for _ in texts]
    size = -(-len(tokenizer.vocabulary.tokens) // 32)
    words, own = np.empty((len(texts), size), np.int32), np.empty(size, np.int32)
    for tokens in ([list(output) for output in outputs], [[] for _ in outputs]):
        errors = type(together[0]).fill_all(together, tokens, words)
        assert sorted(errors) == [3, 5]
        assert all("doesn't satisfy the grammar" in str(error) for error in errors.values())
        for row, (matcher, given) in enumerate(zip(alone, tokens, strict=True)):
            if row not in errors:
                matcher.accept(given)
                matcher.fill(own)
                assert (words[row] == own).all()
