"""A runner that takes the time of measured steps and computes nothing. For sizing, and for measuring
everything else.

It makes a deployment whose forward passes cost what they cost on another machine: everything around them
(processes, queues, pages, pulls) is real. Its tokens mean nothing; they are a function of seed and position,
so that a request which goes on elsewhere goes on with the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.engine.plan import Logprobs, PlanRow, RowResult, StepPlan, StepResult, step_load
from baton.engine.sampler_ops import row_keys
from baton.step_cost import StepCost

_ONE_TOKEN = RowResult((0,))
"""The result of most rows with a vocabulary of one; nobody changes it."""


@dataclass(slots=True)
class TimedLaunchedStep:
    plan: StepPlan
    ends: float


class TimedRunner:
    """Implements `engine.plan.Runner`: a device that executes one step after the other."""

    def __init__(
        self,
        cost: StepCost,
        *,
        max_slots: int,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.max_slots = max_slots
        self.vocab_size = vocab_size
        self._cost = cost
        self._clock = clock
        self._sleep = sleep
        self._seeds: dict[int, int] = {}
        self._logprobs: set[int] = set()
        """Slots that want log-probabilities."""
        self._free = 0.0
        """When the device will have executed all launched steps."""
        self._busy = 0.0
        """Seconds of all launched steps."""

    def launch(self, plan: StepPlan) -> TimedLaunchedStep:
        for init in plan.inits:
            self._seeds[init.slot] = init.seed
            has_logprobs = init.params.logprobs is not None
            (self._logprobs.add if has_logprobs else self._logprobs.discard)(init.slot)
        seconds = self._cost.seconds(step_load(plan.rows)) if plan.rows else 0.0
        self._busy += seconds
        self._free = max(self._clock(), self._free) + seconds
        return TimedLaunchedStep(plan, self._free)

    @property
    def busy(self) -> float:
        """Seconds in which the device has computed until now."""
        return self._busy - max(0.0, self._free - self._clock())

    def done(self, launched: TimedLaunchedStep) -> bool:
        return self._clock() >= launched.ends

    def read(self, launched: TimedLaunchedStep) -> StepResult:
        # Drawing tokens takes part of the step's time rather than time of its own.
        result = StepResult(launched.plan.number, tuple(self._result(row) for row in launched.plan.rows))
        left = launched.ends - self._clock()
        if left > 0:
            self._sleep(left)
        return result

    def _result(self, row: PlanRow) -> RowResult:
        if self.vocab_size == 1:
            return _ONE_TOKEN if len(row.sample) == 1 else RowResult((0,) * len(row.sample))
        # None of its drafts is right.
        position = row.start + (1 if row.tokens is None else row.count)
        seeds = np.array([self._seeds[slot] for slot in row.sample], dtype=np.uint64)
        keys = row_keys(seeds, np.full(len(seeds), position, dtype=np.uint64)).view(np.uint64)
        tokens = tuple((keys % np.uint64(self.vocab_size)).tolist())
        logprobs = tuple(
            Logprobs(token, 0.0) if slot in self._logprobs else None
            for slot, token in zip(row.sample, tokens, strict=True)
        )
        prompt = tuple(Logprobs(token, 0.0) for token in row.prompt_logprobs or ())
        return RowResult(tokens, prompt, logprobs=logprobs)
