"""The drafter of simulated decode nodes: knows what the model says next, and is wrong now and then."""

from __future__ import annotations

import random
from collections.abc import Sequence

from baton.engine.draft.base import Drafter
from baton.engine.request import Sequence as TokenSequence
from baton.sim.model import Windows, reference, seen_tokens


class SimDrafter(Drafter):
    name = "sim"

    def __init__(self, rng: random.Random, windows: Windows, right: float) -> None:
        """`right`: the share of tokens that are drafted as they will be sampled."""
        self._rng, self._windows, self._right = rng, windows, right

    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        request, rng = sequence.request, self._rng
        known = sequence.drafting
        if not isinstance(known, tuple):
            params = request.params
            known = sequence.drafting = reference(
                seen_tokens(request.prompt),
                sequence.seed,
                params.max_tokens,
                penalized=params.penalized,
                windows=self._windows,
                constrained=request.grammar is not None,
            )
        done = sequence.num_read
        found = known[done : done + rng.randrange(most + 1)]
        drafts = [token if rng.random() < self._right else token ^ 1 for token in found]
        # As a head on a GPU: nobody can leave out what follows a stop token.
        unknown = not sequence.unread and rng.random() < 0.5
        return [-1 - token for token in drafts] if unknown else drafts
