"""Chooses the number of CPU threads for a step.

A step of a few tokens reads every weight and computes little: memory bounds it, and on a machine whose
memory one core saturates, further threads only add waiting for each other, the more the busier the machine
is. So the number for such steps is measured at start, on the model itself, for one row and for many; steps of
more tokens use all threads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from baton import cgroups
from baton.engine.grammar_masks import MaskStats
from baton.engine.images import ImageEncoder
from baton.engine.plan import PlanRow, Runner, SlotInit, StepPlan, StepResult
from baton.engine.sampling_params import SamplingParams

SIZES = ((4, 1), (32, 16))
"""(tokens, rows): steps of at most this many tokens use the number measured with this many rows."""
GAIN = 0.95
"""More threads are used only if they shorten the step to this fraction."""
WARM_UP, TIMED = 3, 9
BUDGET_SECONDS = 2.0


class TunedRunner:
    """Runs another runner's steps with the number of threads for their size."""

    def __init__(
        self, runner: Runner[Any], clock: Callable[[], float] = time.perf_counter, *, groups: int = 1
    ) -> None:
        """Measures at once, with writes to page 0, so the pool must be empty. `clock` returns seconds;
        `groups`: KV groups."""
        self.max_slots = runner.max_slots
        self.vocab_size = runner.vocab_size
        self._runner = runner
        self._clock = clock
        self._groups = groups
        self.threads = torch.get_num_threads()
        self.small_steps = {tokens: self._measure(min(rows, self.max_slots)) for tokens, rows in SIZES}
        """Most tokens of a step, ascending -> threads."""
        torch.set_num_threads(self.threads)

    @property
    def mask_stats(self) -> MaskStats:
        return getattr(self._runner, "mask_stats", MaskStats())

    @property
    def images(self) -> ImageEncoder | None:
        """See ModelRunner."""
        return getattr(self._runner, "images", None)

    def launch(self, plan: StepPlan) -> Any:
        tokens = plan.num_tokens
        fitting = (count for most, count in self.small_steps.items() if tokens <= most)
        torch.set_num_threads(next(fitting, self.threads))
        return self._runner.launch(plan)

    def done(self, launched: Any) -> bool:
        return self._runner.done(launched)

    def read(self, launched: Any) -> StepResult:
        return self._runner.read(launched)

    def _measure(self, rows: int) -> int:
        """The fewest threads that no larger number beats by much: 1, 2, 4, ... and the most are tried.

        One core is left for other work (this process's event loop, gateway, tokenizer). Nothing disturbs the
        measurement here, but later one thread that waits for a busy core delays them all.
        """
        most = min(self.threads, max(1, cgroups.cores() - 1))
        candidates = [1 << power for power in range(most.bit_length()) if 1 << power < most]
        if not candidates:
            return most
        best, count = float("inf"), 1
        deadline = self._clock() + BUDGET_SECONDS
        for threads in [*candidates, most]:
            seconds = self._seconds(threads, rows)
            if seconds < best * GAIN:
                best, count = seconds, threads
            if self._clock() > deadline:
                break
        return count

    def _seconds(self, threads: int, rows: int) -> float:
        """Median time of a decode step of `rows` rows."""
        torch.set_num_threads(threads)
        params = SamplingParams(temperature=0.0)
        inits = tuple(SlotInit(slot, params, 0, (), (), last_token=0) for slot in range(rows))
        tables = ((0,),) * self._groups
        batch = tuple(PlanRow(slot, None, 0, tables, sample=(slot,)) for slot in range(rows))
        times = []
        for number in range(WARM_UP + TIMED):
            started = self._clock()
            self._runner.read(self._runner.launch(StepPlan(number, batch, inits)))
            times.append(self._clock() - started)
        return statistics.median(times[WARM_UP:])
