"""What the engine knows of a grammar library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
"""A set of token ids: bit t % 32 of word t // 32 stands for token t."""
GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as a client gives it: baton.v1.Grammar as plain data. Its size has been checked."""

    kind: GrammarKind
    text: str = ""
    """The grammar's text, for kinds json_schema, regex and lark."""
    choices: tuple[str, ...] = ()
    """The choices, for kind choice."""


class GrammarError(Exception):
    """A grammar cannot be compiled, or an output cannot be followed through it; says why in one line."""


class GrammarBusy(GrammarError):
    """Too many others are to be compiled: asking again later makes sense."""


class Matcher(Protocol):
    """Follows one output through a grammar. Used by one thread at a time."""

    def accept(self, tokens: Sequence[int]) -> None:
        """The output goes on with these tokens, none of them its end. Raises GrammarError if it cannot."""
        ...

    def fill(self, words: Words) -> None:
        """Writes which tokens may come next; at least one. A pure function of the accepted tokens. Raises
        GrammarError if none may, or if the library gives up."""
        ...

    @classmethod
    def fill_all(
        cls, matchers: Sequence[Self], tokens: Sequence[Sequence[int]], words: Words
    ) -> dict[int, GrammarError]:
        """Each of several different matchers accepts its tokens, and fills its row of `words` [matchers,
        words]. Yields why rows could not be filled; these hold anything."""
        errors = {}
        for row, (matcher, row_tokens) in enumerate(zip(matchers, tokens, strict=True)):
            try:
                matcher.accept(row_tokens)
                matcher.fill(words[row])
            except GrammarError as error:
                errors[row] = error
        return errors


class CompiledGrammar(Protocol):
    """A compiled grammar. Thread-safe."""

    def matcher(self) -> Matcher:
        """For an output that has no token yet."""
        ...


class Backend(Protocol):
    """A grammar library with a model's vocabulary. Thread-safe."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Blocks. Raises GrammarError."""
        ...
