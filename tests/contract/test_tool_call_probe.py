"""canitoolcall's probe through HTTP, of a model that answers as it should.

What a small model answers is another matter (tests/cluster/test_client_suites.py): here all scenarios pass.
"""

import asyncio
import json
from dataclasses import replace

import pytest
from canitoolcall.probe import BUILTIN_SCENARIOS, probe
from scripted_decode import STOP, saying
from test_openai_api import api

from baton.demo import model_path
from baton.grammar.base import GrammarSpec
from baton.tokenizer.hf_tokenizer import load
from baton.v1 import node_pb2
from baton.worker.grammar_requests import make_compiler

NOTE = {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}
PEOPLE = [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}]
EVENT = {"title": "Design review", "attendees": PEOPLE, "location": {"city": "Berlin", "room": "4.12"}}
PARIS = ("get_weather", {"city": "Paris"})
ANSWERS = {
    "single-call": [PARIS],
    "parallel-calls": [PARIS, ("get_weather", {"city": "Tokyo"})],
    "no-call": "42",
    "nested-args": [("create_event", EVENT)],
    "unicode-args": [("save_note", NOTE)],
    "empty-args": [("get_server_time", {})],
    "forced-tool-choice": [("get_weather", {"city": "Lisbon"})],
    "tool-result-followup": "It is 18 °C in Paris, and clear.",
    "reasoning-then-call": [("record_answer", {"answer": "9.9"})],
}


def said(answer):
    if isinstance(answer, str):
        return answer
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments in answer
    )


def follows(sampling, ids):
    """Whether a grammar lets a model say it, by its own tokens."""
    tokenizer = load(model_path())
    info = node_pb2.ModelInfo(eos_token_ids=tokenizer.eos_token_ids, vocab_size=tokenizer.vocabulary.size)
    spec = GrammarSpec("lark", sampling.grammar.lark)
    matcher = make_compiler(model_path(), info).submit(spec).result(60).matcher()
    matcher.accept(ids)  # raises otherwise


@pytest.mark.parametrize("required", [False, True])
async def test_every_scenario_passes(required):
    """Each token is a delta of its own: a character of three bytes comes in three. required: the grammar of
    required calls lets the model say exactly this as well."""
    config = {"tool_parser": "hermes", "reasoning_parser": "think"}
    async with api(say="x", context=2048, config=config) as rig:
        outcomes, constrained = [], 0
        for scenario in BUILTIN_SCENARIOS:
            answer = ANSWERS[scenario.id]
            if required and scenario.tool_choice == "auto" and not isinstance(answer, str):
                scenario = replace(scenario, tool_choice="required")
            before = "<think>\nLet me see.\n</think>\n\n" if scenario.id.startswith("reasoning") else ""
            ids = await rig.encode(before + said(answer))
            rig.decode.script = saying(*([id] for id in ids), [0], finish=STOP)
            url = f"{rig.http}/v1"
            report = await asyncio.to_thread(probe, url, "scripted", scenarios=[scenario], concurrency=2)
            outcomes += report.outcomes
            sampling = rig.decode.starts[-1].sampling
            if sampling.HasField("grammar"):
                follows(sampling, list(ids))
                constrained += 1
        assert len(outcomes) == 27 and constrained == (7 if required else 1)
        assert {outcome.status for outcome in outcomes} == {"pass"}, outcomes
