"""What a model writes, taken apart: the same however its text is cut, and exact."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.parsed_output import ParsedOutput
from baton.parsers.reader import Malformed, ParsedCall, ParsedReasoning, ParsedText
from baton.parsers.registry import TOOL_PARSERS, make_parser
from baton.v1.inference_pb2 import Delta

SCHEMA = json.dumps({"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}})
TOOLS = {"f": SCHEMA, "g": ""}
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"  # noqa: RUF001


def xml(name, arguments):
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def glm(name, arguments):
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parts = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()]
    return f"<tool_call>{name}\n{''.join(parts)}</tool_call>"


def deepseek(name, arguments):
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    return f"{begin}function{sep}{name}\n```json\n{json.dumps(arguments)}\n```{end}"


def said(form, calls):
    """How a model of this form writes such calls."""
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in objects)
    if form == "qwen3_coder":
        return "\n".join(xml(*call) for call in calls)
    if form == "glm":
        return "\n".join(glm(*call) for call in calls)
    if form == "llama3_json":
        return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)
    if form == "pythonic":
        made = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]
        return f"[{', '.join(made)}]"
    if form == "mistral":
        return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)
    if form == "deepseek":
        return DEEPSEEK.format("".join(deepseek(*call) for call in calls))
    assert form == "gpt_oss"
    between = "<|start|>assistant"
    ends = "<|call|>" + between
    return ends.join(
        f" to=functions.{n}<|channel|>commentary json<|message|>{json.dumps(a)}" for n, a in calls
    )


def parse(form, pieces, *, reasoning="", opened=False, cut=False, tools=TOOLS):
    parser = make_parser(form, reasoning, tools, opened=opened)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish(cut=cut)
    text = "".join(event.text for event in events if isinstance(event, ParsedText))
    reasoned = "".join(event.text for event in events if isinstance(event, ParsedReasoning))
    calls = [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, ParsedCall)]
    return text, reasoned, calls


def cut_at(text, places):
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_where_calls_are_cut_off_no_part_of_one_is_text(form):
    """But for two characters, which are as likely the beginning of something else."""
    calls = [("f", {"s": "a b", "n": 3}), ("g", {"s": "x"})]
    whole = said(form, calls)
    for end in range(len(whole)):
        text, _, found = parse(form, [whole[:end]], cut=True)
        assert len(text.strip()) <= 2, whole[:end]
        assert found == calls[: len(found)]
    assert parse(form, ["a <t"], cut=True)[0] == "a <t"


@pytest.mark.parametrize("form", ["llama3_json", "pythonic"])
def test_an_object_that_is_cut_off_and_cannot_be_a_call_is_text(form):
    """As of answers with a response_format."""
    no_calls = [
        '{"answer": "lo',
        ' {\n "names": [{"name": "f"',
        '{"name": "f", "size":',
        '{"name": "Ali',
        '{"name": "Alice", "parameters": {"a": ',
        '{"name": "f", "age": 3',
        '{"id": 7, "type": "x", "title": "f',
        '{"name": ["f", ',
    ]
    for text in no_calls:
        assert parse(form, [text], cut=True) == (text, "", [])
    calls = ['{"na', '{"name": "f", "par', '{"parameters": {}, "na', '{"ans', '{"name":', '{"name": "f']
    for text in calls:
        assert parse(form, [text], cut=True) == ("", "", [])


@pytest.mark.parametrize("text", ["<", "[", " <t", "to", "t"])
@pytest.mark.parametrize("form", ["", *TOOL_PARSERS])
def test_a_first_token_that_may_begin_a_mark_is_text_where_it_is_the_last(form, text):
    """As of answers with max_tokens 1."""
    if text != "[" or form != "pythonic":
        assert parse(form, [text], reasoning="think", cut=True)[0].strip() == text.strip()
        assert not form or parse(form, [text], cut=True)[0].strip() == text.strip()
    assert parse(form, ["<thi"], reasoning="think", cut=True)[0] in ("", "<thi" * (form == "gpt_oss"))


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|end|>",
    "<|message|>",
    "<|call|>",
    "<|start|>",
    "<arg_key>",
    "</function>",
    "<parameter=x>",
    "```",
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    "'",
    "<|python_tag|>",
    "\n",
    "<｜tool▁calls▁end｜>",  # noqa: RUF001
    "a",
    "é",
    "😀",
    " ",
]
STRINGS = st.lists(st.sampled_from(MARKS), max_size=6).map("".join)
PLACES = st.lists(st.integers(0, 2000), max_size=12)
ARGUMENTS = st.fixed_dictionaries({}, optional={"s": STRINGS, "n": st.integers(-9, 99)})
CALLS = st.lists(st.tuples(st.sampled_from(["f", "g"]), ARGUMENTS), min_size=1, max_size=3)


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "pythonic", "mistral", "deepseek", "gpt_oss"])
@settings(deadline=None, max_examples=60)
@given(calls=CALLS, places=PLACES)
def test_calls_are_what_was_said_whatever_their_strings_hold(form, calls, places):
    assert parse(form, cut_at(said(form, calls), places)) == ("", "", calls)


@pytest.mark.parametrize("form", ["qwen3_coder", "glm"])
@settings(deadline=None, max_examples=60)
@given(
    calls=st.lists(
        st.fixed_dictionaries({"n": st.integers()}, optional={"s": st.text("ab <>/{}\"'1\\")}).map(
            lambda arguments: ("f", arguments)
        ),
        min_size=1,
        max_size=3,
    ),
    places=PLACES,
)
def test_values_in_plain_text_have_the_types_of_the_schema(form, calls, places):
    assert parse(form, cut_at(said(form, calls), places)) == ("", "", calls)


@pytest.mark.parametrize("form", TOOL_PARSERS)
@pytest.mark.parametrize("reasoning", ["", "think"])
@settings(deadline=None, max_examples=80)
@given(
    parts=st.lists(st.sampled_from(MARKS) | CALLS.map(lambda calls: calls), max_size=8),
    places=PLACES,
    cut=st.booleans(),
    opened=st.booleans(),
)
def test_any_text_gives_the_same_however_it_is_cut(form, reasoning, parts, places, cut, opened):
    text = "".join(part if isinstance(part, str) else said(form, part) for part in parts)
    how = {"reasoning": reasoning, "cut": cut, "opened": opened}
    whole = parse(form, [text], **how)
    assert parse(form, cut_at(text, places), **how) == whole
    assert parse(form, text, **how) == whole  # character by character


@pytest.mark.parametrize("form", TOOL_PARSERS)
@settings(deadline=None, max_examples=40)
@given(text=st.text('ab {}[]<>|\n"1').filter(lambda text: "<" not in text), places=PLACES)
def test_a_plain_answer_is_left_as_it_is(form, text, places):
    assert parse(form, cut_at(text, places)) == (text, "", [])


def test_text_around_calls_without_the_white_space_between():
    text = "Let me see.\n" + said("hermes", [("f", {})]) + "\n\n" + said("hermes", [("g", {})]) + "\nDone.\n"
    assert parse("hermes", [text]) == ("Let me see.Done.", "", [("f", {}), ("g", {})])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>"),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        ('<tool_call>{"name": 5}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": {"n": NaN}}</tool_call>', None),
        ("<tool_call>" + '{"a":' * 5000 + "1" + "}" * 5000 + "</tool_call>", None),
        ('<tool_call>{"name": "f"', None),
    ],
)
def test_what_is_no_call_is_text(text, answer):
    assert parse("hermes", [text]) == (answer or text, "", [])


def test_a_call_that_is_cut_off_is_left_out():
    text = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"s": "a'
    assert parse("hermes", [text], cut=True) == ("Well.", "", [])
    assert parse("hermes", ["Well.\n<tool_call>\n"]) == ("Well.", "", [])
    assert parse("hermes", [text]) == (text, "", [])  # the model itself ended it there: nothing is lost


def test_arguments_are_json_whatever_the_model_wrote():
    lenient = '{"name": "f", "arguments": {"s": "a\nb"}}'  # a line break in a string
    assert parse("hermes", [f"<tool_call>{lenient}</tool_call>"])[2] == [("f", {"s": "a\nb"})]
    surrogate = '{"name": "f", "arguments": "{\\"s\\": \\"\\\\ud800\\"}"}'
    parser = make_parser("hermes", "", TOOLS, opened=False)
    (call,) = parser.feed(f"<tool_call>{surrogate}</tool_call>")
    call.arguments.encode()


def test_reasoning():
    for opened, begin in ((True, ""), (False, "<think>"), (False, "\n[THINK]\n")):
        end = "[/THINK]" if "THINK" in begin else "</think>"
        text = f"{begin}one\n\ntwo {end}\n\nThe answer.\n"
        assert parse("", [text], reasoning="think", opened=opened) == ("The answer.\n", "one\n\ntwo", [])
    assert parse("", ["<think>cut"], reasoning="think", cut=True) == ("", "cut", [])
    assert parse("", ["no <think>x</think>"], reasoning="think") == ("no <think>x</think>", "", [])


def test_a_draft_of_a_call_is_reasoning_if_the_reasoning_goes_on():
    call = said("hermes", [("f", {"n": 1})])
    assert parse("hermes", [f"<think>so {call} then</think>{call}"], reasoning="think")[1:] == (
        f"so {call} then",
        [("f", {"n": 1})],
    )
    assert parse("hermes", [f"<think>so\n{call}"], reasoning="think") == ("", "so", [("f", {"n": 1})])


def test_reasoning_tokens_do_not_depend_on_when_output_is_taken():
    early, late = (ParsedOutput(make_parser("gpt_oss", "gpt_oss", {}, opened=False), 0, "") for _ in range(2))
    header, end = ["<|channel|>", "commentary", "<|message|>"], ["<|end|>", "<|start|>", "assistant"]
    for piece in [*header, "Well", *end, "<|channel|>", "analysis", "<|message|>", "so", " it", " is"]:
        for output in (early, late):
            output.add(piece, 1, ended=False, cut=False)
        early.fill(Delta())
    assert early.reasoning_tokens == late.reasoning_tokens > 5


def test_long_arguments_cost_little():
    """Quadratic time would take minutes."""
    text = said("hermes", [("f", {"s": "word " * 40_000})])
    assert parse("hermes", [text[i : i + 4] for i in range(0, len(text), 4)])[2][0][0] == "f"


@pytest.mark.parametrize("value", ["b'a'", "{1, 2}", "{[1]}", "...", "1j"])
def test_values_that_json_has_not_make_no_call(value):
    assert parse("pythonic", [f"[f(x={value})]"]) == (f"[f(x={value})]", "", [])


@pytest.mark.parametrize(
    "form, opening",
    [
        ("hermes", "<tool_call>{"),
        ("qwen3_coder", "<tool_call>{"),
        ("llama3_json", "<|python_tag|>{"),
        ("mistral", "[TOOL_CALLS]{"),
        ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>{<|end|><|start|>"),
    ],
)
def test_marks_within_marks_are_soon_plain_text(form, opening, monkeypatch):
    """Each may read up to the end: quadratic time would stop the gateway."""
    tried = 0

    def loads(text):
        nonlocal tried
        tried += 1
        raise Malformed

    for name in ("hermes", "llama", "mistral", "gpt_oss"):
        monkeypatch.setattr(f"baton.parsers.{name}.loads", loads)
    text = opening * 5000 + "}" * 5000
    parser = make_parser(form, "", TOOLS, opened=False)
    events = [*parser.feed(text), *parser.finish()]
    assert 1 <= tried < 10 and not any(isinstance(event, ParsedCall) for event in events)
    if form != "gpt_oss":
        assert "".join(event.text for event in events) == text


def test_a_schema_is_read_once_however_many_calls(monkeypatch):
    read = []
    monkeypatch.setattr("baton.parsers.tools._properties", lambda schema: read.append(schema) or {"n": {}})
    assert len(parse("glm", [said("glm", [("f", {"n": 1})] * 50)])[2]) == 50
    assert len(read) == 1
