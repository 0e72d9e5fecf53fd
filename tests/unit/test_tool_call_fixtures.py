"""What models wrote, recorded by the suite canitoolcall: parsed as it expects, however the text is cut."""

import json
import random

import pytest
from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult

from baton.parsers.reader import ParsedCall, ParsedReasoning, ParsedText
from baton.parsers.registry import make_parser

FORMATS = {
    "qwen3-hermes": ("hermes", "think"),
    "qwen3-xml": ("qwen3_coder", "think"),
    "llama": ("llama3_json", ""),
    "mistral": ("mistral", "think"),
    "deepseek": ("deepseek", "think"),
    "glm": ("glm", "think"),
    "gpt-oss": ("gpt_oss", "gpt_oss"),
}
"""Of a family: how it writes tool calls and reasoning."""
NOT_READ = ("DeepSeek-V3.2", "DeepSeek-V4")
"""Models that write calls in a form of their own (DSML)."""
FAMILIES = load_families()
FIXTURES = [
    fixture
    for fixture in load_fixtures(families=list(FORMATS))
    if not any(name in fixture.reference_model for name in NOT_READ)
]
SPLITS = 5


def parse(fixture, pieces):
    tools = {
        tool["function"]["name"]: json.dumps(tool["function"].get("parameters")) for tool in fixture.tools
    }
    form, reasoning = FORMATS[fixture.family]
    if "Llama-4" in fixture.reference_model:
        form = "pythonic"
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = (
            FAMILIES[fixture.family].reference_for(fixture.reference_model).default_generation_prompt or ""
        )
    opened = prompt.rstrip().endswith(("<think>", "[THINK]"))
    parser = make_parser(form, reasoning, tools, opened=opened)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish(cut=fixture.truncated)
    return ParseResult(
        content="".join(event.text for event in events if isinstance(event, ParsedText)) or None,
        reasoning_content="".join(event.text for event in events if isinstance(event, ParsedReasoning))
        or None,
        tool_calls=tuple(ParsedToolCall(e.name, e.arguments) for e in events if isinstance(e, ParsedCall)),
    )


def pieces(text, seed):
    randomly, made = random.Random(seed), []
    while text:
        size = randomly.randint(1, 8)
        made.append(text[:size])
        text = text[size:]
    return made


@pytest.mark.parametrize("family", FORMATS)
def test_fixtures(family):
    fixtures = [fixture for fixture in FIXTURES if fixture.family == family]
    assert len(fixtures) > 20
    for fixture in fixtures:
        whole = parse(fixture, [fixture.raw_output])
        streams = {f"rand:{seed}": parse(fixture, pieces(fixture.raw_output, seed)) for seed in range(SPLITS)}
        rows = run_checks(fixture, FAMILIES[family], Observation(nonstream=whole, streams=streams))
        wrong = [(row.check, row.strategy, row.detail) for row in rows if row.status.value == "fail"]
        assert case_status(rows).value in ("pass", "soft_pass"), (fixture.id, wrong)
