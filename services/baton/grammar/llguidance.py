"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): lexer and Earley parser over a token
trie.

Its documentation describes the dialect of Lark (docs/syntax.md) and what of JSON Schema it enforces
(docs/json_schema.md). It refuses what it does not know, rather than ignore it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence, Set
from functools import lru_cache

import llguidance as library
import numpy as np

from baton.grammar.base import GrammarError, GrammarSpec, Matcher, Words
from baton.grammar.json_literals import WHITESPACE, as_lark, dumps, is_exact, rewrite_lark
from baton.grammar.json_schema import rewrite

LIMITS = library.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""A state takes 1 to 2 kB; the other limits are the library's own. A mask takes milliseconds at most."""
_PLAIN = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_PLAIN}{{1,{most}}}" for most in (3, 5, 7, 10, 15, 30)), f"{_PLAIN}+"]
"""Sets of tokens whose masks are kept: where a string may go on with all of a set, the library need not try
each. It has fewer by itself; with more lengths, a string that nears its maxLength still finds some."""
FORCED_TEXTS, FORCED_CHARS = 4096, 256
"""Encodings of texts that a grammar forces (keys, and what is left of them) that are kept, and of how many
characters at most: callers choose them."""


class LlguidanceBackend:
    """Implements grammar.base.Backend."""

    def __init__(
        self,
        tokens: Sequence[bytes | None],
        special: Set[int],
        eos: Sequence[int],
        vocab_size: int,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """tokens: the bytes of each token id; None: undefined. They may be more or fewer than the model's
        vocab_size. special: ids that stand for themselves only, not for their bytes. eos: ids that end an
        output, at least one. encode: the model's tokenizer, without tokens of its own accord; it chooses
        among tokens where the grammar leaves one text only."""
        table = [token or b"" for token in tokens[:vocab_size]]
        table += [b""] * (vocab_size - len(table))
        special = {id for id in (*special, *eos) if id < vocab_size}
        usable = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
        usable[[id for id, token in enumerate(table) if token]] = True
        self._usable: Words = np.packbits(usable, bitorder="little").view(np.int32)
        wrapped = library.TokenizerWrapper(_Tokenizer(table, special, eos[0], encode))
        self._tokenizer = library.LLTokenizer(wrapped, eos_token=list(eos), slices=SLICES)

    def compile(self, spec: GrammarSpec) -> LlguidanceGrammar:
        try:
            matcher = library.LLMatcher(self._tokenizer, _source(spec), log_level=0, limits=LIMITS)
        except ValueError as error:
            raise GrammarError(_one_line(str(error))) from None
        except RecursionError:
            raise GrammarError("recursion limit: the schema is nested too deeply") from None
        if matcher.is_error():
            raise GrammarError(_one_line(matcher.get_error()))
        grammar = LlguidanceGrammar(matcher, self._usable)
        # Some grammars are found to be too large, or to match nothing, only by their first masks.
        first, words = grammar.matcher(), np.empty_like(self._usable)
        first.fill(words)
        first.accept(first.forced())
        first.fill(words)
        return grammar


class LlguidanceGrammar:
    """Implements grammar.base.Grammar. Its matchers share a lexer, which the library locks."""

    def __init__(self, matcher: library.LLMatcher, usable: Words) -> None:
        """usable: the ids that stand for something."""
        self._matcher = matcher
        self._usable = usable

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._matcher.deep_copy(), self._usable)


class LlguidanceMatcher(Matcher):
    """Not by the library's executor: it has been seen to wait for ever in a decode node."""

    __slots__ = ("_matcher", "_usable")

    def __init__(self, matcher: library.LLMatcher, usable: Words) -> None:
        self._matcher = matcher
        self._usable = usable

    def accept(self, tokens: Sequence[int]) -> None:
        if not self._matcher.consume_tokens(list(tokens)):
            raise GrammarError(_one_line(self._matcher.get_error()) or _DOES_NOT_FIT)

    def forced(self) -> list[int]:
        """Tokens of the text that follows in every case."""
        return self._matcher.compute_ff_tokens()

    def fill(self, words: Words) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarError(_one_line(self._matcher.get_error()))
        np.bitwise_and(words, self._usable, out=words)
        if not words.any():
            raise GrammarError(_NOTHING_FITS)

    @classmethod
    def fill_all(
        cls, matchers: Sequence[LlguidanceMatcher], tokens: Sequence[Sequence[int]], words: Words
    ) -> dict[int, GrammarError]:
        """Does once what `fill` does for each row, but for the library's own part."""
        errors: dict[int, GrammarError] = {}
        size = words.strides[0]
        address = words.ctypes.data
        for row, (matcher, row_tokens) in enumerate(zip(matchers, tokens, strict=True)):
            own_matcher = matcher._matcher
            own_matcher.consume_tokens(list(row_tokens))
            own_matcher.unsafe_compute_mask_ptr(address + row * size, size)
            if own_matcher.is_error():
                errors[row] = GrammarError(_one_line(own_matcher.get_error()) or _DOES_NOT_FIT)
        np.bitwise_and(words, matchers[0]._usable, out=words)
        # Much faster than any().
        for row in np.flatnonzero(words.view(np.uint32).max(axis=1) == 0).tolist():
            errors.setdefault(row, GrammarError(_NOTHING_FITS))
        return errors


def _source(spec: GrammarSpec) -> str:
    """The library's own form of it. Raises ValueError."""
    match spec.kind:
        case "json_schema" | "json_object":
            schema = (
                rewrite(json.loads(spec.text)).schema if spec.kind == "json_schema" else {"type": "object"}
            )
            if is_exact(schema):
                expression, rules = as_lark(schema, "json")
                return library.LLMatcher.grammar_from_lark("\n".join([f"start: {expression}", *rules]))
            # Options cannot be given with a schema that is no object.
            return library.LLMatcher.grammar_from_json_schema(
                "{}" if schema is True else dumps(schema), defaults={"whitespace_pattern": WHITESPACE}
            )
        case "regex":
            return library.LLMatcher.grammar_from_regex(spec.text)
        case "lark":
            return library.LLMatcher.grammar_from_lark(rewrite_lark(spec.text))
        case "choice":
            return library.LLMatcher.grammar_from_regex("|".join(map(_literal, spec.choices)))


def _literal(text: str) -> str:
    """A regular expression for this text alone."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)


class _Tokenizer:
    """What the library's TokenizerWrapper wraps."""

    def __init__(
        self, tokens: list[bytes], special: Set[int], eos: int, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self.eos_token_id = eos
        self.bos_token_id = None
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self._special = special
        self._encode = encode
        self._ids = {token: id for id, token in enumerate(tokens) if token and id not in special}
        self._longest = max(map(len, self._ids), default=0)
        self._encoded = lru_cache(FORCED_TEXTS)(self._encoding)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text only")  # asked once, to find out
        return self._encoded(text) if len(text) <= FORCED_CHARS else self._encoding(text)

    def _encoding(self, text: str) -> list[int]:
        raw, ids = text.encode(), list(self._encode(text))
        if self._special.isdisjoint(ids) and b"".join(self.tokens[id] for id in ids) == raw:
            return ids
        # The tokenizer adds something of its own (a leading space), or reads a special token in it.
        return self._greedy(raw)

    def _greedy(self, raw: bytes) -> list[int]:
        """The longest token first. Stops where none fits."""
        ids, start = [], 0
        while start < len(raw):
            for size in range(min(self._longest, len(raw) - start), 0, -1):
                id = self._ids.get(raw[start : start + size])
                if id is not None:
                    break
            else:
                break
            ids.append(id)
            start += size
        return ids


_ECHO = re.compile(r"^ *(\d+ \| .*|\^+ *|<.*>)$")
"""A line of the library's message that repeats the grammar, or points into such a line."""
_LINE_CHARACTERS, _MESSAGE_CHARACTERS = 160, 400


_DOES_NOT_FIT = "the output does not fit it"
_NOTHING_FITS = "no token may follow: no text fits, or the vocabulary has no token for it"


def _one_line(message: str) -> str:
    if message.startswith("NoExtension"):
        return _NOTHING_FITS
    lines = [line.strip() for line in message.split("\n") if not _ECHO.match(line)]
    cut = [
        line if len(line) <= _LINE_CHARACTERS else f"{line[:_LINE_CHARACTERS]}..." for line in lines if line
    ]
    return " ".join(" ".join(cut).split())[:_MESSAGE_CHARACTERS]
