"""Other people's clients send images, each in its own documented ways; runs in .venv/clients.

Arguments: the API's URL, the model's name, and files of images. Prints a line of JSON for each client: by the
way in which the image was sent, what the model said of each and how many tokens the prompt had.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet

import litellm
from anthropic import Anthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI

TOKENS = 16
QUESTION = "What is this?"
ASK = "Look at the screen."
Found = dict[str, tuple[str, int]]


class File:
    def __init__(self, path: str) -> None:
        self.path = path
        self.bytes = Path(path).read_bytes()
        self.base64 = base64.b64encode(self.bytes).decode()
        self.uri = f"data:image/png;base64,{self.base64}"


def with_openai(url: str, model: str, file: File) -> Found:
    image: Any = {"type": "image_url", "image_url": {"url": file.uri, "detail": "high"}}
    call: Any = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    tool: Any = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [image]},
    ]
    asked: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}, image]}]
    given: Any = {"type": "input_image", "image_url": file.uri, "detail": "auto"}
    used: Any = [
        {"role": "user", "content": ASK},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [given]},
    ]
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}, given]}]
    found: Found = {}
    with OpenAI(base_url=url, api_key="none") as client:
        for name, messages in {"asked": asked, "tool": tool}.items():
            chat = client.chat.completions.create(
                model=model, messages=messages, max_tokens=TOKENS, temperature=0
            )
            assert chat.usage
            found[f"chat {name}"] = (chat.choices[0].message.content or "", chat.usage.prompt_tokens)
        chunks = client.chat.completions.create(
            model=model, messages=asked, max_tokens=TOKENS, temperature=0, stream=True
        )
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        found["streamed asked"] = (text, found["chat asked"][1])
        for name, each in {"asked": items, "tool": used}.items():
            made = client.responses.create(model=model, input=each, max_output_tokens=TOKENS, temperature=0)
            assert made.usage
            found[f"responses {name}"] = (made.output_text, made.usage.input_tokens)
    return found


def with_anthropic(url: str, model: str, file: File) -> Found:
    source = {"type": "base64", "media_type": "image/png", "data": file.base64}
    image: Any = {"type": "image", "source": source}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [image]}
    conversations: Any = {
        "asked": [{"role": "user", "content": [{"type": "text", "text": QUESTION}, image]}],
        "tool": [
            {"role": "user", "content": ASK},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    }
    found: Found = {}
    with Anthropic(base_url=url.removesuffix("/v1"), api_key="none") as client:
        for name, messages in conversations.items():
            made = client.messages.create(
                model=model, messages=messages, max_tokens=TOKENS, extra_body={"temperature": 0}
            )
            said = "".join(block.text for block in made.content if block.type == "text")
            counted = client.messages.count_tokens(model=model, messages=messages).input_tokens
            found[f"messages {name}"] = (said, counted)
    return found


def with_langchain(url: str, model: str, file: File) -> Found:
    parts: dict[str, Any] = {
        "image_url": {"type": "image_url", "image_url": {"url": file.uri}},
        "block": {"type": "image", "base64": file.base64, "mime_type": "image/png"},
        "older block": {
            "type": "image",
            "source_type": "base64",
            "data": file.base64,
            "mime_type": "image/png",
        },
    }
    found: Found = {}
    for api in False, True:
        chat = ChatOpenAI(
            model=model, base_url=url, api_key="none", max_tokens=TOKENS, temperature=0, use_responses_api=api
        )
        for name, part in parts.items():
            asked = [HumanMessage([{"type": "text", "text": QUESTION}, part])]
            call = {"name": "look", "args": {}, "id": "c1"}
            tool = [
                HumanMessage(ASK),
                AIMessage("", tool_calls=[call]),
                ToolMessage([part], tool_call_id="c1"),
            ]
            for kind, messages in {"asked": asked, "tool": tool}.items():
                made = chat.invoke(messages)
                assert made.usage_metadata
                found[f"{name} {'responses' if api else 'chat'} {kind}"] = (
                    made.text,
                    made.usage_metadata["input_tokens"],
                )
    return found


def with_llama_index(url: str, model: str, file: File) -> Found:
    chat = OpenAILike(
        model=model, api_base=url, api_key="none", max_tokens=TOKENS, temperature=0, is_chat_model=True
    )
    found: Found = {}
    for name, block in {
        "path": ImageBlock(path=file.path),
        "bytes": ImageBlock(image=file.bytes),
        "address": ImageBlock(url=file.uri),
    }.items():
        made = chat.chat([ChatMessage(role="user", blocks=[TextBlock(text=QUESTION), block])])
        raw: Any = made.raw
        found[f"{name} asked"] = (made.message.content or "", raw.usage.prompt_tokens)
    return found


def with_litellm(url: str, model: str, file: File) -> Found:
    """Its conversion to the Messages API, too. What tools give it sends in words of its own ("told"): as a
    user's message, or with one more tool."""
    image = {"type": "image_url", "image_url": {"url": file.uri}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    conversations: dict[str, list[Any]] = {
        "asked": [{"role": "user", "content": [{"type": "text", "text": QUESTION}, image]}],
        "told": [
            {"role": "user", "content": ASK},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [image]},
        ],
    }
    found: Found = {}
    for provider, base in {"openai": url, "anthropic": url.removesuffix("/v1")}.items():
        for name, messages in conversations.items():
            made = litellm.completion(
                model=f"{provider}/{model}",
                messages=messages,
                api_base=base,
                api_key="none",
                max_tokens=TOKENS,
                temperature=0,
            )
            found[f"{provider} {name}"] = (made.choices[0].message.content or "", made.usage.prompt_tokens)
    items: Any = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": QUESTION},
                {"type": "input_image", "image_url": file.uri},
            ],
        }
    ]
    made = litellm.responses(
        model=f"openai/{model}",
        input=items,
        api_base=url,
        api_key="none",
        max_output_tokens=TOKENS,
        temperature=0,
    )
    found["responses asked"] = (made.output[0].content[0].text, made.usage.input_tokens)
    return found


def main() -> None:
    url, model, *paths = sys.argv[1:]
    for run in (with_openai, with_anthropic, with_langchain, with_llama_index, with_litellm):
        found = [run(url, model, File(path)) for path in paths]
        print(json.dumps({run.__name__: {way: [each[way] for each in found] for way in found[0]}}))


if __name__ == "__main__":
    main()
