"""Drafts what followed the last tokens when they occurred before, in the sequence's own prompt and output.

Prompt lookup (Saxena, github.com/apoorvumang/prompt-lookup-decoding, 2023); the longer the match, the more is
drafted, as in SuffixDecoding (Oliaro et al., arXiv:2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.engine.draft.base import Drafter
from baton.engine.request import Sequence as TokenSequence

LEAST_MATCH = 3
"""Tokens that must have occurred before."""
LONGEST_MATCH = 32
"""Longer matches say no more."""
_BITS = 21
"""Of a token id in a key of LEAST_MATCH tokens: vocabularies are smaller than 2**21."""
_MASK = (1 << _BITS * LEAST_MATCH) - 1


class SuffixIndex:
    """Where each run of LEAST_MATCH tokens last ended, in a sequence that grows."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        self._count = 0
        """Tokens whose runs are known."""
        self._key = 0
        """Of the last tokens among them."""

    def extend(self, tokens: Sequence[int]) -> int | None:
        """Learns the tokens that have been added. Returns where the last run ended before; None: nowhere."""
        ends, key, count = self._ends, self._key, self._count
        if len(tokens) - count > 64:
            key, count = self._learn_many(tokens, count)
        found = None
        for end in range(count, len(tokens)):
            key = (key << _BITS | tokens[end]) & _MASK
            if end >= LEAST_MATCH - 1:
                found = ends.get(key)
                ends[key] = end
        self._key, self._count = key, len(tokens)
        return found

    def _learn_many(self, tokens: Sequence[int], first: int) -> tuple[int, int]:
        """Learns all but the last token; returns key and count."""
        begin = max(0, first - LEAST_MATCH + 1)
        known = np.array(tokens[begin:-1], np.int64)
        keys = known[: len(known) - LEAST_MATCH + 1].copy()
        for offset in range(1, LEAST_MATCH):
            keys = keys << _BITS | known[offset : len(keys) + offset]
        last = begin + LEAST_MATCH - 1
        self._ends.update(zip(keys.tolist(), range(last, last + len(keys)), strict=True))
        return int(keys[-1]), len(tokens) - 1


class SuffixDrafter(Drafter):
    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        index, tokens = sequence.drafting, sequence.tokens
        if not isinstance(index, SuffixIndex):
            index = sequence.drafting = SuffixIndex()
        end = index.extend(tokens)
        if end is None:
            return ()
        last, matched = len(tokens) - 1, LEAST_MATCH
        while matched < min(LONGEST_MATCH, end + 1) and tokens[end - matched] == tokens[last - matched]:
            matched += 1
        drafts: list[int] = []
        # What follows may run into the end: then the text repeats itself, and its drafts follow.
        for at in range(end + 1, end + 1 + min(most, matched)):
            drafts.append(tokens[at] if at <= last else drafts[at - last - 1])
        return drafts
