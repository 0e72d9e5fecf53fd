"""Steps that a node runs while it has nothing to do, to learn what steps cost.

A node measures its steps at its start, when others load on the same machine: all seem slow. Steps in
operation correct the figures, but only those of their kind: a decode node whose prompts count as slow gets
none, and would never find out. These steps use free pages and slots, and correct them as any others do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.engine.plan import Runner, SlotInit, StepPlan, step_load
from baton.engine.sampling_params import SamplingParams
from baton.engine.warmup import StepLimits
from baton.kvcache import KvCacheManager, OutOfPages
from baton.step_cost import CostCalibration, StepLoad, chunk_pairs

FIRST_SECONDS = 5.0
"""After the start: the other processes of a deployment are ready by then."""
AGAIN_SECONDS = 1200.0
"""Two seconds each time: of two workers of two threads under 1 % of a core."""
STEPS = 200
"""Each time, in about two seconds altogether: decode rows and prompt chunks in turn."""
TURN_SECONDS = 0.1
"""At most; a turn ends early when something comes."""
STEP_SECONDS = 0.02
"""A request that comes meanwhile waits for about so long. Chunks are no longer, if they can be as short."""
CHUNKS = (256, 128, 64, 32)
"""Tokens."""


class IdleSteps:
    """`turn` is called in the step thread, with no step in flight and no request in the node."""

    def __init__(
        self, runner: Runner[Any], limits: StepLimits, cache: KvCacheManager, clock: Callable[[], float]
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._cache = cache
        self._clock = clock
        self._left = STEPS
        self._due = clock() + FIRST_SECONDS

    def turn(self, calibration: CostCalibration, interrupted: Callable[[], bool]) -> bool:
        """Runs steps if it is time to. wanted: whether the step thread has something else to do. Returns
        whether the last of them has been run, for now."""
        began = now = self._clock()
        warm = False
        while self._due <= now < began + TURN_SECONDS and not interrupted():
            try:
                self._run(calibration if warm else None)
            except OutOfPages:
                return False
            self._left -= warm
            warm = True  # after a pause the first step takes longer
            before, now = now, self._clock()
            if not self._left or now - before > TURN_SECONDS / 2:  # so slow a node would be kept busy by them
                self._left, self._due = STEPS, now + AGAIN_SECONDS
                return True
        return False

    def _run(self, calibration: CostCalibration | None) -> None:
        """Raises OutOfPages."""
        size = self._limits.page_size
        tokens = self._tokens(calibration) if self._left % 2 else 0
        with self._cache.borrowed(-(-max(1, tokens) // size)) as taken:
            pages = tuple(taken)
            chunk = (0,) * tokens if tokens else None
            row = self._limits.row(0, chunk, 0, pages)
            plan = StepPlan(
                1, (row,), (SlotInit(0, SamplingParams(temperature=0.0), 0, (), (), last_token=0),)
            )
            began = self._clock()
            self._runner.read(self._runner.launch(plan))
            seconds = self._clock() - began
        if calibration is not None and seconds > 0:
            calibration.add(step_load((row,)), seconds)

    def _tokens(self, calibration: CostCalibration | None) -> int:
        """Number of tokens of the next chunk."""
        most = min(self._limits.token_budget, self._limits.context_length - 1)
        for tokens in CHUNKS:
            load = StepLoad(prefill_tokens=tokens, attention_pairs=chunk_pairs(0, tokens))
            if tokens <= most and calibration is not None and calibration.cost.seconds(load) <= STEP_SECONDS:
                return tokens
        return min(CHUNKS[-1], most)
