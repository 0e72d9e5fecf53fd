"""Conversations to token ids: rendered by the model's chat template, then encoded.

Special tokens that a message or a tool names, such as "<|im_end|>", stay plain text. Those that the template
writes become tokens. Each step keeps the two apart:

1. In every string that the caller gave, one character of each special token is replaced by a mark, a
   private-use character that occurs nowhere else. Lengths stay, so templates may trim, split and slice.
2. The template renders the marked strings. A special token that is whole in the result is the template's.
3. Those are replaced by stand-ins, random strings that only this module's tokenizer knows, the marks are
   taken back, and that tokenizer, which knows no other special tokens, encodes the whole text at once.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tokenizers import AddedToken, Tokenizer

from baton.tokenizer.conversation import Conversation

MARKS = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Unicode's private-use characters."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the template wrote it."""

    text: str
    marked: str
    """The text with marks in the special tokens that the caller named."""
    marks: dict[str, str]
    """Character to mark."""

    def after(self, beginning: str) -> Rendered | None:
        """What follows `beginning`; None: the text does not begin so."""
        if not self.text.startswith(beginning):
            return None
        return Rendered(self.text[len(beginning) :], self.marked[len(beginning) :], self.marks)


class ChatEncoder:
    """Thread-safe: nothing changes after __init__.

    backend: the model's tokenizer; its model, normalizer, pre-tokenizer and post-processor are shared.
    unknown: the id that stands for unknown text, or None.
    """

    def __init__(self, backend: Tokenizer, unknown: int | None = None) -> None:
        added = backend.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if token.special and token.content}
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._to_mark = {token: (token.lstrip() or token)[0] for token in special}
        nonce = secrets.token_hex(16)  # no content can hold a stand-in
        self._stand_ins = {token: f"<|{nonce}-{id}|>" for token, id in special.items()}
        self._model = backend.model
        self._plain = Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(backend, part) is not None:
                setattr(self._plain, part, getattr(backend, part))
        tokens = []
        for _, token in sorted(added.items()):
            if token.content in special:
                sides = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
                stand_in = self._stand_ins[token.content]
                tokens.append(AddedToken(stand_in, normalized=False, special=False, **sides))
            else:
                tokens.append(token)
        self._plain.add_tokens(tokens)  # all at once: each call takes time for all that are there
        names = {id: self._stand_ins.get(token.content, token.content) for id, token in added.items()}
        self._ids = {self._plain.token_to_id(name): id for id, name in names.items()}
        """Ids of added tokens: the model's, by those of `_plain`."""
        known = {token: backend.model.token_to_id(token) for token in special}
        self._names = {id: token for token, id in known.items() if id is not None and id != unknown}
        """Special tokens that the tokenizer's model could produce from plain text."""

    def render(
        self, render: Callable[[Conversation], str], conversation: Conversation, template: str
    ) -> Rendered:
        """render: applies the template, whose source is `template`. Passes on what it raises."""
        present = set[str]().union(*_strings(conversation))
        characters = sorted(present.intersection(self._to_mark.values()))
        if not characters:
            text = render(conversation)
            return Rendered(text, text, {})
        used = present | {*template}
        free = (chr(code) for code in chain(*MARKS) if chr(code) not in used)
        marks = dict(zip(characters, free, strict=False))
        if len(marks) < len(characters):
            raise ValueError("the messages use every private-use character of Unicode")
        marked = render(_with_strings(conversation, lambda text: self._mark(text, marks)))
        # A template may join strings, or cut pieces out of them, so that only the result names a special
        # token. Rendered with every such character marked, the text holds the template's own alone.
        everywhere = {ord(character): mark for character, mark in marks.items()}
        strict = render(_with_strings(conversation, lambda text: text.translate(everywhere)))
        if len(self._special.findall(strict)) < len(self._special.findall(marked)):
            marked = strict
        return Rendered(_without_marks(marked, marks), marked, marks)

    def encode(self, rendered: Sequence[Rendered], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each."""
        texts = []
        for each in rendered:
            text = self._special.sub(lambda match: self._stand_ins[match.group()], each.marked)
            texts.append(_without_marks(text, each.marks))
        encodings = self._plain.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [self._to_model(encoding) for encoding in encodings]

    def _mark(self, content: str, marks: dict[str, str]) -> str:
        def mark(match: re.Match[str]) -> str:
            character = self._to_mark[match.group()]
            return match.group().replace(character, marks[character], 1)

        return self._special.sub(mark, content)

    def _to_model(self, encoding: Any) -> list[int]:
        ids: list[int] = encoding.ids
        if self._names.keys().isdisjoint(ids):
            return [self._ids.get(id, id) for id in ids]
        found = []
        for id, around in zip(ids, encoding.special_tokens_mask, strict=True):
            if id in self._names and not around:  # made from plain text: its parts instead
                name = self._names[id]
                halves = (self._model.tokenize(name[:1]), self._model.tokenize(name[1:]))
                found += [token.id for half in halves for token in half]
            else:
                found.append(self._ids.get(id, id))
        return found


def _without_marks(text: str, marks: Mapping[str, str]) -> str:
    return text.translate({ord(mark): character for character, mark in marks.items()})


def _strings(value: Any) -> Iterator[str]:
    """All strings that a caller gave, keys of objects included."""
    if isinstance(value, Conversation):
        yield from _strings([value.messages, value.tools, value.arguments])
    elif isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _strings(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _strings(each)


def _with_strings(conversation: Conversation, change: Callable[[str], str]) -> Conversation:
    """Changes all but roles, what messages call their parts, and images."""

    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {change(key): changed(each) for key, each in value.items()}
        return [changed(each) for each in value] if isinstance(value, Sequence) else value

    messages = [
        {key: each if key == "role" else changed(each) for key, each in message.items()}
        for message in conversation.messages
    ]
    arguments = {key: changed(each) for key, each in conversation.arguments.items()}
    return Conversation(messages, changed(conversation.tools), arguments)
