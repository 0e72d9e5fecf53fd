"""/v1/responses by OpenAI's client: text, reasoning, calls, streams, the store, and what is refused."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from gateway_rig import gateway, until
from scripted_decode import STOP, ScriptedDecode, endless, saying, silent
from test_inference import say

from baton.api.compaction import CompactAnswer, CompactRequest, compact_start
from baton.api.response_store import ENTRY_BYTES, ResponseStore
from baton.api.responses_items import input_messages
from baton.api.responses_protocol import ResponsesRequest
from baton.authentication.api_keys import ApiKey, Limits
from baton.v1 import inference_pb2

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "Says how it is there.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALLED = {"type": "function_call", "call_id": "c", "name": "weather"}
ALLOWED = {"type": "allowed_tools", "mode": "required"}
ALICE, BOB = b"alice", b"bob"
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}


def client(rig, **options) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.http}/v1", api_key="none", max_retries=0, **options)


def script(rig, node, text):
    return say(rig, node, text=text, finish=STOP)


async def test_text_and_usage():
    async with ScriptedDecode(silent) as node, gateway(node) as rig, client(rig) as api:
        await script(rig, node, "Hello there.")
        answer = await api.responses.create(
            model="scripted", input="Hi", instructions="Be kind.", store=False
        )
        assert answer.output_text and answer.output_text in "Hello there."
        assert answer.status == "completed" and answer.output[0].type == "message" and not answer.store
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens > 0
        node.script = saying([40], [41])
        short = await api.responses.create(model="scripted", input="Hi", max_output_tokens=2)
        assert short.max_output_tokens == 2 and node.starts[-1].sampling.max_tokens == 2
        await rig.idle()


async def test_a_cut_answer_is_incomplete():
    async with ScriptedDecode(saying([40], [41])) as node, gateway(node) as rig, client(rig) as api:
        answer = await api.responses.create(model="scripted", input="Hi")
        assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"


async def test_reasoning_and_calls_whole_and_streamed():
    async with (
        ScriptedDecode(silent, context=2000) as node,
        gateway(node, **PARSERS) as rig,
        client(rig) as api,
    ):
        await script(rig, node, f"<think>hm</think>Let me see.{CALL} ")
        asked = {"model": "scripted", "input": "Weather?", "tools": [TOOL, {"type": "web_search"}]}
        whole = await api.responses.with_raw_response.create(**asked)
        assert whole.headers["x-baton-dropped-tools"] == "web_search"
        assert "x-baton-ignored" not in whole.headers
        items = whole.parse().output
        assert [item.type for item in items] == ["reasoning", "message", "function_call"]
        assert items[0].content[0].text == "hm"
        assert items[2].name == "weather" and json.loads(items[2].arguments) == {"city": "Oslo"}
        events = [event async for event in await api.responses.create(**asked, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == items[1].content[0].text
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert done.arguments == items[2].arguments
        for kind in ("reasoning_text", "output_text", "function_call_arguments"):
            assert f"response.{kind}.delta" in kinds and f"response.{kind}.done" in kinds
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
        streamed = events[-1].response.output
        assert [item.type for item in streamed] == [item.type for item in items]
        assert streamed[1].content[0].text == text


async def test_a_function_that_is_named_is_called_once():
    other = {**TOOL, "name": "time", "parameters": {"type": "object", "propertyNames": {"minLength": 2}}}
    async with (
        ScriptedDecode(silent, context=2000) as node,
        gateway(node, **PARSERS) as rig,
        client(rig) as api,
    ):
        await script(rig, node, f"{CALL}\n{CALL} ")
        functions = {"type": "function", "name": "weather"}
        allowed = {**ALLOWED, "tools": [functions, {"type": "mcp", "server_label": "x"}]}
        for choice, more, count in (
            (functions, {}, 1),
            (functions, {"parallel_tool_calls": True}, 2),
            ("auto", {}, 2),
            (allowed, {}, 2),
            ({**allowed, "tools": [{**functions, "name": "time"}]}, {}, 0),
            ({**allowed, "mode": "auto", "tools": []}, {}, 0),
        ):
            asked = {"model": "scripted", "input": "?", "tools": [TOOL, other], "tool_choice": choice, **more}
            answer = await api.responses.with_raw_response.create(**asked)
            kinds = [item.type for item in answer.parse().output]
            assert kinds.count("function_call") == count, choice
        broken = {**CALLED, "arguments": '{"a": "'}
        items = [broken, {"type": "function_call_output", "call_id": "c", "output": "x"}]
        answer = await api.responses.with_raw_response.create(
            model="scripted", input=items, tools=[other], tool_choice="required"
        )
        assert answer.headers["x-baton-ignored"] == "input.arguments, tools.time.propertyNames"


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
async def test_reasoning_as_a_summary(name):
    """It is the same text, in the item's summary, with events of its own; and is sent back as such."""
    async with (
        ScriptedDecode(silent, context=2000) as node,
        gateway(node, **PARSERS) as rig,
        client(rig) as api,
    ):
        await script(rig, node, "<think>Six times seven.</think>It is 42. ")
        asked = {"model": "scripted", "input": "6 * 7?"}
        content = (await api.responses.create(**asked)).output[0]
        assert content.content[0].text == "Six times seven." and not content.summary
        asked["reasoning"] = {name: "concise"}
        whole = await api.responses.create(**asked)
        assert whole.reasoning.summary == "concise"
        thought, said = (item.to_dict() for item in whole.output)
        part = {"type": "summary_text", "text": "Six times seven."}
        assert thought["summary"] == [part] and "content" not in thought
        assert said["content"][0]["text"] == "It is 42."
        async with await api.responses.create(**asked, stream=True) as stream:
            events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert not any(kind.startswith("reasoning_text") for kind in kinds)
        deltas = kinds.count("reasoning_summary_text.delta")
        assert kinds[2 : kinds.index("output_item.done") + 1] == [
            "output_item.added",
            "reasoning_summary_part.added",
            *["reasoning_summary_text.delta"] * deltas,
            "reasoning_summary_text.done",
            "reasoning_summary_part.done",
            "output_item.done",
        ]
        of_item = events[3 : 5 + deltas + 1]
        assert {(each.item_id, each.output_index, each.summary_index) for each in of_item} == {
            (events[2].item.id, 0, 0)
        }
        assert "".join(each.delta for each in of_item[1 : 1 + deltas]) == part["text"] == of_item[-2].text
        assert of_item[0].part.to_dict() == part | {"text": ""} and of_item[-1].part.to_dict() == part
        assert events[-1].response.output[0].to_dict()["summary"] == [part]
        assert input_messages(parsed([thought]))[0].reasoning == part["text"]


async def test_a_conversation_goes_on_stored_or_sent_back():
    """The next turn's prompt is the same, whichever way."""
    async with (
        ScriptedDecode(silent, context=2000) as node,
        gateway(node, **PARSERS) as rig,
        client(rig) as api,
    ):
        await script(rig, node, f"One moment.{CALL} ")
        asked = {"model": "scripted", "tools": [TOOL]}
        first = await api.responses.create(**asked, input="Weather?")
        call = next(item for item in first.output if item.type == "function_call")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Snow."}
        await script(rig, node, "Snow.")
        second = await api.responses.create(**asked, previous_response_id=first.id, input=[result])
        assert second.previous_response_id == first.id
        sent = [item.model_dump(exclude_none=True) for item in first.output]
        await api.responses.create(
            **asked, store=False, input=[{"role": "user", "content": "Weather?"}, *sent, result]
        )
        stored, stateless = node.starts[-2:]
        assert list(stored.token_ids) == list(stateless.token_ids)
        found = await api.responses.retrieve(second.id)
        assert found.output_text == second.output_text
        async with httpx.AsyncClient(base_url=rig.http, trust_env=False) as http:
            assert (await http.head(f"/v1/responses/{second.id}")).status_code == 200
        await api.responses.delete(second.id)
        for use in (
            api.responses.retrieve(second.id),
            api.responses.delete(second.id),
            api.responses.create(model="scripted", previous_response_id=second.id, input="And?"),
        ):
            with pytest.raises(openai.NotFoundError):
                await use


async def test_cancel_while_it_streams():
    async with ScriptedDecode(endless, context=200_000) as node, gateway(node) as rig, client(rig) as api:
        stream = await api.responses.create(model="scripted", input="x", stream=True)
        events = aiter(stream)
        id = (await anext(events)).response.id
        assert (await api.responses.cancel(id)).status == "cancelled"
        last = [event async for event in events][-1]
        assert (last.type, last.response.status) == ("response.failed", "cancelled")
        assert last.response.output[-1].status == "incomplete"
        assert (await api.responses.retrieve(id)).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="has ended: cancelled"):
            await api.responses.cancel(id)
        with pytest.raises(openai.BadRequestError, match="nothing can follow it"):
            await api.responses.create(model="scripted", previous_response_id=id, input="And?")
        await rig.idle()
        left = await api.responses.create(model="scripted", input="x", stream=True)
        await anext(aiter(left))
        await left.close()
        await until(lambda: len(node.cancels) == 2)
        await rig.idle()


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "content[0].image_url",
        ),
        ({"reasoning": {"summary": "short"}}, "reasoning.summary"),
        (
            {"reasoning": {"summary": "auto", "generate_summary": "concise"}},
            "reasoning.generate_summary",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "surprise": 1}]}, "tools[0].surprise"),
        ({"tools": [{**TOOL, "strict": "yes"}]}, "tools[0].strict"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 99999}, "max_output_tokens"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "x"}}, "tool_choice.mode"),
        ({"tools": [TOOL], "tool_choice": {**ALLOWED, "tools": []}}, "tool_choice.tools"),
        (
            {"tools": [TOOL], "tool_choice": {**ALLOWED, "tools": [{"type": "function", "name": "g"}]}},
            "tool_choice.tools[0]",
        ),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"temperature": -1.0}, "temperature"),
        ({"surprise": 1}, "surprise"),
        ({"input": ""}, "input"),
        ({"input": "x " * 300}, "input"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(fields, param):
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"model": "scripted", "input": "x", **fields}
            answer = await http.post(f"{rig.http}/v1/responses", json=body)
        assert answer.status_code == 400, answer.text
        assert param in answer.json()["error"]["param"], answer.text
        assert not node.starts


def test_the_store_is_bounded():
    now, room = 0.0, 1000 + 3 * ENTRY_BYTES
    store = ResponseStore(room, 10.0, lambda: now)
    for number in range(5):
        store.put(str(number), bytes(300), [], ALICE)
    assert [number for number in range(5) if store.get(str(number), ALICE)] == [2, 3, 4]
    assert store.get("4", BOB) is None and not store.delete("4", BOB)
    assert store.delete("3", ALICE) and not store.delete("3", ALICE)
    assert not store.put("large", bytes(room), [], ALICE)
    assert store.get("large", ALICE) is None and store.get("4", ALICE)
    now = 10.0
    assert store.get("4", ALICE) is None
    store.put("new", bytes(900), [], ALICE)
    assert store.get("new", ALICE)


def test_one_key_takes_nothing_from_those_that_store_little():
    store = ResponseStore(1000 + 4 * ENTRY_BYTES, 10.0, lambda: 0.0)
    store.put("bob", bytes(300), [], BOB)
    for number in range(9):
        store.put(str(number), bytes(200), [], ALICE)
    assert store.get("bob", BOB)
    assert [number for number in range(9) if store.get(str(number), ALICE)] == [6, 7, 8]
    store.put("late", bytes(200), [], BOB)
    assert store.get("bob", BOB) and store.get("late", BOB)
    assert [number for number in range(9) if store.get(str(number), ALICE)] == [7, 8]


async def test_a_lone_surrogate_is_refused_before_the_stream():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        body = '{"model": "scripted", "input": "x", "stream": true, "metadata": {"a": "\\ud800"}}'
        async with httpx.AsyncClient(trust_env=False) as http:
            headers = {"content-type": "application/json"}
            answer = await http.post(f"{rig.http}/v1/responses", content=body, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def test_the_pieces_of_a_turn_are_put_together():
    said = {"type": "message", "role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]}
    asked = {"model": "scripted", "input": [said, thought, said, {"role": "user", "content": "c"}, thought]}
    messages = input_messages(ResponsesRequest.model_validate(asked).input)
    assert [(each.content, each.reasoning) for each in messages] == [("aa", "b"), ("c", ""), ("", "b")]


async def test_a_key_sees_its_own_responses_whatever_it_is_called(tmp_path):
    """Lines of the file of keys may share a name, or have none."""
    first, second = "a" * 20, "b" * 20
    (tmp_path / "keys").write_text(f"{first} name=team\n{second} name=team\n")
    (tmp_path / "keys").chmod(0o600)
    async with ScriptedDecode(silent) as node, gateway(node, api_keys=str(tmp_path / "keys")) as rig:
        node.script = saying([40], [0], finish=STOP)
        async with httpx.AsyncClient(trust_env=False, base_url=f"{rig.http}/v1") as http:

            async def ask(key, **body):
                headers = {"authorization": f"Bearer {key}"}
                return await http.post("/responses", json={"model": "scripted", **body}, headers=headers)

            id = (await ask(first, input="Hi")).json()["id"]
            assert (await ask(first, previous_response_id=id, input="And?")).status_code == 200
            assert (await ask(second, previous_response_id=id, input="And?")).status_code == 404


async def test_a_summary_beside_its_reasoning_is_a_hint():
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]}
    thought["summary"] = [{"type": "summary_text", "text": "s"}]
    async with ScriptedDecode(saying([40], [0], finish=STOP)) as node, gateway(node) as rig:
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"model": "scripted", "input": [thought, {"role": "user", "content": "Hi"}]}
            answer = await http.post(f"{rig.http}/v1/responses", json=body)
        assert answer.headers["x-baton-ignored"] == "input.summary", answer.text


async def test_a_conversation_is_compacted_and_goes_on():
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    async with (
        ScriptedDecode(silent, context=2000) as node,
        gateway(node, **PARSERS) as rig,
        client(rig) as api,
    ):
        await script(rig, node, "<think>Hm.</think>They said hello. ")
        made = await api.responses.compact(model="scripted", input=asked, instructions="Be kind.")
        assert node.starts[-1].sampling.temperature == 0
        warmer = {"extra_body": {"temperature": 0.5}}
        await api.responses.compact(model="scripted", input=asked, **warmer)
        assert node.starts[-1].sampling.temperature == 0.5
        user, compaction = made.output
        assert made.object == "response.compaction" and made.usage.output_tokens > 0
        assert (user.role, user.content[0].text) == ("user", "Hi") and compaction.type == "compaction"
        assert 256 < node.starts[-1].sampling.max_tokens < 2000  # there is room for reasoning
        items = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
        items.append({"role": "user", "content": "Who?"})
        roles = [(message.role, message.content) for message in input_messages(parsed(items))]
        said = "What has been said so far, in short: They said hello."
        assert roles == [("user", "Hi"), ("assistant", said), ("user", "Who?")]
        await api.responses.create(model="scripted", input=items)
        first = await api.responses.create(model="scripted", input="One.")
        again = await api.responses.compact(model="scripted", previous_response_id=first.id)
        assert again.output[0].content[0].text == "One."
        for content in ("secret", "baton1.?", "baton1.gA==", "baton1.é"):
            with pytest.raises(openai.BadRequestError, match="not of this server") as caught:
                await api.responses.create(
                    model="scripted", input=[{"type": "compaction", "encrypted_content": content}]
                )
            assert caught.value.param == "input[0]"
        with pytest.raises(openai.BadRequestError, match="input is empty"):
            await api.responses.compact(model="scripted")
        with pytest.raises(openai.BadRequestError, match="context"):
            await api.responses.compact(model="scripted", input="word " * 3000)


async def test_a_model_that_only_reasons_has_summarized():
    async with (
        ScriptedDecode(silent, context=9000) as node,
        gateway(node, **PARSERS) as rig,
        client(rig) as api,
    ):
        await script(rig, node, "<think>They said hi, and want a table. ")
        made = await api.responses.compact(model="scripted", input="Hi")
        assert node.starts[-1].sampling.max_tokens == 256 + 4096
        items = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
        assert input_messages(parsed(items))[-1].content.endswith("in short: They said hi, and want a table.")


async def test_what_cannot_be_compacted():
    config = {**PARSERS, "max_requests": 1}
    async with (
        ScriptedDecode(silent, context=2000) as node,
        gateway(node, **config) as rig,
        client(rig) as api,
    ):
        await script(rig, node, "<think> </think>\n")
        with pytest.raises(openai.UnprocessableEntityError, match="no summary"):
            await api.responses.compact(model="scripted", input="Hi")
        wrong = {**CALLED, "name": "a b", "arguments": "{}"}
        with pytest.raises(openai.BadRequestError) as caught:
            await api.responses.compact(model="scripted", input=[wrong])
        assert caught.value.param == "input.name" and "messages" not in caught.value.message
        await rig.idle()
        held = rig.node.gateway
        encode, encoded = held.tokenizer.encode, []
        held.tokenizer.encode = lambda *given: encoded.append(given) or encode(*given)
        with held.call(ApiKey("other", Limits())), pytest.raises(openai.RateLimitError):
            await api.responses.compact(model="scripted", input="Hi")
        assert not encoded


@pytest.mark.parametrize("last", ["user", "assistant"])
def test_a_compacted_conversation_alternates(last):
    """As the templates of Gemma and Mistral demand."""
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    said = [{"role": role, "content": text} for role, text in turns[: 3 if last == "user" else 4]]
    start = compact_start(CompactRequest.model_validate({"model": "m", "input": said}), [])
    roles = [message.role for message in start.chat.messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)
    answer = CompactAnswer(start)
    answer.add(inference_pb2.Delta(text="They spoke."))
    answer.end(inference_pb2.Finished())
    items = answer.whole()["output"]
    assert [item["content"][0]["text"] for item in items[:-1]] == ["a", "c"]
    messages = input_messages(parsed([*items, {"role": "user", "content": "e"}]))
    assert [message.role for message in messages] == ["user", "assistant", "user"]
    assert messages[0].content == "a\n\nc"


def parsed(items):
    return ResponsesRequest.model_validate({"model": "scripted", "input": items}).input


async def test_a_response_that_is_larger_than_the_store_says_so():
    limits = {"response_store_mib": 1, "max_prompt_bytes": 2**21}
    async with (
        ScriptedDecode(silent, context=2**17) as node,
        gateway(node, **limits) as rig,
        client(rig) as api,
    ):
        await script(rig, node, "Hello.")
        tools = [{**TOOL, "description": "x" * 2**20}]
        answer = await api.responses.create(model="scripted", input="Hi", tools=tools, tool_choice="none")
        assert answer.store is False
        assert (await api.responses.create(model="scripted", input="Hi")).store


async def test_without_a_store():
    async with ScriptedDecode(silent) as node, gateway(node, response_store_mib=0) as rig, client(rig) as api:
        await script(rig, node, "Hello.")
        answer = await api.responses.create(model="scripted", input="Hi", store=True)
        assert answer.store is False
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(answer.id)
