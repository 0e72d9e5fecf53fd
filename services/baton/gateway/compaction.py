"""/v1/responses/compact: a conversation becomes its users' messages and a summary, which the model writes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from typing import ClassVar

from baton.gateway.gateway import Gateway
from baton.gateway.openai_errors import ApiError
from baton.gateway.responses_answers import usage_of
from baton.gateway.responses_items import compacted
from baton.gateway.responses_protocol import Conversation, add_messages
from baton.gateway.typed_events import Json, TypedAnswer
from baton.rpc.validate import check_sampling
from baton.v1 import inference_pb2, tokenizer_pb2

ASK = (
    "Summarize this conversation for somebody who goes on with it: what is wanted, what has been decided and "
    "done, what is left to do, and every name, number and file that matters. Write the summary alone."
)
MIN_TOKENS, MAX_TOKENS = 256, 1024
"""Limits of a summary's limit, which is as many tokens as the conversation has; reasoning is included."""


class CompactRequest(Conversation):
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
    add_messages(request, earlier, start.chat)
    start.chat.messages.add(role="user", content=ASK)
    return start


async def bound(gateway: Gateway, start: inference_pb2.GenerateStart) -> None:
    """Limits the summary. A prompt that leaves no room for it is refused later."""
    given = tokenizer_pb2.EncodeInput(chat=start.chat)
    encoded = await gateway.tokenizer.encode(given, gateway.config.request_seconds)
    tokens = len(encoded.token_ids)
    room = gateway.model().context_length - tokens
    start.sampling.max_tokens = max(1, min(room, MAX_TOKENS, max(MIN_TOKENS, tokens)))


class CompactAnswer(TypedAnswer):
    def __init__(self, start: inference_pb2.GenerateStart) -> None:
        self._name = uuid.uuid4().hex
        self._users = [message.content for message in start.chat.messages[:-1] if message.role == "user"]
        self._summary: list[str] = []
        self._usage: Json = {}

    def add(self, delta: inference_pb2.Delta) -> list[Json]:
        self._summary.append(delta.text)
        return []

    def end(self, finished: inference_pb2.Finished) -> list[Json]:
        self._usage = usage_of(finished)
        return []

    def fail(self, error: ApiError) -> list[Json]:
        return []  # has no stream

    def whole(self) -> Json:
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
        summary = compacted("".join(self._summary).strip())
        output.append({"type": "compaction", "id": f"cmp_{self._name}", "encrypted_content": summary})
        return {
            "id": f"resp_{self._name}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": output,
            "usage": self._usage,
        }
