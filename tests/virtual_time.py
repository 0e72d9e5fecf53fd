"""Time that passes only when an event loop has nothing to do: what is due at 0.3 s is late on no machine.

For tests of coroutines and timers alone: what waits for a thread, a process or a socket finds that all time
has passed as soon as a timer is pending.
"""

from __future__ import annotations

import asyncio
from types import ModuleType, SimpleNamespace

import pytest


class Skipping:
    """A loop's selector that does not wait, and says that it has."""

    def __init__(self, selector, now: float) -> None:
        self.now = now
        self._selector = selector

    def __getattr__(self, name: str):
        return getattr(self._selector, name)

    def select(self, timeout: float | None = None):
        if timeout is None:
            return self._selector.select()
        self.now += timeout
        return self._selector.select(0)


def skip_waits(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """From now on, in the running loop. modules: their `time.monotonic` tells the loop's time."""
    loop = asyncio.get_running_loop()
    selector = Skipping(loop._selector, loop.time())  # type: ignore[attr-defined]
    monkeypatch.setattr(loop, "_selector", selector)
    monkeypatch.setattr(loop, "time", lambda: selector.now)
    for module in modules:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
