"""From what a client sends as prompt to token ids."""

from __future__ import annotations

from dataclasses import dataclass

from baton.gateway.session import Session
from baton.gateway.tokenizer import Tokenizer
from baton.rpc.errors import BatonError, invalid
from baton.v1 import inference_pb2, tokenizer_pb2


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    field: str
    """Where it came from, for errors."""
    conversation: tokenizer_pb2.ChatPrompt | None = None
    """Of a chat in a session: all messages, earlier turns included."""
    rendered: str = ""
    """Of the same: the text that the template made of the conversation."""


async def encode_prompt(
    start: inference_pb2.GenerateStart, session: Session | None, tokenizer: Tokenizer, timeout: float
) -> Prompt:
    """The tokens of the whole prompt, what the session already holds included."""
    earlier = session.token_ids if session is not None else []
    kind = start.WhichOneof("prompt")
    if kind == "tokens":
        return Prompt([*earlier, *start.tokens.token_ids], "tokens.token_ids")
    if kind == "text":
        new = await _encode_text(start.text, not earlier, tokenizer, timeout)
        return Prompt([*earlier, *new], "text")
    conversation = session.conversation(start.chat) if session is not None else start.chat
    given = tokenizer_pb2.EncodeInput(chat=conversation)
    if session is not None:
        # Encoding the whole text again may cut it into other tokens than those that the KV was computed for.
        given.encoded_text = session.encoded_text
    try:
        result = (await tokenizer.encode([given], timeout))[0]
    except BatonError as error:
        if error.reason != "NO_CHAT_TEMPLATE":
            raise
        raise invalid("chat", "the model has no chat template: send text or tokens") from None
    token_ids = [*earlier, *result.token_ids] if result.continued else list(result.token_ids)
    if session is None:
        return Prompt(token_ids, "chat")
    return Prompt(token_ids, "chat", conversation, result.rendered)


def shown(start: inference_pb2.GenerateStart) -> str | list[int] | list[str]:
    """A prompt as --log-prompts writes it."""
    kind = start.WhichOneof("prompt")
    if kind == "tokens":
        return list(start.tokens.token_ids)
    return [message.content for message in start.chat.messages] if kind == "chat" else str(start.text)


async def _encode_text(text: str, special: bool, tokenizer: Tokenizer, timeout: float) -> list[int]:
    given = tokenizer_pb2.EncodeInput(text=text, add_special_tokens=special)
    return list((await tokenizer.encode([given], timeout))[0].token_ids)
