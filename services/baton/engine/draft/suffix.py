"""Drafts what followed the last tokens when they occurred before in the sequence's own prompt and output, or
what followed the whole sequence in the prefix tree, where outputs of earlier requests are. The longer match
of the two goes first.

Prompt lookup (Saxena, github.com/apoorvumang/prompt-lookup-decoding, 2023). How far drafts are right is
learned by the length of the match, which SuffixDecoding (Oliaro et al., arXiv:2411.04975) chooses lengths by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.engine.draft.base import Drafter
from baton.engine.request import Sequence as TokenSequence
from baton.kvcache import KvCacheManager
from baton.kvcache.tree_walk import TreeWalk

LEAST_MATCH = 3
"""Tokens that must have occurred before."""
FIRST_MATCH = 4
"""LEAST_MATCH while no draft of the request has been right, but where the prompt goes on with several tokens.
Half of the matches of three tokens are wrong in a text that quotes nothing, which a short answer does not
make up for."""
LONGEST_MATCH = 32
"""Longer matches say no more."""
MOST_TOKENS = 8192
"""The last tokens of a sequence that are indexed: about 1 MiB."""
OF_TREE = 8
"""Sequence.draft_kind of what the tree has; those of the own text are below it, by the length of the
match."""
_BITS = 21
"""Bits of a token id in a key of LEAST_MATCH tokens: vocabularies are smaller than 2**21."""
_MASK = (1 << _BITS * LEAST_MATCH) - 1


class SuffixIndex:
    """Where each run of LEAST_MATCH tokens last ended, in a sequence that grows."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        self._count = 0
        """Tokens whose runs are known."""
        self._key = 0
        """Key of the last tokens among them."""
        self._put_off: tuple[npt.NDArray[np.int64], int] | None = None
        """Keys of runs that are not in `_ends` yet, and where the first of them ends."""

    def extend(self, tokens: Sequence[int]) -> int | None:
        """Learns the tokens that have been added. Returns where the last run ended before; None: nowhere."""
        ends = self._ends
        if self._put_off is not None:
            (keys, first), self._put_off = self._put_off, None
            ends.update(zip(keys.tolist(), range(first, first + len(keys)), strict=True))
        if len(ends) > 2 * MOST_TOKENS:
            ends.clear()
            self._count = 0
        key, count = self._key, self._count
        if len(tokens) - count > 64:
            return self._find_in_many(tokens, count)
        found = None
        for end in range(count, len(tokens)):
            key = (key << _BITS | tokens[end]) & _MASK
            if end >= LEAST_MATCH - 1:
                found = ends.get(key)
                ends[key] = end
        self._key, self._count = key, len(tokens)
        return found

    def _find_in_many(self, tokens: Sequence[int], first: int) -> int | None:
        """`extend`, which puts most of the work off until it is called again: the first step behind a prompt
        waits for it, while the device computes that step when the second is planned."""
        begin = max(0, first - LEAST_MATCH + 1, len(tokens) - MOST_TOKENS)
        known = np.array(tokens[begin:], np.int64)
        keys = known[: len(known) - LEAST_MATCH + 1].copy()
        for offset in range(1, LEAST_MATCH):
            keys = keys << _BITS | known[offset : len(keys) + offset]
        last, end = int(keys[-1]), begin + LEAST_MATCH - 1
        self._put_off = keys[:-1], end
        # All but the last token.
        self._key, self._count = int(keys[-2]), len(tokens) - 1
        found = np.flatnonzero(keys[:-1] == last)
        return end + int(found[-1]) if len(found) else self._ends.get(last)


@dataclass(slots=True)
class _Known:
    """What is kept of a sequence."""

    walk: TreeWalk | None
    index: SuffixIndex = field(default_factory=SuffixIndex)
    distance: int = 0
    """From the last tokens back to those that they matched last; 0: none yet."""


class SuffixDrafter(Drafter):
    name = "suffix"

    def __init__(self, cache: KvCacheManager | None = None) -> None:
        """`cache`: whose prefix tree tells how earlier sequences went on that began alike; None: none
        does."""
        self._cache = cache

    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        known, tokens = sequence.drafting, sequence.tokens
        if not isinstance(known, _Known):
            walk = self._cache.walk(sequence.request.namespace) if self._cache is not None else None
            known = sequence.drafting = _Known(walk)
        end, matched = known.index.extend(tokens), 0
        if end is not None:
            matched, followed = _matched(tokens, end, LEAST_MATCH), len(tokens) - 1 - known.distance
            # A text that has been followed so far is a longer match than a newer one that has only begun.
            if known.distance and (length := _matched(tokens, followed)) > matched:
                end, matched = followed, length
            known.distance = len(tokens) - 1 - end
        if known.walk is not None and sequence.num_read >= matched:
            found = known.walk.onward(tokens, most)
            if found:
                sequence.draft_kind = OF_TREE + min(sequence.num_read, 4) // 4
                return found
        request = sequence.request
        if end is None:
            return ()
        weak = matched < FIRST_MATCH and not request.accepted_drafts
        sequence.draft_kind = matched.bit_length()
        last = len(tokens) - 1
        drafts: list[int] = []
        # What follows may run into the end: then the text repeats itself, and its drafts follow.
        for at in range(end + 1, end + 1 + most):
            drafts.append(tokens[at] if at <= last else drafts[at - last - 1])
        if weak and (end >= len(request.prompt) or not request.params.stop_token_ids.isdisjoint(drafts)):
            return ()
        return drafts


def _matched(tokens: Sequence[int], end: int, matched: int = 0) -> int:
    """How many of the last tokens, LONGEST_MATCH at most, are those that end at index `end`; so many are
    known to be, `matched`."""
    last = len(tokens) - 1
    while matched < min(LONGEST_MATCH, end + 1) and tokens[end - matched] == tokens[last - matched]:
        matched += 1
    return matched
