"""Incremental detokenization. Pure: no I/O, O(1) amortized per token, at most three bytes held back.

A character is given out once all of its bytes are there. Bytes that cannot become a character are given out
as U+FFFD as soon as that is certain (by the next byte, or by the end), as UTF-8 decoders do. So deltas never
end in half a character, and nothing is held back for long.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from baton.tokenizer.vocabulary import Vocabulary


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("baton.each_byte", _each_byte)

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One token stream.

    context: tokens that come before; they yield no text, but the stream's first token then is not a text's
    first, and a character that the context left unfinished comes out whole.
    """

    __slots__ = ("_decoder", "_skip", "_started", "vocabulary")

    def __init__(
        self,
        vocabulary: Vocabulary,
        context: Iterable[int] = (),
        skip_special_tokens: bool = True,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """keep: special tokens that are not skipped."""
        self.vocabulary = vocabulary
        self._skip = vocabulary.special - keep if skip_special_tokens else frozenset[int]()
        self._started = False
        self._decoder = _utf8("baton.each_byte" if vocabulary.byte_fallback else "replace")
        self.feed(context)

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that has become certain with these tokens. Ids outside the tables add nothing."""
        table, skipped = self.vocabulary.tokens, self._skip
        data = bytearray()
        for token in tokens:
            piece = table[token] if 0 <= token < len(table) else None
            if piece is None or token in skipped:
                continue
            if not self._started:
                self._started = True
                piece = self.vocabulary.first_tokens[token] or b""
            data += piece
        return self._decoder.decode(bytes(data))

    def finish(self) -> str:
        """What is held back, given out. The stream cannot be used after."""
        return self._decoder.decode(b"", final=True)


def decode(vocabulary: Vocabulary, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
    """The text of a whole sequence: what a Detokenizer gives out in all."""
    stream = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
    return stream.feed(tokens) + stream.finish()
