"""Usage tells of drafts in the dialects that have no field for them; without drafts it has none."""

from __future__ import annotations

from types import SimpleNamespace

from baton.api.anthropic_api import MessagesAnswer
from baton.api.responses_answers import usage_of
from baton.v1 import inference_pb2


def finished(**fields):
    return inference_pb2.Finished(usage=inference_pb2.Usage(prompt_tokens=9, output_tokens=5, **fields))


def test_drafts_where_there_were_any():
    drafts = {"drafted_tokens": 7, "accepted_drafts": 3}
    for fields, expected in ((drafts, drafts), ({}, None)):
        assert usage_of(finished(**fields)).get("baton") == expected
        answer = MessagesAnswer(SimpleNamespace(prompt_tokens=9, name="a"), "model")
        (delta, _) = answer.end(finished(**fields))
        assert delta["usage"].get("baton") == expected and answer.whole()["usage"].get("baton") == expected
