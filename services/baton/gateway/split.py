"""Whether a request's prompt is computed on a prefill node or on the decode node."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.cost import StepCost
from baton.gateway import expected
from baton.gateway.figures import NodeFigures
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.sent import Sent
from baton.handoff.pull_cost import PullCost
from baton.rpc.errors import invalid
from baton.v1 import decode_pb2, node_pb2

MODES = ("auto", "always", "never")
ALWAYS, NEVER = 0, 2**32 - 1
"""As limits of what a decode node computes itself."""


@dataclass(slots=True)
class _Costs:
    """What a node has last said of its costs."""

    step: StepCost
    step_tokens: int
    pull: PullCost


@dataclass(slots=True)
class _Decision:
    at: float
    local: expected.Expected
    split: expected.Expected


class Split:
    """Decides, and keeps count of what came of it. mode: one of MODES. Raises BatonError for another one.

    Nothing depends on a decision but time: the decode node computes a prompt that no prefill node takes.
    """

    def __init__(
        self, mode: str, metrics: GatewayMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if mode not in MODES:
            raise invalid("split", f"--split {mode!r} is not known; use {', '.join(MODES)}")
        self.mode = mode
        self.sent = Sent()
        self._metrics = metrics
        self._clock = clock
        self._costs: dict[str, _Costs] = {}
        self._decisions: dict[int, _Decision] = {}

    def heard(self, address: str, load: node_pb2.Load | None) -> None:
        """A node has said what it has to do and what that costs it; None: it does not answer."""
        if load is None:
            self.sent.silent(address)
            self._costs.pop(address, None)
            return
        self.sent.reported(address, load.queued_tokens, load.running, load.keys)
        if load.HasField("step_cost"):
            said, pull = load.step_cost, load.pull_cost
            cost = StepCost(said.fixed, said.row, said.key, said.token, said.pair)
            self._costs[address] = _Costs(cost, load.step_tokens, PullCost(pull.fixed, pull.token))

    def decide(
        self,
        number: int,
        decode: NodeFigures,
        prefill: NodeFigures | None,
        tokens: int,
        hand_off: bool | None = None,
    ) -> int | None:
        """For DecodeStart.local_prefill_tokens; None: as the decode node sees fit. Called for each attempt.

        prefill: the node that would compute the prompt; None: there is none. tokens: of the prompt, and of
        what follows it that is to be computed too. hand_off: the client's word.
        """
        self.forget(number)
        if prefill is None:
            self.sent.begin(number, decode.address, decode.address, tokens - decode.cached, tokens)
            return None
        mode = self.mode if hand_off is None else "always" if hand_off else "never"
        limit = {"always": ALWAYS, "never": NEVER}.get(mode)
        if decode.cost is not None and prefill.cost is not None:
            self._decisions[number] = _Decision(
                self._clock(), expected.local(tokens, decode), expected.split(tokens, decode, prefill)
            )
            if limit is None:
                limit = expected.local_limit(tokens, decode, prefill)
        stays = limit is not None and tokens - decode.cached <= limit
        where = decode if stays else prefill
        self.sent.begin(number, decode.address, where.address, max(0, tokens - where.cached), tokens)
        self._metrics.decisions.labels("local" if stays else "split").inc()
        return limit

    def computed(self, number: int) -> None:
        """The prompt has been."""
        self.sent.computed(number)

    def forget(self, number: int) -> None:
        """The request is to go elsewhere, or has ended without its last word."""
        self.sent.end(number)
        self._decisions.pop(number, None)

    def ended(self, number: int, stats: decode_pb2.RequestStats, first: float) -> None:
        """It has finished; `first`: when its first token had come, on the clock."""
        decision = self._decisions.get(number)
        if decision is not None and not stats.retractions and not stats.handoff_retries:
            way = "split" if stats.prefill_address else "local"
            reckoned = decision.split if stats.prefill_address else decision.local
            pairs = {
                "first_token": (first - decision.at, reckoned.first),
                "end": (self._clock() - decision.at, reckoned.end(stats.output_tokens)),
            }
            for what, (seconds, thought) in pairs.items():
                self._metrics.expected.labels(way, what).observe(seconds / max(thought, 1e-9))
        self.forget(number)

    def figures(self, address: str) -> NodeFigures:
        """All that is known of a node but its cached prefixes."""
        queued, rows, keys = self.sent.load(address)
        costs = self._costs.get(address)
        if costs is None:
            return NodeFigures(address, queued_tokens=queued, rows=rows, keys=keys)
        return NodeFigures(
            address,
            queued_tokens=queued,
            rows=rows,
            keys=keys,
            cost=costs.step,
            step_tokens=costs.step_tokens,
            pull=costs.pull,
        )
