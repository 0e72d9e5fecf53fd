"""The OpenAI HTTP API: with the official client where it can express the case, else with plain HTTP."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from gateway_rig import gateway, until
from scripted_decode import LENGTH, STOP, ScriptedDecode, endless, saying, silent

from baton.rpc.errors import exhausted, invalid_field
from baton.v1 import common_pb2

TEXT = "Hello wörld, here is a list of words."
HELLO = [{"role": "user", "content": "Hello"}]
MODEL = "scripted"


@asynccontextmanager
async def api(script=silent, say=None, wait=30.0, context=256, config=None, **how):
    """A scripted node that says `say`, the gateway (which waits so long for a lost node), the official client
    and a plain one."""
    async with (
        ScriptedDecode(script, context=context) as node,
        gateway(
            node,
            max_message_bytes=2**20,
            request_seconds=60.0,
            resume_wait_seconds=wait,
            **(config or {}),
        ) as rig,
        openai.AsyncOpenAI(base_url=f"{rig.http}/v1", api_key="none", max_retries=0, timeout=60) as client,
        httpx.AsyncClient(base_url=rig.http, timeout=60) as http,
    ):
        rig.openai, rig.plain, rig.decode = client, http, node
        if say is not None:
            rig.ids = await rig.encode(say)
            node.script = saying(*([id] for id in rig.ids), **how)
        yield rig


async def test_models():
    async with api() as rig:
        assert [model.id async for model in rig.openai.models.list()] == [MODEL]
        assert (await rig.openai.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError) as error:
            await rig.openai.models.retrieve("other/model")
        assert error.value.code == "model_not_found"


async def test_chat_completion():
    async with api(say=TEXT, cached=2) as rig:
        answer = await rig.openai.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "system", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
                },
            ],
            max_completion_tokens=40,
            temperature=0.5,
            seed=-1,
            user="somebody",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            extra_body={"top_k": 4, "min_p": 0.5, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [9]},
        )
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
        assert (choice.finish_reason, answer.object, answer.model) == ("length", "chat.completion", MODEL)
        usage = answer.usage
        assert usage.prompt_tokens == len(rig.decode.starts[0].token_ids)
        assert usage.completion_tokens == len(rig.ids)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens_details.cached_tokens == 2
        sent = rig.decode.starts[0].sampling
        assert (sent.temperature, sent.seed, sent.top_k, sent.max_tokens) == (0.5, 2**64 - 1, 4, 40)
        assert sent.ignore_eos and sent.min_tokens == 1 and list(sent.stop_token_ids) == [9]


async def test_chat_completion_streamed():
    async with api(say=TEXT, pause=0.002, finish=STOP) as rig:
        text, roles, finishes, usages = "", [], [], []
        stream = await rig.openai.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            usages.append(chunk.usage)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                roles.append(choice.delta.role)
                finishes.append(choice.finish_reason)
        assert TEXT.startswith(text) and len(text) > len(TEXT) - 8  # the last token ended it, and has no text
        assert roles[0] == "assistant" and set(roles[1:]) == {None}
        assert finishes[-1] == "stop" and set(finishes[:-1]) == {None}
        assert usages[-1].completion_tokens == len(rig.ids) and set(usages[:-1]) == {None}


async def test_stream_lines_end_with_done():
    async with api(say="one two") as rig:
        body = {"model": MODEL, "prompt": "x", "stream": True}
        response = await rig.plain.post("/v1/completions", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event[6:]) for event in events[:-2] if event.startswith("data: ")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one two"
        assert "usage" not in chunks[0]


async def test_completions_of_every_kind_of_prompt():
    async with api(say="one two") as rig:
        for prompt, count in [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1, 2], [3]], 2)]:
            answer = await rig.openai.completions.create(model=MODEL, prompt=prompt, n=2)
            assert [choice.index for choice in answer.choices] == list(range(2 * count))
            assert {choice.text for choice in answer.choices} == {"one two"}
            assert answer.usage.completion_tokens == 2 * count * len(rig.ids)
        assert list(rig.decode.starts[-1].token_ids) == [3]
        assert rig.decode.starts[-1].sampling.max_tokens == 16  # OpenAI's default


async def test_echo():
    async with api(say=" two") as rig:
        answer = await rig.openai.completions.create(model=MODEL, prompt="one", echo=True)
        assert answer.choices[0].text == "one two"
        ids = await rig.encode("one")
        chunks = [
            chunk.choices[0].text
            async for chunk in await rig.openai.completions.create(
                model=MODEL, prompt=ids, echo=True, stream=True
            )
        ]
        assert "".join(chunks) == "one two"


async def test_stop_string():
    async with api(say="one two three") as rig:
        answer = await rig.openai.completions.create(model=MODEL, prompt="x", stop="o th", max_tokens=50)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one tw", "stop")
        assert answer.choices[0].stop_reason == "o th"


async def test_what_stopped_each_choice():
    async with api(say="one two three", finish=STOP) as rig:
        last = rig.ids[-1]
        for more, reason in ({"stop": ["tw"]}, "tw"), ({"stop_token_ids": [7, last]}, last), ({}, None):
            for n in 1, 2:
                body = {**CHAT, **more, "n": n, "max_tokens": 50}
                answer = (await rig.plain.post("/v1/chat/completions", json=body)).json()
                assert [each["stop_reason"] for each in answer["choices"]] == [reason] * n
                answer = await rig.plain.post("/v1/chat/completions", json={**body, "stream": True})
                lines = answer.text.split("\n\n")[:-2]
                choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
                ended = [each for each in choices if each["finish_reason"]]
                assert [each["stop_reason"] for each in ended] == [reason] * n
        rig.decode.script = saying(*([id] for id in rig.ids), finish=LENGTH)
        body = {**CHAT, "stop_token_ids": [last]}  # before min_tokens, say
        answer = (await rig.plain.post("/v1/chat/completions", json=body)).json()["choices"][0]
        assert (answer["finish_reason"], answer["stop_reason"]) == ("length", None)


async def test_logprobs():
    async with api() as rig:
        ids = await rig.encode("ö b")
        entries = [common_pb2.TokenLogprob(token_id=id, logprob=-0.5) for id in ids]
        likelier = common_pb2.TokenLogprob(token_id=entries[-1].token_id, logprob=-0.25)
        positions = [common_pb2.PositionLogprobs(chosen=entry, top=[likelier]) for entry in entries]

        async def script(running):
            await running.prompt()
            for id, position in zip(ids, positions, strict=True):
                await running.tokens([id], logprobs=[position], finish=LENGTH if id == ids[-1] else 0)
            await running.finished()

        rig.decode.script = script
        chat = await rig.openai.chat.completions.create(
            model=MODEL, messages=HELLO, logprobs=True, top_logprobs=1
        )
        content = chat.choices[0].logprobs.content
        assert bytes(byte for entry in content for byte in entry.bytes) == "ö b".encode()
        assert content[0].logprob == -0.5 and len(content[0].top_logprobs) == 1
        completion = await rig.openai.completions.create(model=MODEL, prompt="x", logprobs=1)
        logprobs = completion.choices[0].logprobs
        assert logprobs.token_logprobs == [-0.5] * len(ids) and logprobs.text_offset[0] == 0
        # The chosen token is among them, with its own value.
        assert logprobs.top_logprobs[0] == {" b": -0.25, "bytes:\\xc3": -0.5}
        assert logprobs.top_logprobs[-1] == {" b": -0.5}


COMPLETION = {"model": MODEL, "prompt": "x"}
NESTED = json.loads("[" * 60 + "]" * 60)
CHAT = {"model": MODEL, "messages": HELLO}
BAD = [
    ("completions", {**COMPLETION, "bogus": 1}, "bogus"),
    ("completions", {**COMPLETION, "temperature": "hot"}, "temperature"),
    ("completions", {**COMPLETION, "temperature": -1}, "temperature"),
    ("completions", {**COMPLETION, "temperature": True}, "temperature"),
    ("completions", {**COMPLETION, "top_p": 0}, "top_p"),
    ("completions", {**COMPLETION, "top_p": 2}, "top_p"),
    ("completions", {**COMPLETION, "max_tokens": -1}, "max_tokens"),
    ("completions", {**COMPLETION, "max_tokens": 10**9}, "max_tokens"),
    ("completions", {**COMPLETION, "max_tokens": 10**30}, "max_tokens"),
    ("completions", {**COMPLETION, "max_tokens": 1.5}, "max_tokens"),
    ("completions", {**COMPLETION, "n": 0}, "n"),
    ("completions", {**COMPLETION, "n": 17}, "n"),
    ("completions", {**COMPLETION, "best_of": 2, "n": 3}, "best_of"),
    ("completions", {**COMPLETION, "best_of": 3, "stream": True}, "best_of"),
    ("completions", {**COMPLETION, "best_of": 17}, "best_of"),
    ("completions", {**COMPLETION, "suffix": "x"}, "suffix"),
    ("completions", {**COMPLETION, "stop": 5}, "stop"),
    ("completions", {**COMPLETION, "stop": [""]}, "stop[0]"),
    ("completions", {**COMPLETION, "logprobs": 21}, "logprobs"),
    ("completions", {**COMPLETION, "logit_bias": {"x": 1}}, "logit_bias"),
    ("completions", {**COMPLETION, "logit_bias": {"9000": 1}}, "logit_bias[9000]"),
    ("completions", {**COMPLETION, "logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
    ("completions", {**COMPLETION, "stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {**COMPLETION, "prompt": []}, "prompt"),
    ("completions", {**COMPLETION, "prompt": [-1]}, "prompt"),
    ("completions", {**COMPLETION, "prompt": [9000]}, "prompt[0]"),
    ("completions", {**COMPLETION, "prompt": ["fine", 5]}, "prompt[1]"),
    ("completions", {**COMPLETION, "prompt": "word " * 300}, "prompt"),
    ("completions", {**COMPLETION, "prompt": None}, "prompt"),
    ("completions", {"prompt": "x"}, "model"),
    ("completions", {"model": 5, "prompt": "x"}, "model"),
    ("chat/completions", {**CHAT, "messages": []}, "messages"),
    ("chat/completions", {**CHAT, "messages": "x"}, "messages"),
    ("chat/completions", {**CHAT, "messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools[0].function"),
    ("chat/completions", {**CHAT, "functions": [{"name": "f"}]}, "functions"),
    ("chat/completions", {**CHAT, "function_call": "auto"}, "function_call"),
    ("chat/completions", {**CHAT, "web_search_options": {"a": 1}}, "web_search_options"),
    ("chat/completions", {**CHAT, "modalities": ["text", "audio"]}, "modalities[1]"),
    ("chat/completions", {**CHAT, "tool_choice": "sometimes"}, "tool_choice"),
    ("chat/completions", {**CHAT, "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
    ("chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ("chat/completions", {**CHAT, "chat_template_kwargs": {"a": NESTED}}, "chat_template_kwargs"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ("chat/completions", {**CHAT, "response_format": {"type": "yaml"}}, "response_format.type"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        "chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        "response_format.json_schema.schema",
    ),
    (
        "chat/completions",
        {**CHAT, "response_format": {"type": "json_object"}, "ignore_eos": True},
        "ignore_eos",
    ),
    ("completions", {**COMPLETION, "structured_outputs": {}}, "structured_outputs"),
    ("completions", {**COMPLETION, "structured_outputs": {"json_object": False}}, "structured_outputs"),
    ("completions", {**COMPLETION, "structured_outputs": {"choice": []}}, "structured_outputs"),
    ("completions", {**COMPLETION, "structured_outputs": {"choice": "yes"}}, "structured_outputs.choice"),
    ("completions", {**COMPLETION, "structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml"),
    ("chat/completions", {**CHAT, "structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    (
        "chat/completions",
        {**CHAT, "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    ("chat/completions", {**CHAT, "guided_choice": ["a"]}, "guided_choice"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {**CHAT, "cache_salt": "x" * 300}, "cache_salt"),
    ("chat/completions", {**CHAT, "max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
]


async def test_response_formats_reach_the_decode_node():
    schema = {"type": "object", "properties": {"b": {"const": None}, "a": {}}, "required": ["b"]}
    named = {"name": "n", "strict": True, "schema": schema}
    async with api(say='{"b": null}') as rig:
        for given, kind in (
            ({"type": "text"}, None),
            ({"type": "json_object"}, "json_object"),
            ({"type": "json_schema", "json_schema": {"name": "n"}}, "json_schema"),
            ({"type": "json_schema", "json_schema": named}, "json_schema"),
        ):
            await rig.openai.chat.completions.create(model=MODEL, messages=HELLO, response_format=given)
            assert rig.decode.starts[-1].sampling.grammar.WhichOneof("kind") == kind
        # The order of its keys is the order of the answer's.
        assert rig.decode.starts[-1].sampling.grammar.json_schema == json.dumps(schema)
        assert json.loads(rig.decode.starts[-2].sampling.grammar.json_schema) == {"type": "object"}


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_structured_outputs_reach_the_decode_node(path):
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    async with api(say='{"b": null}') as rig:
        for given, want in (
            ({"json": schema}, common_pb2.Grammar(json_schema=json.dumps(schema))),
            ({"json": '{"const": 1}'}, common_pb2.Grammar(json_schema='{"const": 1}')),
            ({"json": False}, common_pb2.Grammar(json_schema="false")),
            ({"json_object": True}, common_pb2.Grammar(json_object=common_pb2.JsonObject())),
            ({"regex": "[ab]+", "json_object": False}, common_pb2.Grammar(regex="[ab]+")),
            ({"choice": ["a", "b"]}, common_pb2.Grammar(choice=common_pb2.StringChoice(strings=["a", "b"]))),
            ({"grammar": 'start: "a"'}, common_pb2.Grammar(lark='start: "a"')),
        ):
            body = {**(CHAT if path.startswith("chat") else COMPLETION), "structured_outputs": given}
            response = await rig.plain.post(f"/v1/{path}", json=body)
            assert response.status_code == 200, response.text
            assert rig.decode.starts[-1].sampling.grammar == want


@pytest.mark.parametrize(
    ("path", "how", "field"),
    [
        ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {**CHAT, "structured_outputs": {"regex": "("}}, "structured_outputs"),
        ("completions", {**COMPLETION, "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ],
)
async def test_a_grammar_that_cannot_be_compiled_is_the_callers_error(path, how, field):
    async def refuse(running):
        await running.failed(invalid_field("sampling.grammar", ": unclosed", "INVALID_GRAMMAR"))

    async with api(refuse) as rig:
        for stream in (False, True):
            response = await rig.plain.post(f"/v1/{path}", json={**how, "stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, field)
            assert error["message"] == f"{field}: unclosed"


async def test_bad_input_names_the_parameter_and_the_connection_goes_on():
    async with api(say="fine") as rig:
        for path, body, param in BAD:
            response = await rig.plain.post(f"/v1/{path}", json=body)
            error = response.json()["error"]
            assert response.status_code == 400, (body, response.text)
            assert (error["param"] or "").startswith(param), (body, error)
            assert set(error) == {"message", "type", "param", "code"} and error["message"]
            assert error["type"] == "invalid_request_error"
        long = await rig.plain.post("/v1/completions", json={**COMPLETION, "prompt": "word " * 300})
        assert "maximum context length is 256 tokens" in long.json()["error"]["message"]
        bad = await rig.plain.post("/v1/completions", json={**COMPLETION, "top_p": 2})
        assert bad.json()["error"]["message"].startswith("top_p must be")
        bad = await rig.plain.post("/v1/completions", json={**COMPLETION, "cache_salt": "x" * 300})
        assert bad.json()["error"]["message"].startswith("cache_salt must have")
        bad = await rig.plain.post("/v1/chat/completions", json={**CHAT, "functions": [{"name": "f"}]})
        words = "functions is not supported: functions are called tools now, give tools"
        assert bad.json()["error"]["message"] == words
        assert bad.json()["error"]["code"] == "unsupported_parameter"
        constrained = {**COMPLETION, "structured_outputs": {"regex": "a"}, "ignore_eos": True}
        bad = await rig.plain.post("/v1/completions", json=constrained)
        assert "beside a grammar" in bad.json()["error"]["message"]
        bad = await rig.plain.post("/v1/completions", json={**COMPLETION, "stop": 5})
        assert bad.json()["error"]["message"] == "stop must be a string"
        assert rig.decode.starts == []
        assert (await rig.plain.post("/v1/completions", json=COMPLETION)).status_code == 200
        await rig.idle()


async def test_bad_bodies():
    async with api(say="fine") as rig:
        kind = {"content-type": "application/json"}

        async def post(content, headers=kind, path="/v1/completions"):
            response = await rig.plain.post(path, content=content, headers=headers)
            assert response.json()["error"]["message"]
            return response.status_code

        good = json.dumps(COMPLETION).encode()
        assert await post(b'{"model": "scripted", "prompt": "\xff"}') == 400
        assert await post(b'{"model": "scripted", "prompt": "\\ud800"}') == 400
        assert await post(b'{"model": "scripted", "prompt": "x", "temperature": NaN}') == 400
        assert await post(b"{") == 400
        assert await post(b"[]") == 400
        assert await post(b"") == 400
        assert await post(good, {"content-type": "text/plain"}) == 415
        assert await post(good, {}) == 415
        assert await post(b" " * (2**20 + 1)) == 413
        assert await post(good, path="/v1/nothing") == 404
        assert "/openapi.json lists" in (await rig.plain.get("/docs")).json()["error"]["message"]
        assert (await rig.plain.get("/v1/completions")).status_code == 405
        unknown = json.dumps({**COMPLETION, "model": "other"}).encode()
        assert await post(unknown) == 404
        assert (await rig.plain.post("/v1/completions", content=good, headers=kind)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [silent, endless])
async def test_a_client_that_leaves_cancels(stream, script):
    async with api(script) as rig:
        body = {**COMPLETION, "max_tokens": 240, "stream": stream}
        task = asyncio.create_task(rig.plain.post("/v1/completions", json=body))
        await until(lambda: rig.decode.starts)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait({task})
        await until(lambda: rig.decode.cancels == [rig.decode.starts[0].request])
        await rig.idle()


async def test_failure_before_output_has_its_own_status():
    async def full(running):
        await running.failed(exhausted("the queue is full", retry_after_ms=2500))

    async with api(full) as rig:
        for stream in (False, True):
            response = await rig.plain.post("/v1/completions", json={**COMPLETION, "stream": stream})
            assert (response.status_code, response.headers["retry-after"]) == (429, "3")
            assert response.json()["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            await rig.openai.completions.create(**COMPLETION)


async def test_failure_in_mid_stream_is_an_event_and_no_done():
    async def break_down(running):
        await running.prompt()
        await running.tokens([40])
        await asyncio.sleep(0.05)
        await running.tokens([40], choice=7)

    async with api(break_down) as rig:
        response = await rig.plain.post("/v1/completions", json={**COMPLETION, "stream": True})
        events = response.text.strip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "bad_peer"
        assert "[DONE]" not in response.text
        with pytest.raises(openai.APIError):
            async for _ in await rig.openai.completions.create(**COMPLETION, stream=True):
                pass


async def test_first_failure_of_several_prompts_cancels_the_others():
    async def script(running):
        if len(running.start.token_ids) == 1:
            await running.failed(exhausted("full"))
        await silent(running)

    async with api(script) as rig:
        response = await rig.plain.post("/v1/completions", json={**COMPLETION, "prompt": [[1, 2], [3]]})
        assert response.status_code == 429
        await rig.idle()


async def test_health_and_metrics():
    async with api(say="one two", wait=1.0) as rig:
        health = await rig.plain.get("/health")
        assert health.status_code == 200
        assert {(peer["role"], peer["connected"]) for peer in health.json()["peers"]} == {
            ("tokenizer", True),
            ("decode", True),
        }
        await rig.openai.completions.create(**COMPLETION)
        metrics = (await rig.plain.get("/metrics")).text
        assert 'baton_gateway_requests_total{model="scripted",outcome="finished"} 1.0' in metrics
        assert 'baton_ttft_seconds_count{model="scripted"} 1.0' in metrics
        assert (
            f'baton_output_tokens_total{{model="scripted",role="gateway"}} {float(len(rig.ids))}' in metrics
        )
        await rig.decode.die()
        await until(lambda: not rig.node.gateway.healthy, 9)
        assert (await rig.plain.get("/health")).status_code == 503
        response = await rig.plain.post("/v1/completions", json=COMPLETION)
        assert response.status_code == 503 and "retry-after" in response.headers
        with pytest.raises(openai.InternalServerError):
            await rig.openai.models.list()
