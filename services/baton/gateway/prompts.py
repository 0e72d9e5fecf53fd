"""Converts prompts to token ids, and keeps sessions, whose turns continue one token sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from baton.gateway.prompt_images import ImageSize, keyed, with_images, without_files
from baton.gateway.token_log import ChoiceLog
from baton.gateway.tokenizer_client import TokenizerClient
from baton.rpc.errors import BatonError, failed_precondition, invalid, invalid_field
from baton.v1 import common_pb2, inference_pb2, tokenizer_pb2, trace_pb2

END_CHARACTERS = 64
IMAGE_IN_LOG = "[image]"
ReadImages = Callable[[tokenizer_pb2.ChatPrompt], Awaitable[list[ImageSize]]]


async def no_images(chat: tokenizer_pb2.ChatPrompt) -> list[ImageSize]:
    return []


class GatewaySession:
    """The state between turns. It changes only when a turn finishes; a failed turn leaves no trace.

    A text or token turn appends its prompt to the tokens so far. A chat turn appends its messages to the
    conversation and renders all of it. If the rendering starts with the text that the tokens so far stand
    for, only the remainder is encoded and appended; a template that rewrites earlier turns makes it start
    afresh.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.images: list[common_pb2.PromptImage] = []
        """Those in token_ids."""
        self.decode_address = ""
        self.prefill_address = ""
        self._chat: bool | None = None
        self._messages: list[tokenizer_pb2.ChatMessage] = []
        self.encoded_text = ""
        """For a chat: the text of token_ids. Empty: not known."""
        self._busy = False

    def begin(self, chat: bool, n: int) -> None:
        """Starts a turn; `end` must follow. Raises BatonError if the turn cannot continue this session."""
        if n != 1:
            raise invalid_field("n", f"must be 1 in a session, not {n}")
        if self._busy:
            raise failed_precondition(
                "the session's earlier turn is still running: wait for its end, or cancel it", "SESSION_BUSY"
            )
        if self._chat is not None and chat != self._chat:
            kinds = ("text or tokens", "chat messages")
            raise invalid(
                "session", f"the session began with {kinds[self._chat]} and cannot go on with {kinds[chat]}"
            )
        self._busy = True

    def end(self) -> None:
        self._busy = False

    def conversation(self, chat: tokenizer_pb2.ChatPrompt) -> tokenizer_pb2.ChatPrompt:
        """All messages so far, and the new ones; all else, such as tools, is this turn's."""
        whole = tokenizer_pb2.ChatPrompt()
        whole.CopyFrom(chat)
        del whole.messages[:]
        whole.messages.extend([*self._messages, *chat.messages])
        return whole

    def commit(
        self,
        prompt: EncodedPrompt,
        answer: ChoiceLog,
    ) -> None:
        """A turn has finished.

        Text and tokens continue after the turn's last token. The token that ended a chat's answer is left
        out, because the template writes the end of a turn itself. After a stop string, or a call that
        ended the answer, the tokens go beyond the text, so the next turn starts afresh.
        """
        self._chat = prompt.conversation is not None
        self.token_ids = [*prompt.token_ids, *answer.token_ids]
        self.images = prompt.images
        if prompt.conversation is None:
            return
        reply = tokenizer_pb2.ChatMessage(role="assistant", content=answer.text)
        self._messages = [*prompt.conversation.messages, reply]
        self.encoded_text = "" if answer.ended_early else prompt.rendered + answer.text
        if answer.finish_reason == common_pb2.FINISH_REASON_STOP and not answer.ended_early:
            self.token_ids.pop()


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    token_ids: list[int]
    field: str
    """The field of the prompt, for errors."""
    conversation: tokenizer_pb2.ChatPrompt | None = None
    """For a chat in a session, or with images: all messages, earlier turns included, images by digest."""
    rendered: str = ""
    """For a chat in a session: the template's text of the conversation."""
    end: str = ""
    """For a chat: the last END_CHARACTERS of that text."""
    images: list[common_pb2.PromptImage] = dataclasses.field(default_factory=list)
    """Those in token_ids, in order."""

    @property
    def image_tokens(self) -> int:
        return sum(image.rows * image.columns for image in self.images)

    @property
    def keys(self) -> Sequence[int]:
        """The tokens as prefix trees know them, where an image's name the image."""
        return keyed(self.token_ids, self.images)


async def encode_prompt(
    start: inference_pb2.GenerateStart,
    session: GatewaySession | None,
    tokenizer: TokenizerClient,
    timeout: float,
    name: trace_pb2.RequestName | None = None,
    traceparent: str = "",
    asking: Callable[[str], None] = lambda address: None,
    read: ReadImages = no_images,
) -> EncodedPrompt:
    """The tokens of the whole prompt, including those of the session. name: the request's. traceparent: its
    trace context. asking: called with the address of each tokenizer before it is asked. read: of a chat, the
    images of its messages, whose files it takes out of them."""
    earlier = session.token_ids if session is not None else []
    kind = start.WhichOneof("prompt")
    if kind == "tokens":
        return EncodedPrompt([*earlier, *start.tokens.token_ids], "tokens.token_ids")
    if kind == "text":
        text = tokenizer_pb2.EncodeInput(
            text=start.text, add_special_tokens=not earlier, request=name, traceparent=traceparent
        )
        found = list((await tokenizer.encode(text, timeout, asking)).token_ids)
        model = tokenizer.model
        if not (start.text or found or earlier) and model is not None and model.HasField("begin_token_id"):
            found = [model.begin_token_id]
        return EncodedPrompt([*earlier, *found], "text")
    conversation = session.conversation(start.chat) if session is not None else start.chat
    images = await read(conversation)
    conversation = without_files(conversation, images)
    encode_input = tokenizer_pb2.EncodeInput(chat=conversation, request=name, traceparent=traceparent)
    if session is not None:
        # Encoding the whole text again may give other tokens than those whose KV exists.
        encode_input.encoded_text = session.encoded_text
    try:
        result = await tokenizer.encode(encode_input, timeout, asking)
    except BatonError as error:
        if error.reason != "NO_CHAT_TEMPLATE":
            raise
        raise invalid("chat", "the model has no chat template: send text or tokens") from None
    end = result.rendered[-END_CHARACTERS:]
    if session is None or not result.continued:
        token_ids, spans = with_images(result.token_ids, result.images, images)
    else:
        token_ids, spans = with_images(
            [*earlier, *result.token_ids],
            [len(earlier) + at for at in result.images],
            images[len(session.images) :],
        )
        spans = [*session.images, *spans]
    if session is None:
        return EncodedPrompt(token_ids, "chat", conversation if images else None, "", end, spans)
    return EncodedPrompt(token_ids, "chat", conversation, result.rendered, end, spans)


def prompt_for_log(start: inference_pb2.GenerateStart) -> str | list[int] | list[str]:
    """A prompt in the form that --log-prompts writes."""
    kind = start.WhichOneof("prompt")
    if kind == "tokens":
        return list(start.tokens.token_ids)
    if kind == "text":
        return start.text
    return [
        message.content or "".join(part.text or IMAGE_IN_LOG for part in message.parts)
        for message in start.chat.messages
    ]
