"""Gathers what one turn of the event loop has to send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Soon:
    """Runs `work` once, behind what the event loop is doing now, however often it is asked to meanwhile."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._asked = False

    def __call__(self) -> None:
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._asked = False
        self._work()
