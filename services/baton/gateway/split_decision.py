"""Predicts the time of a request with its prompt computed on a prefill node or on the decode node. Pure.

Only the differences between the two choices count: waiting for rows and steps after the second token are the
same for both. All times are in seconds. D is the decode node with its R rows, P the prefill node.

Split. The prompt waits at P for the prompts there and is computed. D's step thread receives the first token
after the rest of a running step, half a step on average. (With overlap it receives it at once; the prediction
bias corrects this.) Then the pages of the last step's tokens move; all earlier ones have moved
meanwhile. Half a step later, on average, the request joins the batch.

Local. The prompt waits at D for the prompts there and is computed in steps that also hold D's rows, and take
their time as well. It delays others: each of the R rows gets its next token later by the whole time of the
prompt. A prompt at P delays none of those there, because they come first. The wait of later requests is left
out for both choices.

So the choice is the one that adds least to the sum of all requests' times. An idle D computes prompts itself,
a busy one hands them off. If P has fallen behind, D takes prompts whose delay of its rows is smaller than
their wait would be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.gateway.metrics import GatewayMetrics
from baton.gateway.node_load import NodeLoad
from baton.rpc.errors import invalid
from baton.step_cost import StepCost, StepLoad, chunk_pairs
from baton.v1 import decode_pb2

PRECISION = 16
"""Limits are exact to this many tokens; above its square, to this fraction."""


@dataclass(frozen=True, slots=True)
class Prediction:
    first: float
    """Seconds until the first token."""
    gap: float
    """From the first token until the second can be computed."""
    step: float
    """For each further token."""
    others: float
    """Delay of all other rows' tokens, summed."""

    @property
    def cost(self) -> float:
        """The figure by which the choices are compared."""
        return self.first + self.gap + self.others

    def end(self, tokens: int) -> float:
        """Seconds until the last of `tokens` >= 1 output tokens."""
        return self.first + (self.gap + self.step * (tokens - 1) if tokens > 1 else 0.0)


def predict_local(prompt: int, decode: NodeLoad) -> Prediction:
    """Predicts the prompt on the decode node. Raises ValueError if its step cost is not known."""
    cost = _cost(decode)
    uncached = max(1, prompt - decode.cached)
    compute = _chunk(cost, prompt, uncached)
    rows = _rows(cost, decode)
    room = max(1, decode.step_tokens - decode.running)
    steps = math.ceil((decode.queued_tokens + uncached) / room)
    first = steps * rows + cost.token * decode.queued_tokens + compute + decode.promotion
    return Prediction(first, gap=0.0, step=_next(cost, decode), others=decode.running * compute)


def predict_split(prompt: int, decode: NodeLoad, prefill: NodeLoad) -> Prediction:
    """Predicts the prompt on the prefill node. Raises ValueError if a step cost is not known."""
    cost, there = _cost(decode), _cost(prefill)
    uncached = max(1, prompt - prefill.cached)
    steps = math.ceil((prefill.queued_tokens + uncached) / max(1, prefill.step_tokens))
    computed = steps * there.fixed + there.token * prefill.queued_tokens + _chunk(there, prompt, uncached)
    step_wait = _rows(cost, decode) / 2 if decode.running else 0.0
    last = min(max(0, prompt - decode.cached), prefill.step_tokens or prompt)
    gap = decode.pull.seconds(last) + step_wait
    return Prediction(prefill.promotion + computed + step_wait, gap, step=_next(cost, decode), others=0.0)


def local_limit(prompt: int, decode: NodeLoad, prefill: NodeLoad, bias: float = 0.0) -> int:
    """The most tokens of this prompt that the decode node should compute itself, about, from 0 to
    `prompt`, however many turn out to be cached there. bias: prediction bias in seconds of first tokens of
    split requests, minus that of local ones. Raises ValueError if a step cost is not known."""
    most = predict_split(prompt, decode, prefill).cost + bias

    def worth(tokens: int) -> bool:
        return predict_local(prompt, replace(decode, cached=prompt - tokens)).cost <= most

    if worth(prompt):
        return prompt
    low, high = 0, prompt
    while high - low > max(PRECISION, low // PRECISION):
        middle = (low + high) // 2
        low, high = (middle, high) if worth(middle) else (low, middle)
    return low


def _cost(node: NodeLoad) -> StepCost:
    if node.cost is None:
        raise ValueError(f"what steps of {node.address} cost is not known")
    return node.cost


def _rows(cost: StepCost, decode: NodeLoad) -> float:
    """A step of the decode rows alone."""
    return cost.seconds(StepLoad(decode_sequences=decode.running, context_tokens=decode.context_tokens))


def _next(cost: StepCost, decode: NodeLoad) -> float:
    """A step of the decode rows and the request."""
    return cost.seconds(StepLoad(decode_sequences=decode.running + 1, context_tokens=decode.context_tokens))


def _chunk(cost: StepCost, prompt: int, uncached: int) -> float:
    """Time of the last `uncached` tokens of a prompt, without the fixed cost of steps."""
    return cost.token * uncached + cost.pair * chunk_pairs(prompt - uncached, uncached)


WEIGHT = 1 / 16
"""Weight of the newest value."""
HALF_LIFE = 30.0
"""Seconds. Without it, a bias learned in a bad moment might keep one choice from ever being taken again."""


class PredictionBias:
    """How much longer than predicted something has taken recently: messages between processes, thread
    wake-ups, the rest of a step. A moving average that decays without new values."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._at = 0.0

    def seconds(self, now: float) -> float:
        """Negative: shorter than predicted."""
        return self._mean * math.exp2(-max(0.0, now - self._at) / HALF_LIFE)

    def add(self, now: float, seconds: float, predicted: float) -> None:
        """Adds an actual and a predicted time. More than twice the prediction counts as twice: something
        else caused it."""
        difference = min(seconds - predicted, predicted)
        self._mean = (1 - WEIGHT) * self.seconds(now) + WEIGHT * difference
        self._at = now


MODES = ("auto", "always", "never")
ALWAYS, NEVER = 0, 2**32 - 1
"""Limits of what a decode node computes itself."""


@dataclass(frozen=True, slots=True)
class Decision:
    limit: int | None
    """For DecodeStart.local_prefill_tokens; None: the decode node decides."""
    local: bool
    """Predicted result: the decode node computes the prompt."""
    predictions: dict[str, Prediction]
    """Predictions for "split" and "local" without the bias; empty if there were none."""
    bias: dict[str, float] = field(default_factory=dict)
    """What was added to their first tokens, in seconds."""


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
        self._bias = {"split": PredictionBias(), "local": PredictionBias()}
        """Bias of the predicted time to the first token."""

    def decide(
        self, decode: NodeLoad, prefill: NodeLoad | None, tokens: int, hand_off: bool | None = None
    ) -> Decision:
        """prefill: the node that would compute the prompt; None: there is none. hand_off: the client's
        choice."""
        if prefill is None:
            return Decision(None, local=True, predictions={})
        mode = self.mode if hand_off is None else "always" if hand_off else "never"
        limit = {"always": ALWAYS, "never": NEVER}.get(mode)
        predictions: dict[str, Prediction] = {}
        bias: dict[str, float] = {}
        if decode.cost is not None and prefill.cost is not None:
            predictions = {
                "split": predict_split(tokens, decode, prefill),
                "local": predict_local(tokens, decode),
            }
            now = self._clock()
            bias = {way: each.seconds(now) for way, each in self._bias.items()}
            if limit is None:
                limit = local_limit(tokens, decode, prefill, bias["split"] - bias["local"])
        # Without predictions the decode node hands off all but very short prompts.
        local = limit is not None and tokens - decode.cached <= limit
        why = "client" if hand_off is not None else "mode" if mode != "auto" else "cost"
        self._metrics.decisions.labels(
            "local" if local else "split", why if limit is not None else "unknown"
        ).inc()
        return Decision(limit, local, predictions, bias)

    def ended(self, decision: Decision, stats: decode_pb2.RequestStats, first: float, end: float) -> None:
        """The request has finished at its first attempt; times are in seconds from its sending."""
        way = "split" if stats.prefill_address else "local"
        prediction = decision.predictions.get(way)
        if prediction is None or stats.retractions or stats.handoff_retries:
            return
        self._bias[way].add(self._clock(), first, prediction.first)
        # What was decided with; the bias of other prompts may exceed what this one was predicted to take.
        bias = max(decision.bias[way], -prediction.first / 2)
        expected_end = prediction.end(stats.output_tokens)
        pairs = {"first_token": (first, prediction.first + bias), "end": (end, expected_end + bias)}
        for until, (seconds, predicted) in pairs.items():
            self._metrics.expected.labels(way, until).observe(seconds / max(predicted, 1e-9))
