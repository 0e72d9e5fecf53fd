"""What each token stands for, in bytes.

The decoders of the tokenizer families that language models use share one form: a text is what its first token
stands for at the start, followed by what each further token stands for, as bytes read as UTF-8. `Pieces` is
that form; `read_pieces` derives it from a decoder's description in tokenizer.json (format and behaviour:
https://github.com/huggingface/tokenizers, `tokenizers/src/decoders`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Pieces:
    """Tables over token ids, all of one length; ids beyond it stand for nothing."""

    first: Sequence[bytes | None]
    """What a token adds as the first token of a text; None: the tokenizer leaves the id undefined."""
    later: Sequence[bytes | None]
    """What it adds elsewhere. The same object as `first` where there is no difference."""
    special: frozenset[int]
    """Tokens that are left out where special tokens are skipped."""
    byte_fallback: bool
    """Invalid UTF-8 yields one U+FFFD a byte, rather than one for each maximal part of a character."""

    def own(self, token: int) -> bytes:
        """The token's own bytes; b"" for an id that the tokenizer leaves undefined."""
        return (self.later[token] or b"") if 0 <= token < len(self.later) else b""


def read_pieces(tokens: Sequence[str | None], special: frozenset[int], decoder: Spec | None) -> Pieces:
    """Builds the tables.

    tokens: the vocabulary's strings by id (None: undefined); decoder: its description, None where the
    tokenizer has none. Raises UnknownDecoder.
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
    later_table = [None if token is None else later(token) for token in tokens]
    if first is later:
        return Pieces(later_table, later_table, special, byte_fallback)
    first_table = [None if token is None else first(token) for token in tokens]
    return Pieces(first_table, later_table, special, byte_fallback)


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
