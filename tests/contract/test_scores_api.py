"""/v1/score and /v1/rerank: what is refused before it costs much."""

from __future__ import annotations

import httpx
import pytest
from gateway_rig import gateway
from scripted_decode import ScriptedDecode, silent


@pytest.mark.parametrize(
    "path, body, word",
    [
        ("score", '"text_1": "%s", "text_2": ["a", "b"]' % ("word " * 300), "text_1"),
        ("rerank", '"query": "q", "documents": ["a", "%s"]' % ("word " * 300), "documents[1]"),
        ("score", r'"text_1": "\ud800", "text_2": "a"', "surrogate"),
        ("score", r'"text_1": "a", "text_2": "a", "cache_salt": "\ud800"', "surrogate"),
    ],
)
async def test_wrong_texts_are_refused(path, body, word):
    async with ScriptedDecode(silent, context=100) as node, gateway(node) as rig:
        async with httpx.AsyncClient(trust_env=False) as http:
            content = f'{{"model": "scripted", {body}}}'
            headers = {"content-type": "application/json"}
            answer = await http.post(f"{rig.http}/v1/{path}", content=content, headers=headers)
        assert answer.status_code == 400 and word in answer.json()["error"]["message"], answer.text
        assert not node.starts


async def test_a_model_is_named():
    async with (
        ScriptedDecode(silent) as node,
        gateway(node) as rig,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        body = {"model": "", "text_1": "a", "text_2": "b"}
        answer = await http.post(f"{rig.http}/v1/score", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
