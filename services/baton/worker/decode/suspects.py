"""Takes turns with requests that may have ended a node without a word."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from baton.engine.request import EngineRequest
from baton.worker.decode.types import DecodeRequest, Turn

PROVEN_TOKENS = 8
"""A request that has received this many tokens since a step with it failed is not the cause. More than 1: a
prompt's last chunk yields one, and the decode step may be the one that fails."""


@dataclass(slots=True, eq=False)
class SuspectTurns:
    """One suspect is computed at a time, from its caller's `begin` to its first token: if the node is lost
    meanwhile, the caller knows which one it was. `tell`: says to a caller whose turn it is."""

    tell: Callable[[Hashable, Turn], None]
    _current: DecodeRequest | None = None

    def ask(self, state: DecodeRequest) -> None:
        """There is room for the suspect now."""
        if self._current is None:
            self._current = state
            self.tell(state.key.caller, Turn(state.key.request, state.attempt))

    def begin(self, state: DecodeRequest | None) -> EngineRequest | None:
        """The caller has noted its turn. Returns what begins; None: the request has no turn, or has begun."""
        if state is None or state is not self._current or not state.request.held:
            return None
        state.request.held = False
        return state.request

    def token(self, state: DecodeRequest) -> None:
        """The request has one more."""
        if state.output_tokens == PROVEN_TOKENS:
            state.request.failed_steps = 0
        state.request.suspect = False
        self.ended(state)

    def ended(self, state: DecodeRequest) -> None:
        if state is self._current:
            self._current = None
