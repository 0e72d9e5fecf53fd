"""/tokenize and /detokenize, and the OpenAPI document."""

import threading

from test_openai_api import MODEL, api

from baton.api import tokenize_api
from baton.gateway import tokenizer_client as gateway_tokenizer
from baton.tokenizer.vocabulary import Vocabulary

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Zürich?"}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Says how it is there."}}


async def test_texts_and_conversations_there_and_back():
    async with api(say="fine") as rig:

        async def tokens(**body):
            answer = await rig.plain.post("/tokenize", json=body)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 256
            return found

        async def text(ids):
            answer = await rig.plain.post("/detokenize", json={"model": MODEL, "tokens": ids})
            assert answer.status_code == 200, answer.text
            return answer.json()["prompt"]

        prompt = "def f(x):\n  return 'Zürich' 🚀"
        plain = await tokens(prompt=prompt)
        assert plain["tokens"] == await rig.encode(prompt) and plain["token_strs"] is None
        assert await text(plain["tokens"]) == prompt
        named = await tokens(model=MODEL, prompt="return x", return_token_strs=True)
        assert "".join(named["token_strs"]) == "return x" and len(named["token_strs"]) == named["count"]
        chat = await tokens(messages=[SYSTEM, USER])
        rendered = await text(chat["tokens"])
        assert "Be brief." in rendered and "Zürich?" in rendered and "<|" in rendered  # special tokens too
        open_ended = await tokens(messages=[SYSTEM, USER], add_generation_prompt=False)
        assert chat["tokens"][: open_ended["count"]] == open_ended["tokens"] != chat["tokens"]
        assert "get_weather" in await text((await tokens(messages=[USER], tools=[TOOL]))["tokens"])
        assert (await tokens(prompt=""))["tokens"] == [] and await text([]) == ""
        await rig.idle()


async def test_the_event_loop_goes_on_while_a_long_answer_is_made(monkeypatch):
    """In pieces, by another thread: a prompt may have millions of tokens."""
    threads = set()
    bytes_of, decode = Vocabulary.bytes_of, gateway_tokenizer.decode

    def watched_bytes(vocabulary, token):
        threads.add(threading.current_thread())
        return bytes_of(vocabulary, token)

    def watched_decode(*given):
        threads.add(threading.current_thread())
        return decode(*given)

    monkeypatch.setattr(tokenize_api, "PIECE", 3)
    async with api(say="fine") as rig:
        prompt = "def f(x):\n  return '\"Zürich' 🚀"
        ids = await rig.encode(prompt)
        assert len(ids) > 9
        monkeypatch.setattr(Vocabulary, "bytes_of", watched_bytes)
        monkeypatch.setattr(gateway_tokenizer, "decode", watched_decode)
        answer = await rig.plain.post("/tokenize", json={"prompt": prompt, "return_token_strs": True})
        found = answer.json()
        assert (found["tokens"], found["count"]) == (ids, len(ids))
        each = [(await rig.plain.post("/detokenize", json={"tokens": [id]})).json()["prompt"] for id in ids]
        assert found["token_strs"] == each
    assert threads and threading.main_thread() not in threads


WRONG = [
    ("tokenize", {}, 400, "prompt"),
    ("tokenize", {"prompt": "x", "messages": [USER]}, 400, "prompt"),
    ("tokenize", {"prompt": "x", "tools": []}, 400, "tools"),
    ("tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
    ("tokenize", {"messages": []}, 400, "messages"),
    ("tokenize", {"messages": [USER], "chat_template": "{{ x }}"}, 400, "chat_template"),
    ("tokenize", {"prompt": "x", "surprise": 1}, 400, "surprise"),
    ("detokenize", {}, 400, "tokens"),
    ("detokenize", {"tokens": [10**6]}, 400, "tokens[0]"),
    ("detokenize", {"tokens": [1] * 3000}, 400, "tokens"),
    ("detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
]


async def test_what_is_wrong_is_refused_by_name():
    async with api(say="fine") as rig:
        for path, body, status, param in WRONG:
            answer = await rig.plain.post(f"/{path}", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


async def test_the_document_describes_every_route():
    async with api(say="fine") as rig:
        document = (await rig.plain.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            for method in operations:
                answer = await rig.plain.request(method.upper(), path.replace("{name}", MODEL), json={})
                # A route that is not there has no code of its own.
                assert answer.status_code != 405 and "not found" not in answer.text, (path, answer.text)
                if method == "post" and "{" not in path:
                    assert answer.status_code == 400, path
        chat = document["components"]["schemas"]["ChatRequest"]["properties"]
        assert {"messages", "tools", "chat_template_kwargs"} <= chat.keys()
        assert not any("__" in name for name in document["components"]["schemas"])
