"""Turns on one stream that continue one token sequence, so that the KV of earlier turns is reused."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.token_log import ChoiceLog
from baton.rpc.errors import failed_precondition, invalid
from baton.v1 import common_pb2, tokenizer_pb2


class Session:
    """The state between turns. It changes only when a turn finishes: a failed turn leaves no trace.

    A text or token turn appends its prompt to the tokens so far. A chat turn appends its messages to the
    conversation and renders all of it. If the rendering starts with the text that the tokens so far stand
    for, only the remainder is encoded and appended; a template that rewrites earlier turns makes it start
    afresh.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.decode_address = ""
        self.prefill_address = ""
        self._chat: bool | None = None
        self._messages: list[tokenizer_pb2.ChatMessage] = []
        self.encoded_text = ""
        """Of a chat: what token_ids stand for. Empty: no text is known to stand for them."""
        self._busy = False

    @property
    def started(self) -> bool:
        """At least one turn has finished."""
        return self._chat is not None

    def begin(self, chat: bool, n: int) -> None:
        """Starts a turn; `end` must follow. Raises BatonError if the turn cannot continue this session."""
        if n != 1:
            raise invalid("n", f"n must be 1 in a session, not {n}")
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
        """All messages so far, and the new ones."""
        whole = tokenizer_pb2.ChatPrompt(messages=[*self._messages, *chat.messages])
        if chat.HasField("add_generation_prompt"):
            whole.add_generation_prompt = chat.add_generation_prompt
        return whole

    def commit(
        self,
        prompt_ids: Sequence[int],
        answer: ChoiceLog,
        conversation: tokenizer_pb2.ChatPrompt | None = None,
        rendered: str = "",
    ) -> None:
        """A turn has finished. conversation and rendered: of a chat turn, what its prompt was made from.

        Text and tokens go on after the turn's last token. Of a chat's answer the token that ended it is left
        out, for the template writes the end of a turn itself; after a stop string the tokens say more than
        the text, so that the next turn starts afresh.
        """
        self._chat = conversation is not None
        self.token_ids = [*prompt_ids, *answer.token_ids]
        if conversation is None:
            return
        said = tokenizer_pb2.ChatMessage(role="assistant", content=answer.text)
        self._messages = [*conversation.messages, said]
        self.encoded_text = "" if answer.stop_matched else rendered + answer.text
        if answer.finish_reason == common_pb2.FINISH_REASON_STOP and not answer.stop_matched:
            self.token_ids.pop()
