"""Whether a decode node's step thread is alive: pure, the clock passed in."""

from __future__ import annotations


class Pulse:
    """One question is out at a time; a node that leaves it unanswered for `limit` seconds is silent.

    `tick` is to be called about every `interval` seconds.
    """

    def __init__(self, limit: float) -> None:
        self.interval = limit / 4
        self._limit = limit
        self._asked: float | None = None
        self._ticked: float | None = None

    def reset(self) -> None:
        """Another session: nothing is asked."""
        self._asked = self._ticked = None

    def heard(self) -> None:
        """The node has said something."""
        self._asked = None

    def silent(self, now: float) -> bool:
        return self._asked is not None and now - self._asked > self._limit

    def tick(self, now: float, wanted: bool) -> bool:
        """Whether to ask now; wanted: whether anybody waits for the node.

        After a pause of its own the caller has answers that it has not read yet: it asks anew.
        """
        paused = self._ticked is not None and now - self._ticked > self._limit / 2
        self._ticked = now
        if paused and self._asked is not None:
            self._asked = now
            return True
        if self._asked is not None or not wanted:
            return False
        self._asked = now
        return True
