"""The interface of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.engine.request import Sequence as TokenSequence


class Drafter(Protocol):
    """Guesses how sequences go on. Used by the step thread; may keep state in `sequence.drafting`, which ends
    with the sequence."""

    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        """The tokens that are likely to follow `sequence.tokens`, `most` at most; empty: no guess. Must not
        block: a step waits for it."""
        ...
