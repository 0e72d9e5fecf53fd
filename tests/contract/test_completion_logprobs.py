"""Log-probabilities of answers: where their tokens stand in the text, what they are called, and that they end
where the text does."""

from __future__ import annotations

import json

import httpx
import pytest
from gateway_rig import gateway
from scripted_decode import LENGTH, STOP, ScriptedDecode, silent

from baton.v1 import common_pb2, inference_pb2

TEXT = "añb → 世界 c😀d"


def entry(token, logprob=-0.5):
    return common_pb2.TokenLogprob(token_id=token, logprob=logprob)


def saying(ids, finish=LENGTH, top=(), cut=1):
    """The tokens in pieces of `cut`, with log-probabilities; the prompt's too, if they are asked for."""

    async def script(running):
        prompt = [common_pb2.PositionLogprobs(chosen=entry(token)) for token in running.start.token_ids]
        if running.start.sampling.HasField("prompt_logprobs"):
            prompt[0].ClearField("chosen")
        await running.prompt(logprobs=prompt if running.start.sampling.HasField("prompt_logprobs") else ())
        for first in range(0, len(ids), cut):
            piece = ids[first : first + cut]
            positions = [common_pb2.PositionLogprobs(chosen=entry(token), top=top) for token in piece]
            last = first + cut >= len(ids)
            await running.tokens(piece, logprobs=positions, finish=finish if last else 0)
        await running.finished()

    return script


async def complete(rig, path="completions", **more):
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        answer = await http.post(f"{rig.http}/v1/{path}", json={"model": "scripted", **more})
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        return answer.json()["choices"][0]
    lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


@pytest.mark.parametrize("echo", [False, True])
async def test_offsets_are_places_in_the_text_also_of_parts_of_characters(echo):
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        ids = await rig.encode(TEXT)
        node.script = saying(ids)
        prompt = (await rig.encode("ö x ")) + [0]  # a special token has no text
        choice = await complete(rig, prompt=prompt, logprobs=0, echo=echo, max_tokens=len(ids))
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert choice["text"] == ("ö x " if echo else "") + TEXT
        assert len(tokens) == len(offsets) == len(ids) + (len(prompt) if echo else 0)
        assert max(offsets) < len(choice["text"]) and sorted(offsets) == offsets
        parts = 0
        for token, offset in zip(tokens, offsets, strict=True):
            if token.startswith("bytes:"):
                parts += 1
                assert not choice["text"][offset].isascii()
            elif token != rig.text([0]):
                assert choice["text"].startswith(token, offset)
        assert parts > 2
        streamed = await complete(rig, prompt=prompt, logprobs=0, echo=echo, max_tokens=len(ids), stream=True)
        found = [each for chunk in streamed if chunk["logprobs"] for each in chunk["logprobs"]["text_offset"]]
        assert found == offsets


async def test_tokens_that_are_no_text_have_a_name_each():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        parts = [token for text in "ñ→世😀" for token in await rig.encode(text)]
        parts = [token for token in dict.fromkeys(parts) if not _is_text(rig, token)][:5]
        assert len(parts) == 5
        top = [entry(token, -0.1 * number) for number, token in enumerate(parts)]
        node.script = saying([parts[-1]], top=top)
        choice = await complete(rig, prompt="x", logprobs=5, max_tokens=1)
        (found,) = choice["logprobs"]["top_logprobs"]
        assert len(found) == 5 and next(iter(found)).startswith("bytes:\\x")
        # The chosen token's value is its own.
        assert found[choice["logprobs"]["tokens"][0]] == choice["logprobs"]["token_logprobs"][0] == -0.5


def _is_text(rig, token):
    try:
        rig.vocabulary.bytes_of(token).decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("cut", [1, 100])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown", "named"),
    [(" three four", "one two", "one two"), ("three", "one two ", "one two three")],
)
async def test_they_end_with_the_text_at_a_stop_string(stream, cut, stop, shown, named):
    """A token that begins before the stop string is named, and none that begins in it."""
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        ids = await rig.encode("one two three four five")
        node.script = saying(ids, cut=cut)
        asked = {"stop": stop, "max_tokens": 50, "stream": stream}
        for path, more in (
            ("completions", {"prompt": "x", "logprobs": 1}),
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
        ):
            made = await complete(rig, path, **asked, **more)
            choices = made if stream else [made]
            known = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            if path == "completions":
                tokens = [token for each in known for token in each["tokens"]]
                text = "".join(choice["text"] for choice in choices)
            else:
                tokens = [token["token"] for each in known for token in each["content"]]
                parts = [choice["delta" if stream else "message"].get("content") for choice in choices]
                text = "".join(part or "" for part in parts)
            assert (text, "".join(tokens)) == (shown, named)


async def test_all_are_there_where_no_stop_string_comes():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        ids = await rig.encode("one two thr")
        for finish in LENGTH, STOP:
            node.script = saying(ids, finish)
            for stream in False, True:
                made = await complete(
                    rig, prompt="x", logprobs=0, stop="three", max_tokens=len(ids), stream=stream
                )
                known = [
                    each["logprobs"]["tokens"] for each in (made if stream else [made]) if each["logprobs"]
                ]
                assert len([token for tokens in known for token in tokens]) == len(ids)


async def test_over_grpc_tokens_come_with_the_text_that_they_belong_to():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        ids = await rig.encode("one two three four five")
        node.script = saying(ids)
        start = inference_pb2.GenerateStart(text="x")
        start.sampling.logprobs, start.sampling.max_tokens = 0, 50
        start.sampling.stop.append(" three four")
        answer = await rig.stub.Complete(inference_pb2.CompleteRequest(start=start))
        (choice,) = answer.choices
        assert list(choice.token_ids) == ids[:5] and choice.text == "one two"
        assert [each.chosen.token_id for each in choice.logprobs] == ids[:2]
