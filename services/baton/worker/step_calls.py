"""Calls into the step thread of whichever node has the engine now."""

from __future__ import annotations

import threading
from collections.abc import Callable


class StepThreadCalls:
    """Has functions called in the step thread, in order, by any thread. What threads of the engine report,
    such as the end of a copy, must reach the step thread also while the worker changes its role."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call: Callable[[Callable[[], None]], None] | None = None

    def move_to(self, call: Callable[[Callable[[], None]], None]) -> None:
        """`call`: of the node that has the engine from now on. Calls made before have been passed to the
        former node's, which are made at the latest by StepLoop.finish_calls."""
        with self._lock:
            self._call = call

    def __call__(self, function: Callable[[], None]) -> None:
        with self._lock:
            assert self._call is not None, "no node has the engine yet"
            self._call(function)
