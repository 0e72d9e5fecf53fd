"""Grammars of tool calls: whatever they let a model write, its parser reads as calls that fit."""

import json
import random

import jsonschema
import numpy as np
import pytest

from baton.demo import model_path
from baton.gateway.parsers.reader import Call, Text
from baton.gateway.parsers.registry import TOOL_PARSERS, make_parser
from baton.gateway.tool_grammars import constrain
from baton.grammar.base import GrammarError, GrammarSpec
from baton.grammar.llguidance import LlguidanceBackend
from baton.rpc.errors import BatonError
from baton.tokenizer import hf
from baton.v1.common_pb2 import Grammar, SamplingParams
from baton.v1.tokenizer_pb2 import ChatPrompt, Tool, ToolChoice

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "unit": {"enum": ["c", "f"]}},
    "required": ["unit"],
}
TOOLS = [Tool(name="get_weather", parameters=json.dumps(SCHEMA)), Tool(name="time")]
SCHEMAS = {"get_weather": SCHEMA, "time": {"type": "object"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"unit": "c"}}\n</tool_call>'
REQUIRED = ToolChoice(mode=ToolChoice.MODE_REQUIRED)


@pytest.fixture(scope="module")
def tokenizer():
    return hf.load(model_path())


@pytest.fixture(scope="module")
def backend(tokenizer):
    def encode(text):
        return tokenizer.encode([text], False)[0]

    vocabulary = tokenizer.vocabulary
    tables = (vocabulary.tokens, vocabulary.special, tokenizer.eos_token_ids, vocabulary.size)
    return LlguidanceBackend(*tables, encode)


def grammar(
    tokenizer, form="hermes", reasoning="", *, opened=False, answer=None, name="", mode="REQUIRED", **chat
):
    prompt = ChatPrompt(tools=chat.pop("tools", TOOLS), **chat)
    prompt.tool_choice.mode = ToolChoice.Mode.Value(f"MODE_{mode}")
    prompt.tool_choice.name = name
    how = {"reasons": bool(reasoning), "opened": opened}
    sampling = SamplingParams(grammar=answer)
    return constrain(prompt, sampling, tokenizer.vocabulary, (form, reasoning), **how)


def mask(tokenizer, matcher):
    words = np.zeros(-(-tokenizer.vocabulary.size // 32), np.int32)
    matcher.fill(words)
    return np.unpackbits(words.view(np.uint8), bitorder="little")


def walk(backend, tokenizer, made, seed, most=400):
    """A random text that the grammar lets a model write; None: it did not end in time."""
    matcher = backend.compile(GrammarSpec("lark", made.lark)).matcher()
    randomly, written = random.Random(seed), b""
    for _ in range(most):
        allowed = set(np.flatnonzero(mask(tokenizer, matcher)).tolist())
        ends = allowed.intersection(tokenizer.eos_token_ids)
        if ends and (allowed == ends or randomly.random() < 0.5):
            return written.decode()
        token = randomly.choice(sorted(allowed - ends))
        written += tokenizer.vocabulary.bytes_of(token)
        matcher.accept([token])
    return None


def accepts(backend, tokenizer, made, text):
    """The grammar lets a model write this, and end."""
    matcher = backend.compile(GrammarSpec("lark", made.lark)).matcher()
    try:
        matcher.accept(tokenizer.encode([text], False)[0])
        return bool(mask(tokenizer, matcher)[tokenizer.eos_token_ids[0]])
    except GrammarError:
        return False


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_what_a_required_call_may_be_is_read_as_calls_that_fit(backend, tokenizer, form):
    made = grammar(tokenizer, form)
    texts = [text for seed in range(12) if (text := walk(backend, tokenizer, made, seed)) is not None]
    assert len(texts) > 6
    for text in texts:
        tools = {tool.name: tool.parameters for tool in TOOLS}
        parser = make_parser(form, "", tools, opened=False)
        events = [*parser.feed(text), *parser.finish()]
        calls = [event for event in events if isinstance(event, Call)]
        assert calls and not any(isinstance(event, Text) for event in events), text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_a_named_tool_and_one_call(backend, tokenizer):
    other = CALL.replace("get_weather", "time").replace('{"unit": "c"}', "{}")
    every = grammar(tokenizer)
    assert all(accepts(backend, tokenizer, every, text) for text in (CALL, other, f"{CALL}\n{other}"))
    named = grammar(tokenizer, name="get_weather")
    assert accepts(backend, tokenizer, named, CALL)
    assert not accepts(backend, tokenizer, named, other)
    single = grammar(tokenizer, parallel_tool_calls=False)
    assert accepts(backend, tokenizer, single, CALL)
    assert not accepts(backend, tokenizer, single, f"{CALL}\n{CALL}")
    for wrong in ("Hello", CALL.replace("unit", "unity"), CALL.replace('"c"', '"k"'), f"Well. {CALL}"):
        assert not accepts(backend, tokenizer, every, wrong)


def test_calls_and_answers_come_after_the_reasoning(backend, tokenizer):
    opened = grammar(tokenizer, reasoning="think", opened=True)
    assert accepts(backend, tokenizer, opened, f"a < b <tool_call></think>\n\n{CALL}")
    assert not accepts(backend, tokenizer, opened, CALL)
    either = grammar(tokenizer, reasoning="think")
    assert accepts(backend, tokenizer, either, CALL)
    assert accepts(backend, tokenizer, either, f"<think>\nwell\n</think>\n\n{CALL}")
    assert not accepts(backend, tokenizer, either, "<think>\nwell\n</think>\n\nno")
    schema = Grammar(json_schema=json.dumps(SCHEMA))
    answer = grammar(tokenizer, reasoning="think", mode="AUTO", tools=[], answer=schema)
    assert accepts(backend, tokenizer, answer, '<think>x</think>{"unit": "f"}')
    assert not accepts(backend, tokenizer, answer, "<think>x</think>f")


@pytest.mark.parametrize(
    ("answer", "good"),
    [
        (Grammar(json_schema=json.dumps(SCHEMA)), '{"unit": "c"}'),
        (Grammar(regex="a/b+"), "a/bb"),
        (Grammar(choice={"strings": ['y"es', "no"]}), 'y"es'),
    ],
)
def test_an_answer_of_a_form_or_a_call(backend, tokenizer, answer, good):
    made = grammar(tokenizer, mode="AUTO", answer=answer)
    assert accepts(backend, tokenizer, made, CALL) and accepts(backend, tokenizer, made, good)
    assert not accepts(backend, tokenizer, made, "Hello")


def test_strict_functions_beside_a_free_answer(backend, tokenizer):
    tools = [Tool(name="get_weather", parameters=json.dumps(SCHEMA), strict=True), Tool(name="time")]
    made = grammar(tokenizer, mode="AUTO", tools=tools)
    loose = CALL.replace("get_weather", "time")
    for good in ("", "Hello <tool", CALL, f"Let me see.\n{CALL}\n{CALL}", loose):
        assert accepts(backend, tokenizer, made, good), good
    assert not accepts(backend, tokenizer, made, CALL.replace('"c"', '"k"'))
    assert grammar(tokenizer, mode="AUTO") is None and grammar(tokenizer, mode="NONE", tools=tools) is None
    with pytest.raises(BatonError, match="required"):
        grammar(tokenizer, "mistral", mode="AUTO", tools=tools)


@pytest.mark.parametrize(
    ("sampling", "tool", "field"),
    [
        (SamplingParams(), Tool(name="f", parameters=json.dumps({"title": "a" * 2**19})), "chat.tools"),
        (SamplingParams(ignore_eos=True), Tool(name="f"), "sampling.ignore_eos"),
    ],
)
def test_what_cannot_be_enforced_is_refused(tokenizer, sampling, tool, field):
    prompt = ChatPrompt(tools=[tool], tool_choice=REQUIRED)
    with pytest.raises(BatonError) as raised:
        constrain(prompt, sampling, tokenizer.vocabulary, ("hermes", ""), reasons=False, opened=False)
    assert raised.value.field == field
