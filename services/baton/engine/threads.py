"""How many CPU threads a step is computed with.

A step of a few tokens reads every weight and computes little: memory bounds it, and on a machine whose
memory one core saturates, further threads only add waiting for each other, the more the busier the machine
is. So the number for such steps is measured at start, on the model itself; steps of many tokens use all
threads.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch

from baton.engine.plan import PlanRow, SlotInit, StepPlan, StepResult
from baton.engine.runner import Runner
from baton.engine.sampling import SamplingParams

SMALL_STEP_TOKENS = 4
"""Steps of at most so many tokens use the measured number."""
GAIN = 0.95
"""More threads are taken only where they shorten the step to this part."""
WARM_UP, TIMED = 3, 9
BUDGET_SECONDS = 2.0


class TunedRunner:
    """Runs another runner's steps with the number of threads that suits their size."""

    def __init__(self, runner: Runner[Any]) -> None:
        """Measures at once, with writes to page 0: nothing may be in the pool yet."""
        self.max_slots = runner.max_slots
        self.vocab_size = runner.vocab_size
        self._runner = runner
        self.threads = torch.get_num_threads()
        self.small_step_threads = self._measure()
        torch.set_num_threads(self.threads)

    def launch(self, plan: StepPlan) -> Any:
        small = plan.num_tokens <= SMALL_STEP_TOKENS
        torch.set_num_threads(self.small_step_threads if small else self.threads)
        return self._runner.launch(plan)

    def read(self, flight: Any) -> StepResult:
        return self._runner.read(flight)

    def _measure(self) -> int:
        """The fewest threads that no larger number beats by much: 1, 2, 4, ... and the most are tried.

        One core is left for what goes on between tokens (this process's event loop, gateway, tokenizer):
        nothing disturbs the measurement here, but later a thread that waits for such a core delays them all.
        """
        most = min(self.threads, max(1, (os.cpu_count() or 1) - 1))
        candidates = [1 << power for power in range(most.bit_length()) if 1 << power < most]
        best, count = float("inf"), 1
        deadline = time.monotonic() + BUDGET_SECONDS
        for threads in [*candidates, most]:
            seconds = self._seconds(threads)
            if seconds < best * GAIN:
                best, count = seconds, threads
            if time.monotonic() > deadline:
                break
        return count

    def _seconds(self, threads: int) -> float:
        """Median time of a step of one row."""
        torch.set_num_threads(threads)
        init = SlotInit(0, SamplingParams(temperature=0.0), 0, (), (), last_token=0)
        row = PlanRow(slot=0, tokens=None, start=0, pages=(0,), sample=(0,))
        times = []
        for number in range(WARM_UP + TIMED):
            started = time.perf_counter()
            self._runner.read(self._runner.launch(StepPlan(number, (row,), (init,))))
            times.append(time.perf_counter() - started)
        return statistics.median(times[WARM_UP:])
