"""A grammar over the simulated model's tokens: which may come next depends on all tokens before."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from baton.grammar.base import GrammarError, GrammarSpec, Matcher, Words

SPEC = GrammarSpec("regex", "simulated")


class SimGrammar:
    """Implements grammar.base.Grammar."""

    def matcher(self) -> SimMatcher:
        return SimMatcher()


class SimMatcher(Matcher):
    """Forbids a third of all tokens, another third after each token."""

    def __init__(self) -> None:
        self._state = 0

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self._allows(token):
                raise GrammarError(f"token {token} does not fit")
            self._state = zlib.crc32(array("I", [token]).tobytes(), self._state)

    def fill(self, words: Words) -> None:
        raise NotImplementedError("sim.model asks for one token")

    def choose(self, token: int) -> int:
        """The token, or a neighbour that is allowed; accepts it."""
        if not self._allows(token):
            token = token - 1 if token else 1
        self.accept([token])
        return token

    def _allows(self, token: int) -> bool:
        return (token + self._state) % 3 != 0
