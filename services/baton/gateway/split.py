"""Whether a request's prompt is computed on a prefill node or on the decode node. Pure but for its metrics.

Nothing but time depends on it: a decode node computes a prompt that no prefill node takes in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.gateway import expected
from baton.gateway.excess import Excess
from baton.gateway.figures import NodeFigures
from baton.gateway.metrics import GatewayMetrics
from baton.rpc.errors import invalid
from baton.v1 import decode_pb2

MODES = ("auto", "always", "never")
ALWAYS, NEVER = 0, 2**32 - 1
"""As limits of what a decode node computes itself."""


@dataclass(frozen=True, slots=True)
class Decision:
    limit: int | None
    """For DecodeStart.local_prefill_tokens; None: as the decode node sees fit."""
    local: bool
    """What that is taken to come to: the decode node computes the prompt."""
    ways: dict[str, expected.Expected]
    """What was reckoned for "split" and "local", without what experience adds; empty where nothing was."""


class Split:
    def __init__(
        self, mode: str, metrics: GatewayMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """mode: one of MODES. Raises BatonError for another one."""
        if mode not in MODES:
            raise invalid("split", f"--split {mode!r} is not known; use {', '.join(MODES)}")
        self.mode = mode
        self._metrics = metrics
        self._clock = clock
        self._excess = {"split": Excess(), "local": Excess()}
        """Of first tokens."""

    def decide(
        self, decode: NodeFigures, prefill: NodeFigures | None, tokens: int, hand_off: bool | None = None
    ) -> Decision:
        """prefill: the node that would compute the prompt of so many tokens; None: there is none. hand_off:
        the client's word."""
        if prefill is None:
            return Decision(None, local=True, ways={})
        mode = self.mode if hand_off is None else "always" if hand_off else "never"
        limit = {"always": ALWAYS, "never": NEVER}.get(mode)
        ways: dict[str, expected.Expected] = {}
        if decode.cost is not None and prefill.cost is not None:
            ways = {
                "split": expected.split(tokens, decode, prefill),
                "local": expected.local(tokens, decode),
            }
            if limit is None:
                now = self._clock()
                more = self._excess["split"].seconds(now) - self._excess["local"].seconds(now)
                limit = expected.local_limit(tokens, decode, prefill, more)
        # Where nothing is known the decode node hands off all but very short prompts.
        local = limit is not None and tokens - decode.cached <= limit
        self._metrics.decisions.labels("local" if local else "split").inc()
        return Decision(limit, local, ways)

    def ended(self, decision: Decision, stats: decode_pb2.RequestStats, first: float, end: float) -> None:
        """The request has finished at its first attempt, in so many seconds from its sending."""
        way = "split" if stats.prefill_address else "local"
        thought = decision.ways.get(way)
        if thought is None or stats.retractions or stats.handoff_retries:
            return
        self._excess[way].add(self._clock(), first, thought.first)
        pairs = {"first_token": (first, thought.first), "end": (end, thought.end(stats.output_tokens))}
        for until, (seconds, reckoned) in pairs.items():
            self._metrics.expected.labels(way, until).observe(seconds / max(reckoned, 1e-9))
