"""A model's vocabulary: the bytes of each token. Imports neither torch nor transformers.

The decoders of the tokenizer families that language models use share one form: a text is what its first token
stands for at the start, followed by what each further token stands for, as bytes read as UTF-8. `Vocabulary`
is that form; `read_vocabulary` derives it from a decoder's description in tokenizer.json (format and
behaviour: https://github.com/huggingface/tokenizers, `tokenizers/src/decoders`). Processes get it from each
other by Tokenizer.Vocabulary.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from baton.v1 import tokenizer_pb2

PART_TOKENS = 4096
"""Tokens in a part of the vocabulary, as it is sent: about a hundred kilobytes."""

Spec = dict[str, Any]

_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class UnknownDecoder(Exception):
    """The decoder does not have the form described here."""


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token: tables by token id, of equal length. Ids beyond them have no text."""

    tokens: Sequence[bytes | None]
    """Bytes that a token adds to a text; None: the tokenizer does not define the id."""
    first_tokens: Sequence[bytes | None]
    """Bytes that it adds as the first token of a text. The same object as `tokens` if there is no
    difference."""
    special: frozenset[int]
    """Tokens that are left out when special tokens are skipped."""
    byte_fallback: bool
    """Invalid UTF-8 yields one U+FFFD a byte, rather than one for each maximal part of a character."""
    size: int
    """The model's vocabulary size: ids from len(tokens) on exist as logits but have no text."""

    def bytes_of(self, token: int) -> bytes:
        """The token's own bytes; b"" for an id that the tokenizer leaves undefined."""
        return (self.tokens[token] or b"") if 0 <= token < len(self.tokens) else b""

    def special_tokens(self, names: Collection[str]) -> frozenset[int]:
        """The special tokens of these texts."""
        spelled = {name.encode() for name in names}
        return frozenset(token for token in self.special if self.bytes_of(token) in spelled)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of all of the above, in hexadecimal."""
        digest = hashlib.sha256(f"{self.size} {self.byte_fallback} {sorted(self.special)}".encode())
        for table in (self.tokens, self.first_tokens):
            lengths = array("i", [-1 if token is None else len(token) for token in table])
            if sys.byteorder == "big":
                lengths.byteswap()
            digest.update(lengths.tobytes())
            digest.update(b"".join(token or b"" for token in table))
        return digest.hexdigest()

    def parts(self) -> Iterator[tokenizer_pb2.VocabularyPart]:
        """The vocabulary in the messages of Tokenizer.Vocabulary."""
        for start in range(0, max(1, len(self.tokens)), PART_TOKENS):
            end = min(start + PART_TOKENS, len(self.tokens))
            tokens, first_tokens = self.tokens[start:end], self.first_tokens[start:end]
            yield tokenizer_pb2.VocabularyPart(
                tokens=[token or b"" for token in tokens],
                first_tokens=[token or b"" for token in first_tokens] if first_tokens != tokens else (),
                undefined=[start + index for index, token in enumerate(tokens) if token is None],
                special=sorted(id for id in self.special if start <= id < end),
                byte_fallback=self.byte_fallback,
                size=self.size,
                hash=self.hash,
            )

    @classmethod
    def of(cls, parts: Sequence[tokenizer_pb2.VocabularyPart]) -> Self:
        """From all parts, in order. Raises ValueError for parts that are not whole."""
        if not parts:
            raise ValueError("the parts of a vocabulary have not come")
        tokens: list[bytes | None] = []
        first_tokens: list[bytes | None] = []
        for part in parts:
            tokens += part.tokens
            first_tokens += part.first_tokens or part.tokens
            for id in part.undefined:
                if id < len(tokens):  # else parts are missing: the hash tells
                    tokens[id] = first_tokens[id] = None
        special = frozenset(id for part in parts for id in part.special)
        same = tokens == first_tokens
        last = parts[-1]
        made = cls(tokens, tokens if same else first_tokens, special, last.byte_fallback, last.size)
        if made.hash != last.hash:
            raise ValueError(f"the parts of a vocabulary are not those of {last.hash}")
        return made


def read_vocabulary(
    tokens: Sequence[str | None], special: frozenset[int], decoder: Spec | None, size: int | None = None
) -> Vocabulary:
    """Derives what tokens stand for from a tokenizer's decoder.

    tokens: the vocabulary's strings by id (None: undefined); decoder: its description, None where the
    tokenizer has none; size: the model's, None: as many as tokens. Raises UnknownDecoder.
    """
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    byte_fallback = False
    first: Callable[[str], bytes]
    later: Callable[[str], bytes]
    if not steps:
        first, later = str.encode, lambda token: f" {token}".encode()
    elif "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        first = later = _byte_level()
    elif kinds == ["WordPiece"]:
        first, later = _word_piece(steps[0])
    elif set(kinds) <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        first, later = _sentence_piece(steps)
        byte_fallback = "ByteFallback" in kinds
    else:
        raise UnknownDecoder(f"decoder {'+'.join(kinds)} is not supported")
    table = [None if token is None else later(token) for token in tokens]
    first_table = table if first is later else [None if token is None else first(token) for token in tokens]
    return Vocabulary(table, first_table, special, byte_fallback, len(tokens) if size is None else size)


def _flatten(decoder: Spec | None) -> list[Spec]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _byte_level_alphabet() -> list[str]:
    """The printable character that stands for each byte (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = 0
    alphabet = []
    for byte in range(256):
        if byte in printable:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(0x100 + shifted))
            shifted += 1
    return alphabet


def _byte_level() -> Callable[[str], bytes]:
    table = {char: byte for byte, char in enumerate(_byte_level_alphabet())}

    def convert(token: str) -> bytes:
        try:
            return bytes(table[char] for char in token)
        except KeyError:  # an added token, written as itself
            return token.encode()

    return convert


def _word_piece(step: Spec) -> tuple[Callable[[str], bytes], Callable[[str], bytes]]:
    prefix = step["prefix"]

    def clean(text: str) -> str:
        if step["cleanup"]:
            for pattern, replacement in _CLEAN_UP:
                text = text.replace(pattern, replacement)
        return text

    def first(token: str) -> bytes:
        return clean(token).encode()

    def later(token: str) -> bytes:
        return clean(token.removeprefix(prefix) if token.startswith(prefix) else f" {token}").encode()

    return first, later


def _sentence_piece(steps: list[Spec]) -> tuple[Callable[[str], bytes], Callable[[str], bytes]]:
    """Steps: Metaspace, Replace of a string, ByteFallback, Fuse; Strip of one leading space after Fuse."""
    byte_fallback = False
    strip = False
    at_start: list[tuple[str, str]] = []
    elsewhere: list[tuple[str, str]] = []
    for index, step in enumerate(steps):
        fused = any(earlier["type"] == "Fuse" for earlier in steps[:index])
        match step:
            case {"type": "Metaspace", "replacement": mark, **rest} if not fused:
                at_start.append((mark, " " if rest.get("prepend_scheme") == "never" else ""))
                elsewhere.append((mark, " "))
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if not fused:
                at_start.append((pattern, content))
                elsewhere.append((pattern, content))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fused:
                strip = strip or start == 1
            case _:
                raise UnknownDecoder(f"decoder step {step} is not supported here")

    def convert(token: str, replacements: list[tuple[str, str]]) -> bytes:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        byte = _fallback_byte(token) if byte_fallback else None
        return token.encode() if byte is None else byte

    def first(token: str) -> bytes:
        piece = convert(token, at_start)
        return piece.removeprefix(b" ") if strip else piece

    def later(token: str) -> bytes:
        return convert(token, elsewhere)

    return first, later


def _fallback_byte(piece: str) -> bytes | None:
    """The byte that a token such as "<0x0A>" stands for."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            return None
    return None
