"""A pull that the core has started, until its end is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from baton.handoff.messages import StartPull
from baton.rpc.logs import get_logger
from baton.transport.base import Receiver, TransportError

_log = get_logger()


class Pulling:
    def __init__(self, effect: StartPull, call: Callable[[Callable[[Any, float], None]], None]) -> None:
        """`call`: StepLoop.call of the core's loop."""
        self.seconds: float | None = None
        """Duration of the copy; None until it is complete."""
        self._effect = effect
        self._call = call
        self._told = self._stopped = False
        self._task: asyncio.Task[Any] | None = None

    def stop(self) -> None:
        """Stops the pull; if it still waits for its step, at once."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()

    async def run(self, receiver: Receiver | None) -> None:
        """Reports the end of the copy in every case: the destination pages are pinned until then."""
        effect = self._effect
        error = "the pull was interrupted"
        self._task = asyncio.current_task()
        try:
            if receiver is None:
                error = f"{effect.address} is not connected"
            elif not self._stopped:
                peer = receiver
                await peer.pull(effect.pairs, effect.step, lambda seconds: self._copied(peer, seconds))
        except TransportError as failure:
            error = str(failure)
        except Exception as failure:
            _log.exception("pull failed", address=effect.address)
            error = f"{type(failure).__name__}: {failure}"
        finally:
            if not self._told:
                self._tell(error, None)

    def _copied(self, receiver: Receiver, seconds: float) -> None:
        generations = receiver.generations([source for source, _ in self._effect.pairs])
        self.seconds = seconds
        self._tell(None, generations)

    def _tell(self, error: str | None, generations: list[int] | None) -> None:
        self._told = True
        number = self._effect.pull
        self._call(lambda core, now: core.handoffs.pull_ended(number, error, generations, now))
