"""What clients send by default: hints are named, null is absence; and what they expect of HTTP."""

import re

import pytest
from scripted_decode import LENGTH
from test_openai_api import CHAT, COMPLETION, MODEL, TEXT, api

from baton.v1 import common_pb2

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}, "strict": None},
    "cache_control": {"type": "ephemeral"},
}
CALLED = {"name": "get_weather", "arguments": "{}", "parsed_arguments": {}}
CALL = {"id": "c1", "type": "function", "index": 0, "extra_content": {}, "function": CALLED}
HISTORY = [
    {"role": "developer", "content": [{"type": "text", "text": "Be brief.", "cache_control": {}}]},
    {"role": "user", "content": "Hello", "name": "ann", "cache_control": {"type": "ephemeral"}},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [],
        "provider_specific_fields": {"x": 1},
        "id": "msg_1",
        "images": [],
        "parsed": {"a": 1},
        "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
        "reasoning_content": "Hm.",
        "tool_calls": [CALL],
    },
    {"role": "tool", "content": "20 C", "tool_call_id": "c1"},
]


def ignored(response):
    assert response.status_code == 200, response.text
    return set(filter(None, response.headers.get("x-baton-ignored", "").split(", ")))


async def test_hints_are_accepted_and_named():
    hints = {
        "user": "somebody",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
    }
    async with api(say="fine") as rig:
        more = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "bös": 1}}
        response = await rig.plain.post("/v1/chat/completions", json={**CHAT, **hints, **more})
        assert ignored(response) == {*hints, "reasoning_effort", "chat_template_kwargs.enable_thinking"}
        more = {"reasoning": {"effort": "low", "summary": "auto"}}
        response = await rig.plain.post("/v1/chat/completions", json={**CHAT, **more})
        assert ignored(response) == {"reasoning_effort", "reasoning.summary"}
        response = await rig.plain.post(
            "/v1/chat/completions", json={**CHAT, **more, "reasoning_effort": "high"}
        )
        assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning.effort")
        streamed = {**CHAT, "stream": True, "user": "x", "stream_options": {"include_obfuscation": True}}
        response = await rig.plain.post("/v1/chat/completions", json=streamed)
        assert ignored(response) == {"user", "stream_options.include_obfuscation"}
        assert ignored(await rig.plain.post("/v1/chat/completions", json=CHAT)) == set()


async def test_an_explicit_null_is_absence():
    async with api(say="fine") as rig:
        nothing = ["n", "stop", "temperature", "logprobs", "tools", "tool_choice", "response_format", "user"]
        nothing += ["stream_options", "functions", "parallel_tool_calls", "reasoning_effort", "no_such_field"]
        response = await rig.plain.post("/v1/chat/completions", json={**CHAT, **dict.fromkeys(nothing)})
        assert ignored(response) == set()
        nothing = ["suffix", "best_of", "echo", "logprobs", "max_tokens", "logit_bias"]
        response = await rig.plain.post("/v1/completions", json={**COMPLETION, **dict.fromkeys(nothing)})
        assert ignored(response) == set()
        assert rig.decode.starts[-1].sampling.max_tokens == 16


async def test_what_is_not_there_may_be_switched_off():
    async with api(say="fine") as rig:
        off = {"use_beam_search": False, "include_stop_str_in_output": False, "bad_words": []}
        off |= {"skip_special_tokens": True, "spaces_between_special_tokens": True}
        response = await rig.plain.post("/v1/completions", json={**COMPLETION, **off})
        assert ignored(response) == {"spaces_between_special_tokens"}
        shown = await rig.plain.post("/v1/completions", json={**COMPLETION, "skip_special_tokens": False})
        assert (shown.status_code, shown.json()["error"]["param"]) == (400, "skip_special_tokens")
        for on in {"guided_json": {}}, {"web_search_options": {}}, {"truncate_prompt_tokens": 0}:
            response = await rig.plain.post("/v1/chat/completions", json={**CHAT, **on})
            assert (response.status_code, response.json()["error"]["param"]) == (400, *on)
        off["continue_final_message"] = False
        off |= {"add_generation_prompt": True, "separate_reasoning": True}
        response = await rig.plain.post("/v1/chat/completions", json={**CHAT, **off})
        assert ignored(response) == {"spaces_between_special_tokens"}


async def test_an_answer_that_goes_on_with_the_last_message():
    begun = [*CHAT["messages"], {"role": "assistant", "content": "The answer is"}]
    body = {**CHAT, "messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    async with api(say=" fine") as rig:
        response = await rig.plain.post("/v1/chat/completions", json=body)
        assert ignored(response) == set()
        assert response.json()["choices"][0]["message"]["content"] == " fine"
        prompt = list(rig.decode.starts[-1].token_ids)
        assert rig.text(prompt).endswith("<|im_start|>assistant\nThe answer is")
        asked = {key: body[key] for key in ("messages", "continue_final_message")}
        assert (await rig.plain.post("/tokenize", json=asked)).json()["tokens"] == prompt
        response = await rig.plain.post("/v1/chat/completions", json={**CHAT, "add_generation_prompt": False})
        assert rig.text(rig.decode.starts[-1].token_ids).endswith("<|im_end|>\n")
        for wrong in {"add_generation_prompt": True}, {"messages": CHAT["messages"]}:
            response = await rig.plain.post("/v1/chat/completions", json={**body, **wrong})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "continue_final_message"), error
            assert error["message"].startswith("continue_final_message")


async def test_an_answer_that_goes_on_does_not_begin_with_reasoning():
    begun = [*CHAT["messages"], {"role": "assistant", "content": "{"}]
    formed = {**CHAT, "response_format": {"type": "json_object"}}
    async with api(say="fine", config={"reasoning_parser": "think"}) as rig:
        for body in formed, {**formed, "messages": begun, "continue_final_message": True}:
            assert (await rig.plain.post("/v1/chat/completions", json=body)).status_code == 200
        grammars = [start.sampling.grammar.WhichOneof("kind") for start in rig.decode.starts]
        assert grammars == ["lark", "json_object"]


async def test_reasoning_that_is_begun_goes_on():
    begun = {"role": "assistant", "content": "<think>\nLet me"}
    body = {**CHAT, "messages": [*CHAT["messages"], begun], "continue_final_message": True}
    async with api(say=" see</think>fine", config={"reasoning_parser": "think"}) as rig:
        message = (await rig.plain.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        assert (message["reasoning_content"].strip(), message["content"]) == ("see", "fine")
        begun["content"] += " see</think>It is"
        message = (await rig.plain.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        assert message["content"] == " see</think>fine" and "reasoning_content" not in message


async def test_a_history_as_clients_send_it():
    async with api(say="fine", context=512) as rig:
        body = {**CHAT, "messages": HISTORY, "tools": [WEATHER], "parallel_tool_calls": True}
        response = await rig.plain.post("/v1/chat/completions", json=body)
        names = {"cache_control", "annotations", "provider_specific_fields", "tool_calls.index"}
        names |= {"content.cache_control", "id", "parsed", "reasoning_details"}
        names |= {"tool_calls.extra_content", "tool_calls.function.parsed_arguments"}
        assert ignored(response) == {"tools.cache_control", *(f"messages.{name}" for name in names)}
        prompt = rig.text(rig.decode.starts[0].token_ids)
        assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and "20 C" in prompt


def calls(**call):
    return [{"role": "assistant", "tool_calls": [{**CALL, **call}]}]


def tools(**function):
    return [{"type": "function", "function": {"name": "f", **function}}]


WRONG = [
    ("messages", [{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
    (
        "messages",
        [{"role": "assistant", "content": "x", "images": [{"type": "image_url"}]}],
        "messages[0].images",
    ),
    ("messages", calls(type="custom"), "messages[0].tool_calls[0].type"),
    ("tools", [WEATHER, WEATHER], "tools[1].function.name"),
    ("tools", tools(name="a b"), "tools[0].function.name"),
    ("tools", tools(parameters=[]), "tools[0].function.parameters"),
    ("tools", [{"type": "web_search"}], "tools[0].type"),
    ("tools", [*(tools(name=f"f{number}")[0] for number in range(1025))], "tools"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
]


async def test_wrong_tools_are_named():
    async with api(say="fine") as rig:
        for name, value, param in WRONG:
            response = await rig.plain.post("/v1/chat/completions", json={**CHAT, name: value})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), error
            assert error["message"].startswith(param) and "chat." not in error["message"], error
        assert rig.decode.starts == []


async def test_usage_in_every_chunk():
    async with api(say=TEXT, pause=0.002) as rig:
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream = await rig.openai.chat.completions.create(**CHAT, stream=True, stream_options=options)
        usages = [chunk.usage async for chunk in stream]
        counts = [usage.completion_tokens for usage in usages]
        assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == counts[-2] == len(rig.ids)
        assert len({usage.prompt_tokens for usage in usages}) == 1 and usages[0].prompt_tokens > 0


async def test_an_empty_prompt_begins_a_text():
    async with api(say="fine") as rig:
        for prompt in ("", ["", "x"]):
            assert (await rig.plain.post("/v1/completions", json={**COMPLETION, "prompt": prompt})).is_success
        assert [len(start.token_ids) for start in rig.decode.starts] == [1, 1, 1]


async def with_prompt_logprobs(running):
    def position(id, logprob):
        entry = common_pb2.TokenLogprob(token_id=id, logprob=logprob)
        return common_pb2.PositionLogprobs(chosen=entry, top=[entry])

    ids = running.start.token_ids
    known = [position(id, -0.5) for id in ids[1:]]
    await running.prompt(logprobs=[common_pb2.PositionLogprobs(), *known])
    for choice in range(running.start.n):
        await running.tokens([40], logprobs=[position(40, -0.25)], finish=LENGTH, choice=choice)
    await running.finished()


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_probabilities_of_the_prompt(max_tokens, stream):
    async with api(with_prompt_logprobs) as rig:
        asked = {
            "echo": True,
            "logprobs": 1,
            "max_tokens": max_tokens,
            "n": 2,
            "prompt": ["one two", "t"],  # one token, which nothing predicts
        }
        answer = await rig.openai.completions.create(**{**COMPLETION, **asked}, stream=stream)
        texts, found = [""] * 4, [[[], [], [], []] for _ in range(4)]
        for choice in [c async for chunk in answer for c in chunk.choices] if stream else answer.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                logprobs = choice.logprobs
                parts = (
                    logprobs.tokens,
                    logprobs.token_logprobs,
                    logprobs.top_logprobs,
                    logprobs.text_offset,
                )
                for list_, part in zip(found[choice.index], parts, strict=True):
                    list_ += part or []
        output = rig.vocabulary.bytes_of(40).decode() * max_tokens
        assert texts == ["one two" + output] * 2 + ["t" + output] * 2
        for (tokens, values, tops, offsets), text in zip(found, texts, strict=True):
            assert "".join(tokens) == text
            assert values == [None, *[-0.5] * (len(tokens) - 1 - max_tokens), *[-0.25] * max_tokens]
            assert tops == [
                None,
                *({token: value} for token, value in zip(tokens[1:], values[1:], strict=True)),
            ]
            assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
        if not stream:
            assert answer.usage.completion_tokens == 4 * max_tokens
            assert {choice.finish_reason for choice in answer.choices} == {"length"}


async def test_the_best_of_several():
    async def script(running):
        await running.prompt()
        for choice in range(running.start.n):
            entry = common_pb2.TokenLogprob(token_id=40 + choice, logprob=[-3.0, -1.0, -2.0][choice])
            position = common_pb2.PositionLogprobs(chosen=entry)
            await running.tokens([40 + choice], logprobs=[position], finish=LENGTH, choice=choice)
        await running.finished()

    async with api(script) as rig:
        answer = await rig.openai.completions.create(**COMPLETION, best_of=3, n=2)
        texts = [rig.vocabulary.bytes_of(id).decode() for id in (41, 42)]
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
        assert answer.usage.completion_tokens == 3 and answer.choices[0].logprobs is None
        stream = await rig.openai.completions.create(**COMPLETION, best_of=3, n=3, stream=True)
        chunks = [chunk async for chunk in stream]
        assert chunks and not any(choice.logprobs for chunk in chunks for choice in chunk.choices)


async def test_reasoning_by_both_names():
    """One of them may not be dropped in silence."""
    async with api(say="fine") as rig:

        async def ask(**said):
            history = [{"role": "assistant", "content": "x", **said}, {"role": "user", "content": "y"}]
            return await rig.plain.post("/v1/chat/completions", json={**CHAT, "messages": history})

        assert (await ask(reasoning="a", reasoning_content="a")).status_code == 200
        assert (await ask(reasoning="a", reasoning_content=None)).status_code == 200
        refused = await ask(reasoning="a", reasoning_content="b")
        assert refused.json()["error"]["param"] == "messages[0].reasoning", refused.text


async def test_head_and_names_of_requests():
    async with api(say="fine") as rig:
        for path in ("/health", "/v1/models", f"/v1/models/{MODEL}", "/version", "/openapi.json"):
            head, get = await rig.plain.head(path), await rig.plain.get(path)
            assert (head.status_code, head.content) == (200, b"") and get.json()
        assert re.fullmatch("[0-9a-f]{32}", head.headers["x-request-id"])
        named = await rig.plain.post("/v1/completions", json={}, headers={"x-request-id": "mine-1"})
        assert (named.status_code, named.headers["x-request-id"]) == (400, "mine-1")
        other = await rig.plain.get("/version", headers={"x-request-id": "a b"})
        assert re.fullmatch("[0-9a-f]{32}", other.headers["x-request-id"])
        nowhere = await rig.plain.get("/nowhere")
        assert nowhere.status_code == 404 and nowhere.json()["error"]["message"]


@pytest.mark.parametrize("origins", [(), ("https://chat.example.org",), ("*",)])
async def test_pages_of_other_origins_may_call_where_they_are_allowed(origins):
    origin = "https://chat.example.org"
    async with api(say="fine", config={"cors_origins": origins}) as rig:
        asked = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        private = {"access-control-request-private-network": "true"}  # of a page in the internet
        for more in {}, private:
            allowed = await rig.plain.options("/v1/chat/completions", headers=asked | more)
            assert (allowed.status_code == 200) == bool(origins), allowed.text
        answer = await rig.plain.post("/v1/completions", json=COMPLETION, headers={"origin": origin})
        assert answer.headers.get("access-control-allow-origin") in ([origin, "*"] if origins else [None])
        answer = await rig.plain.get("/version", headers={"origin": "https://other.example.org"})
        assert answer.headers.get("access-control-allow-origin") == ("*" if origins == ("*",) else None)
