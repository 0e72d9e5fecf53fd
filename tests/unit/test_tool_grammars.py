"""Grammars of tool calls: whatever they let a model write, its parser reads as calls that fit."""

import json
import random

import jsonschema
import numpy as np
import pytest

from baton.demo import model_path
from baton.gateway.parsed_output import ParsedOutput
from baton.gateway.token_log import ChoiceLog
from baton.gateway.tool_grammars import constrain, unenforced
from baton.grammar.base import GrammarError, GrammarSpec
from baton.grammar.llguidance import LlguidanceBackend
from baton.parsers import deepseek
from baton.parsers.reader import ParsedCall, ParsedText
from baton.parsers.registry import TOOL_PARSERS, make_parser
from baton.rpc.errors import BatonError
from baton.tokenizer import hf_tokenizer
from baton.v1.common_pb2 import FINISH_REASON_STOP, Grammar, SamplingParams
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
    return hf_tokenizer.load(model_path())


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """The same tokenizer, with the marks of all formats as special tokens, as the models have them."""
    folder = tmp_path_factory.mktemp("marked")
    source = json.loads((model_path() / "tokenizer.json").read_text())
    config = json.loads((model_path() / "config.json").read_text())
    marks = {mark for parser in TOOL_PARSERS.values() for mark in parser.SPECIAL} - {"</tool_call>"}
    marks |= {"<think>", "</think>"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for id, mark in enumerate(sorted(marks), config["vocab_size"]):
        source["added_tokens"].append({"id": id, "content": mark, "special": True, **flags})
    config["vocab_size"] += len(marks)
    (folder / "tokenizer.json").write_text(json.dumps(source))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_bytes((model_path() / "tokenizer_config.json").read_bytes())
    return hf_tokenizer.load(folder)


@pytest.fixture(scope="module")
def backend(tokenizer):
    return backend_of(tokenizer)


def backend_of(tokenizer):
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


def accepts(backend, tokenizer, made, text, letters=""):
    """The grammar lets a model write this, and end. letters: each of them is encoded by itself."""
    matcher = backend.compile(GrammarSpec("lark", made.lark)).matcher()
    try:
        for piece in (text, *letters):
            matcher.accept(tokenizer.encode([piece], False)[0])
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
        calls = [event for event in events if isinstance(event, ParsedCall)]
        assert calls and not any(isinstance(event, ParsedText) for event in events), text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_a_named_tool_and_one_call(backend, tokenizer):
    other = CALL.replace("get_weather", "time").replace('{"unit": "c"}', "{}")
    every = grammar(tokenizer)
    assert all(accepts(backend, tokenizer, every, text) for text in (CALL, other, f"{CALL}\n{other}"))
    named = grammar(tokenizer, name="get_weather")
    assert accepts(backend, tokenizer, named, CALL)
    assert not accepts(backend, tokenizer, named, other)
    assert not accepts(backend, tokenizer, named, f"{CALL}\n{CALL}")
    several = grammar(tokenizer, name="get_weather", parallel_tool_calls=True)
    assert accepts(backend, tokenizer, several, f"{CALL}\n{CALL}")
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


def test_white_space_is_as_the_schema_says(backend, tokenizer):
    schema = {**SCHEMA, "x-guidance": {"whitespace_pattern": ""}}
    answer = Grammar(json_schema=json.dumps(schema))
    made = grammar(tokenizer, reasoning="think", mode="AUTO", tools=[], answer=answer)
    assert accepts(backend, tokenizer, made, '{"unit":"c"}')
    assert not accepts(backend, tokenizer, made, '{"unit": "c"}')


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_ends_where_its_parser_ends_it(tokenizer, marked, special):
    used = marked if special else tokenizer
    backend, either = backend_of(used), grammar(used, reasoning="think")
    opened = grammar(used, reasoning="think", opened=True)
    assert accepts(backend, used, either, f"<think>a [/THINK] b</think>\n\n{CALL}")
    assert accepts(backend, used, either, f"[THINK]a </think> b[/THINK]{CALL}") is not special
    assert accepts(backend, used, opened, f"a[/THINK]{CALL}")
    for wrong in (f"[THINK]a</think>{CALL}", f"<think>a[/THINK]{CALL}"):
        assert not accepts(backend, used, either, wrong)
    # A mark that is spelled, letter by letter, is a mark to the parser.
    for made, begin in ((opened, "a"), (either, "<think>a")):
        assert not accepts(backend, used, made, begin, [*"</think>", "b", f"</think>{CALL}"])


def test_no_end_of_the_analysis_is_spelled(marked):
    backend, made = backend_of(marked), grammar(marked, "gpt_oss", "gpt_oss")
    begin, end = "<|channel|>analysis<|message|>so", "<|end|><|start|>assistant"
    call = written("gpt_oss", True, '{"unit": "c"}')
    assert accepts(backend, marked, made, begin, ["<|en", f"{end}{call}"])
    assert not accepts(backend, marked, made, begin, [*end, "b", f"{end}{call}"])


@pytest.mark.parametrize("form", [each for each in TOOL_PARSERS if each != "gpt_oss"])
def test_calls_after_the_reasoning_of_which_marks_are_special_tokens(marked, form):
    parser = make_parser(form, "think", {tool.name: tool.parameters for tool in TOOLS}, opened=True)
    log = ChoiceLog(0, (), 0)
    log.begin(marked.vocabulary, [], ParsedOutput(parser, 0, ""))
    call = written(form, True, '{"unit": "c"}')
    log.push(marked.encode([f"so</think>{call}<|endoftext|>"], False)[0], (), FINISH_REASON_STOP)
    delta = log.take("", True).delta
    assert (delta.reasoning, delta.text) == ("so", "")
    assert [json.loads(call.arguments) for call in delta.tool_calls] == [{"unit": "c"}]


@pytest.mark.parametrize(
    ("answer", "good"),
    [
        (Grammar(json_schema=json.dumps(SCHEMA)), '{"unit": "c"}'),
        (Grammar(regex="a/b+"), "a/bb"),
        (Grammar(regex=r"a\/b[\\/]"), "a/b/"),
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


@pytest.mark.parametrize("mode", ["AUTO", "REQUIRED"])
def test_only_allowed_tools_are_called(backend, tokenizer, mode):
    other = CALL.replace("get_weather", "time").replace('{"unit": "c"}', "{}")
    tools = [*TOOLS, Tool(name="third")]
    prompt = ChatPrompt(tools=tools, tool_choice={"mode": f"MODE_{mode}", "allowed": ["time", "third"]})
    made = constrain(
        prompt, SamplingParams(), tokenizer.vocabulary, ("hermes", ""), reasons=False, opened=False
    )
    assert accepts(backend, tokenizer, made, other)
    assert not accepts(backend, tokenizer, made, CALL)
    assert accepts(backend, tokenizer, made, "Hello") == (mode == "AUTO")


def test_a_tool_is_held_to_its_schema_as_far_as_can_be(backend, tokenizer):
    large = 2**53 + 1
    schema = {
        "type": "object",
        "properties": {"ids": {"type": "array", "uniqueItems": True, "items": {"enum": [large]}}},
        "required": ["ids"],
    }
    tool = Tool(name="f", parameters=json.dumps(schema))
    made = grammar(tokenizer, tools=[tool])
    assert unenforced(ChatPrompt(tools=[tool], tool_choice=REQUIRED)) == {"tools.f.uniqueItems"}
    assert unenforced(ChatPrompt(tools=[tool])) == set()
    call = '<tool_call>\n{"name": "f", "arguments": {"ids": [IDS]}}\n</tool_call>'
    assert accepts(backend, tokenizer, made, call.replace("IDS", f"{large}, {large}"))
    assert not accepts(backend, tokenizer, made, call.replace("IDS", f"{large - 1}"))
    tool.strict = True
    with pytest.raises(BatonError, match=r"schema of f: properties\.ids\.uniqueItems cannot") as caught:
        grammar(tokenizer, tools=[tool])
    assert (caught.value.field, caught.value.reason) == ("chat.tools", "INVALID_GRAMMAR")
    unused = {"$defs": {"a": {"not": {"type": "null"}}}, "type": "object"}
    assert grammar(tokenizer, tools=[Tool(name="f", parameters=json.dumps(unused), strict=True)]) is not None


def written(form, marked, *arguments):
    """Calls of get_weather, as the grammar of this form lets a model write them."""
    objects = [f'{{"name": "get_weather", "{{}}": {each}}}' for each in arguments]
    if form in ("llama3_json", "pythonic"):
        key = "parameters" if form == "llama3_json" else "arguments"
        return "; ".join(each.replace("{}", key) for each in objects)
    objects = [each.replace("{}", "arguments") for each in objects]
    if form == "mistral":
        if marked:
            return "".join(f"[TOOL_CALLS]get_weather[ARGS]{each}" for each in arguments)
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    if form == "deepseek":
        calls = [
            f"{deepseek.CALL}function{deepseek.SEP}get_weather\n```json\n{each}\n```{deepseek.CALL_END}"
            for each in arguments
        ]
        return f"{deepseek.BEGIN}{''.join(calls)}{deepseek.END}"
    if form == "gpt_oss":
        head = " to=functions.get_weather<|channel|>commentary json<|message|>"
        return "<|call|><|start|>assistant".join(head + each for each in arguments)
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_strict_functions_in_every_format(tokenizer, marked, form, special):
    """Text before them, and after them where their parser goes on with text."""
    used = marked if special else tokenizer
    backend = backend_of(used)
    strict = [Tool(name="get_weather", parameters=json.dumps(SCHEMA), strict=True), Tool(name="time")]
    made = grammar(used, form, mode="AUTO", tools=strict)
    good, bad = '{"unit": "c"}', '{"unit": "k"}'
    final = "<|channel|>final<|message|>" if form == "gpt_oss" else ""
    assert accepts(backend, used, made, f"{final}Hello, [x] and {{y}}.")
    twice = written(form, special, good, '{"n": 3, "unit": "f"}')
    for text in (written(form, special, good), twice):
        assert accepts(backend, used, made, text), text
    assert not accepts(backend, used, made, written(form, special, bad))
    assert not accepts(backend, used, made, written(form, special, good, bad))
    mark = TOOL_PARSERS[form].MARKS[0] if form in ("llama3_json", "pythonic") else ""
    before = "Let me see. "
    if form == "gpt_oss":
        before = f"<|channel|>commentary<|message|>{before}<|end|><|start|>assistant"
    assert accepts(backend, used, made, f"{before}{mark}{twice}")
    assert not accepts(backend, used, made, f"{before}{mark}{written(form, special, bad)}")
    if form in ("hermes", "qwen3_coder", "glm", "mistral", "deepseek"):
        assert accepts(backend, used, made, f"{twice} Done.")
    # Marks that are spelled, letter by letter, are marks to the parser.
    opening = "<|end|><|start|>assistant" if form == "gpt_oss" else ""
    other = "<function=get_weather><parameter=unit>k</parameter></function>"
    for wrong in (written(form, special, bad), *([other] if form == "qwen3_coder" else [])):
        letters = f"Let me see. {opening}{mark}{wrong}"
        assert any(isinstance(event, ParsedCall) for event in read(form, final + letters, strict))
        assert accepts(backend, used, made, final, "Let me see.")
        assert not accepts(backend, used, made, final, letters)
    # Whatever else may be written: what the parser reads as a call of the function fits its schema.
    calls = 0
    for seed in range(12):
        text = steered(backend, used, made, seed, [before, mark, twice, written(form, special, bad)])
        for event in read(form, text, strict):
            if isinstance(event, ParsedCall) and event.name == "get_weather":
                calls += 1
                jsonschema.validate(json.loads(event.arguments), SCHEMA)
    assert calls


def read(form, text, tools):
    parser = make_parser(form, "", {tool.name: tool.parameters for tool in tools}, opened=False)
    return [*parser.feed(text), *parser.finish(cut=True)]


def steered(backend, tokenizer, made, seed, texts, most=120):
    """A text that the grammar lets a model write: pieces of the texts as far as they are allowed, and other
    tokens between them. May be cut."""
    matcher = backend.compile(GrammarSpec("lark", made.lark)).matcher()
    randomly, written, planned = random.Random(seed), b"", []
    for _ in range(most):
        allowed = mask(tokenizer, matcher)
        if not planned and randomly.random() < 0.5:
            text = randomly.choice(texts)
            planned = tokenizer.encode(
                [text[randomly.choice((0, 0, randomly.randrange(len(text) + 1))) :]], False
            )[0]
        if planned and allowed[planned[0]]:
            token = planned.pop(0)
        else:
            planned = []
            others = sorted(set(np.flatnonzero(allowed).tolist()) - set(tokenizer.eos_token_ids))
            if not others:
                break
            token = randomly.choice(others)
        written += tokenizer.vocabulary.bytes_of(token)
        matcher.accept([token])
    return written.decode(errors="replace")


@pytest.mark.parametrize(
    ("sampling", "tool", "field"),
    [
        (SamplingParams(), Tool(name="f", parameters=json.dumps({"title": "a" * 2**19})), "chat.tools"),
        (SamplingParams(ignore_eos=True), Tool(name="f"), "sampling.ignore_eos"),
        (SamplingParams(), Tool(name="f", parameters='{"type": "array"}'), "chat.tools"),
        (SamplingParams(grammar=Grammar(json_schema="{")), None, "sampling.grammar"),
        (SamplingParams(grammar=Grammar(json_schema="[" * 9999)), None, "sampling.grammar"),
    ],
)
def test_what_cannot_be_enforced_is_refused(tokenizer, sampling, tool, field):
    prompt = ChatPrompt(tools=[tool], tool_choice=REQUIRED) if tool else ChatPrompt(tools=TOOLS)
    with pytest.raises(BatonError) as raised:
        constrain(prompt, sampling, tokenizer.vocabulary, ("hermes", ""), reasons=False, opened=False)
    assert raised.value.field == field
