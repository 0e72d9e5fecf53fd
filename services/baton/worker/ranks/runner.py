"""Rank 0's runner: sends each plan to the followers, then runs it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from baton.engine.plan import Runner, StepPlan, StepResult
from baton.worker.ranks.channel import ChannelError, CollectiveError
from baton.worker.ranks.plan_codec import PlanEncoder


class RanksLost(BaseException):
    """The ranks do not compute the same steps any more: the worker must end. Not an Exception, because a step
    that fails on one rank alone is more than a failed step."""

    def __init__(self, message: str, by_step: bool) -> None:
        """`by_step`: what was computed may be the cause."""
        super().__init__(message)
        self.by_step = by_step


class PlanChannel(Protocol):
    """To a follower: channel.Channel, or a simulated one."""

    def send_plan(self, plan: bytes, threads: int) -> None: ...


PLAN_SECONDS = (25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 0.1)
"""Bounds of PlanTimes."""


class PlanTimes:
    """How long rank 0 took to give plans to all followers: a histogram."""

    def __init__(self) -> None:
        self.counts = [0] * (len(PLAN_SECONDS) + 1)
        """Up to each bound of PLAN_SECONDS, and above the last."""
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(PLAN_SECONDS, seconds)] += 1
        self.seconds += seconds


class RankedRunner:
    """A `Runner`. `launch` and `read` raise RanksLost."""

    def __init__(
        self, runner: Runner[Any], followers: Sequence[PlanChannel], threads: Callable[[], int]
    ) -> None:
        """`threads`: with which the next step is to be computed."""
        self.max_slots = runner.max_slots
        self.vocab_size = runner.vocab_size
        self._runner = runner
        self._followers = followers
        self._threads = threads
        self._encoder = PlanEncoder()
        self.plan_times = PlanTimes()

    @property
    def mask_stats(self) -> Any:
        return self._runner.mask_stats  # type: ignore[attr-defined]  # where there is none, here neither

    @property
    def images(self) -> Any:
        return getattr(self._runner, "images", None)

    def launch(self, plan: StepPlan) -> Any:
        try:
            if self.images is not None:
                self.images.encode_ahead(plan.rows)
            began = time.perf_counter()
            # A plan that was not sent must not be remembered as if it were: also this ends the ranks.
            message, threads = self._encoder.encode(plan), self._threads()
            for follower in self._followers:
                follower.send_plan(message, threads)
            self.plan_times.add(time.perf_counter() - began)
            return self._runner.launch(plan)
        except (ChannelError, CollectiveError) as error:
            raise RanksLost(f"another rank is lost: {error}", by_step=False) from error
        except Exception as error:
            raise RanksLost(f"a step failed on rank 0: {error}", by_step=True) from error

    def done(self, launched: Any) -> bool:
        return self._runner.done(launched)

    def read(self, launched: Any) -> StepResult:
        try:
            return self._runner.read(launched)
        except CollectiveError as error:
            raise RanksLost(f"another rank is lost: {error}", by_step=False) from error
        except Exception as error:
            raise RanksLost(f"a step failed on rank 0: {error}", by_step=True) from error
