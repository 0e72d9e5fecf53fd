"""/v1/responses/compact: a conversation becomes its users' messages and a summary, which the model writes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from typing import ClassVar

from baton.api.openai_errors import ApiError
from baton.api.openai_fields import Json
from baton.api.responses_answers import usage_of
from baton.api.responses_items import BREAK, compacted
from baton.api.responses_protocol import ConversationRequest, add_messages
from baton.api.typed_events import TypedAnswer
from baton.authentication.api_keys import ApiKey
from baton.gateway.chat_tokens import encode_chat
from baton.gateway.gateway import Gateway
from baton.parsers.registry import REASONING_PARSERS
from baton.rpc.validate import check_sampling
from baton.v1 import inference_pb2, tokenizer_pb2

ASK = (
    "Summarize this conversation for somebody who goes on with it: what is wanted, what has been decided and "
    "done, what is left to do, and every name, number and file that matters. Write the summary alone."
)
MIN_TOKENS, MAX_TOKENS = 256, 1024
"""Limits of a summary's limit, which is as many tokens as the conversation has."""
IMAGE_LEFT_OUT = "[An image was here.]"
"""In a user's message: the summary says what was seen."""
REASONING_TOKENS = 4096
"""More, for a model that may reason first: for its reasoning and its summary together."""


class CompactRequest(ConversationRequest):
    """POST /v1/responses/compact."""

    HINTS: ClassVar[Mapping[str, str]] = {
        "prompt_cache_key": "every prompt finds what is cached of it",
        "prompt_cache_retention": "pages are kept as long as there is room",
        "prompt_cache_options": "every prompt finds what is cached of it",
        "service_tier": "there is one",
        "client_metadata": "is the client's own record",
        "tools": "a summary calls none",
        "parallel_tool_calls": "a summary calls none",
        "reasoning": "is of answers",
        "text": "is of answers",
    }

    temperature: float | None = None


def compact_start(
    request: CompactRequest, earlier: Iterable[tokenizer_pb2.ChatMessage]
) -> inference_pb2.GenerateStart:
    """earlier: the conversation of previous_response_id. Raises ApiError, BatonError."""
    start = inference_pb2.GenerateStart(id="http", model=request.model, include_token_ids=False)
    start.sampling.temperature = request.temperature or 0
    check_sampling(start.sampling, None)
    chat = start.chat
    add_messages(request, earlier, chat)
    chat.template_arguments.update({"enable_thinking": False})  # a summary has few tokens
    last = chat.messages[-1]
    if last.role == "user":  # templates may demand that users and assistants alternate
        if last.parts:
            last.parts.add(text=BREAK + ASK)
        else:
            last.content += BREAK + ASK
    else:
        chat.messages.add(role="user", content=ASK)
    return start


async def bound(gateway: Gateway, start: inference_pb2.GenerateStart, api_key: ApiKey) -> None:
    """Limits the summary. A prompt that leaves no room for it is refused later. Raises BatonError."""
    with gateway.call(api_key):
        tokens = len(await encode_chat(gateway, start, api_key))
    model = gateway.model_or_last() or gateway.model()
    room = model.context_length - tokens
    limit = min(MAX_TOKENS, max(MIN_TOKENS, tokens))
    if model.reasoning_format in REASONING_PARSERS:
        limit += REASONING_TOKENS
    start.sampling.max_tokens = max(1, min(room, limit))


def _text(message: tokenizer_pb2.ChatMessage) -> str:
    return message.content or "".join(part.text or IMAGE_LEFT_OUT for part in message.parts)


class CompactAnswer(TypedAnswer):
    """The answer of `/v1/responses/compact`. If a model has only reasoned, the reasoning is the summary:
    a client that cannot compact cannot go on."""

    def __init__(self, start: inference_pb2.GenerateStart) -> None:
        self._name = uuid.uuid4().hex
        users = [_text(message) for message in start.chat.messages if message.role == "user"]
        users[-1] = users[-1].removesuffix(ASK).removesuffix(BREAK)
        self._users = [text for text in users if text]
        self._summary: list[str] = []
        self._reasoning: list[str] = []
        self._usage: Json = {}

    def add(self, delta: inference_pb2.Delta) -> list[Json]:
        self._summary.append(delta.text)
        self._reasoning.append(delta.reasoning)
        return []

    def end(self, finished: inference_pb2.Finished) -> list[Json]:
        self._usage = usage_of(finished)
        return []

    def fail(self, error: ApiError) -> list[Json]:
        return []  # has no stream

    def whole(self) -> Json:
        """Raises ApiError."""
        summary = "".join(self._summary).strip() or "".join(self._reasoning).strip()
        if not summary:
            made = self._usage["output_tokens"]
            text = f"the model wrote no summary in {made} tokens: go on with the items as they are"
            raise ApiError(422, text, None, "no_summary")
        output: list[Json] = [
            {
                "type": "message",
                "id": f"msg_{self._name}_{index}",
                "status": "completed",
                "role": "user",
                "content": [{"type": "input_text", "text": text}],
            }
            for index, text in enumerate(self._users)
        ]
        content = compacted(summary)
        output.append({"type": "compaction", "id": f"cmp_{self._name}", "encrypted_content": content})
        return {
            "id": f"resp_{self._name}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": output,
            "usage": self._usage,
        }
