"""Chats go on at another gateway in the middle of reasoning, text and calls of tools, and with images."""

import httpx
from gateway_rig import gateway, tokenizer
from scripted_decode import LENGTH, ScriptedDecode, silent
from test_gateway_lost import KEYS, answer, begun, files, gateways, going_on, sse  # noqa: F401 - a fixture
from test_responses_api import CALL, PARSERS, TOOL
from test_resume import speaking
from test_seen_images import ONE, TWO, chat_part, check_spans, file, model  # noqa: F401 - a fixture
from test_typed_events_resumed import broken, going

from baton.v1 import common_pb2, decode_pb2, inference_pb2, tokenizer_pb2
from vision_models import TOKENIZER_VOCAB

OUTPUT = f"<think>hm — é</think>Let me see.{CALL}{CALL}It is ∀ cold"
HEAD = {"authorization": f"Bearer {KEYS[0]}"}
STEP = 5
"""Tokens more that each broken stream has."""


def steps(output):
    return (*range(1, len(output), STEP), len(output))


def said(events):
    deltas = [event.delta for event in events if event.HasField("delta")]
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert len({call.id for call in calls}) == len(calls)
    ends = [delta.finish_reason for delta in deltas if delta.finish_reason]
    assert len(ends) <= 1
    return (
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.text for delta in deltas),
        [(call.name, call.arguments) for call in calls],
        ends,
    )


async def test_calls_and_reasoning_go_on_after_any_delta(files):  # noqa: F811
    tool = tokenizer_pb2.Tool(name="weather", parameters='{"type": "object"}')
    chat = tokenizer_pb2.ChatPrompt(messages=[{"role": "user", "content": "Weather?"}], tools=[tool])
    sampling = common_pb2.SamplingParams(max_tokens=900)
    start = inference_pb2.GenerateStart(id="a", chat=chat, sampling=sampling)
    async with (
        ScriptedDecode(silent, context=2000) as node,
        gateways(files | PARSERS, [node], [node]) as (one, two),
    ):
        output = await one.encode(OUTPUT)
        node.script = speaking([output])
        calm = said(await answer(one, start))
        assert len(calm[2]) == 2 and all(calm), calm
        tried = 1
        for known in steps(output):
            node.script = speaking([output], give=(known,), then=silent)
            had = await begun(one, start, pause=0.1)
            node.script = speaking([output])
            for count in range(tried, len(had) + 1):
                deltas = [event.delta for event in had[:count]]
                message = going_on(start, had[:count])
                message.choices[0].reasoning_characters = sum(len(delta.reasoning) for delta in deltas)
                message.choices[0].tool_calls = sum(len(delta.tool_calls) for delta in deltas)
                both = had[:count] + await answer(two, message)
                assert said(both) == calm, (known, count)
            tried = max(tried, len(had))
        await two.idle()


def told(found):
    """Of a chat's chunks: reasoning, text, calls, ends."""
    choices = [choice for _, event in found for choice in event["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    return (
        "".join(choice["delta"].get("reasoning_content") or "" for choice in choices),
        "".join(choice["delta"].get("content") or "" for choice in choices),
        [call["function"] for call in calls],
        [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
    )


async def goes_on_after_any_event(one, two, node, body, output):
    """A stream of a chat; returns what it says, and the last ticket with its last id."""
    async with httpx.AsyncClient(timeout=60) as http:

        async def ask(rig, **more):
            return await http.post(f"{rig.http}/v1/chat/completions", json=body, headers=HEAD | more)

        node.script = going(output)
        calm = told(sse(await ask(one)))
        tried = 0
        for known in steps(output):
            node.script = going(output, give=(known,), then=silent)
            had, ticket = await broken(http, one, "chat/completions", body, HEAD)
            node.script = going(output)
            end = LENGTH if known == len(output) else 0
            node.log = decode_pb2.DecodeLog()
            node.log.choices.add(token_ids=output[:known], finish_reason=end)
            for cut in range(tried, len(had)):
                if not (id := had[cut][0]):
                    continue
                rest = await ask(two, **{"x-baton-resume": ticket, "last-event-id": id})
                assert rest.status_code == 200, rest.text
                assert told(had[: cut + 1] + sse(rest)) == calm, (known, cut, id)
            tried = max(tried, len(had))
        return calm, ticket, id


async def test_a_chat_with_tools_goes_on_after_any_event(files):  # noqa: F811
    tool = {"type": "function", "function": {key: TOOL[key] for key in ("name", "parameters")}}
    user = [{"role": "user", "content": "Weather?"}]
    body = {"model": "scripted", "messages": user, "tools": [tool], "max_tokens": 900, "stream": True}
    async with (
        ScriptedDecode(silent, context=2000) as node,
        gateways(files | PARSERS, [node], [node]) as (one, two),
    ):
        calm, _, _ = await goes_on_after_any_event(one, two, node, body, await one.encode(OUTPUT))
        assert len(calm[2]) == 2 and all(calm), calm


async def test_a_chat_with_images_goes_on_and_they_come_from_the_other_gateway(files, model):  # noqa: F811
    seeing = {"context": 1000, "vocab_size": TOKENIZER_VOCAB, "images": True}
    async with (
        ScriptedDecode(silent, **seeing) as node,
        tokenizer(model=model) as address,
        gateway(node, tokenizer_address=address, **files) as one,
        gateway(node, tokenizer_address=address, **files) as two,
    ):
        content = [{"type": "text", "text": "See"}, chat_part(ONE), chat_part(TWO)]
        body = {"model": "scripted", "messages": [{"role": "user", "content": content}], "stream": True}
        body["max_tokens"] = 50
        _, ticket, id = await goes_on_after_any_event(one, two, node, body, [*range(40, 52)])
        resumed = [start for start in node.starts if start.choices]
        begun = [start for start in node.starts if not start.choices]
        check_spans(resumed[-1], (ONE, TWO))
        assert not {start.pictures for start in resumed} & {start.pictures for start in begun}
        content[1] = chat_part(file(seed=7))  # as large
        async with httpx.AsyncClient(timeout=60) as http:
            asked = {"json": body, "headers": {**HEAD, "x-baton-resume": ticket, "last-event-id": id}}
            refused = await http.post(f"{two.http}/v1/chat/completions", **asked)
            assert refused.status_code == 400 and "another prompt" in refused.text, refused.text
