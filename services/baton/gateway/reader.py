"""A client that does not read: its request is not generated any more, and after a while fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.rpc.errors import BatonError, exhausted


class SlowReader:
    """Watches how much of one request's output its client has not taken.

    Above `limit` tokens the request is paused, at half of that it goes on. One that has been paused for
    `seconds` fails. What was under way when it was paused still comes: a little more than `limit` is kept.
    """

    def __init__(
        self,
        limit: int,
        seconds: float,
        pause: Callable[[bool], None],
        fail: Callable[[BatonError], None],
    ) -> None:
        self.paused = False
        self._limit = limit
        self._seconds = seconds
        self._pause = pause
        self._fail: Callable[[BatonError], None] | None = fail
        self._timer: asyncio.TimerHandle | None = None

    def look(self, unread: int) -> None:
        """`unread`: tokens that the client has not taken. Called when it has changed."""
        if not self.paused and unread > self._limit:
            self.paused = True
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)
            self._pause(True)
        elif self.paused and unread <= self._limit // 2:
            self.close()
            self._pause(False)

    def close(self) -> None:
        self.paused = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """The request has ended: nobody is told of anything any more."""
        self.close()
        self._fail = None

    def _expire(self) -> None:
        text = f"the client has not read for {self._seconds:g} s, with more than {self._limit} tokens waiting"
        if self._fail is not None:
            self._fail(exhausted(text, "SLOW_READER"))
