"""What a worker's step thread does while there is nothing to do: it measures steps again."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.engine.idle_steps import IdleSteps
from baton.rpc.logs import get_logger
from baton.step_cost import CostCalibration
from baton.worker.engine import Engine, log_cost, step_limits

_log = get_logger()


class SpareSteps:
    """None on a GPU: other processes do not slow its steps at the start, and a node that shares it would
    wait."""

    def __init__(self, engine: Engine) -> None:
        self._steps: IdleSteps | None = None
        if engine.device.type == "cpu":
            self._steps = IdleSteps(engine.runner, step_limits(engine), engine.cache, time.monotonic)

    def turn(self, calibration: CostCalibration, interrupted: Callable[[], bool]) -> None:
        """See IdleSteps.turn."""
        if self._steps is None:
            return
        try:
            if self._steps.turn(calibration, interrupted):
                log_cost("steps measured again", calibration.cost)
        except Exception as error:  # if the device is broken, the next request's step fails too
            self._steps = None
            _log.warning("steps are not measured again", exc_info=error)
