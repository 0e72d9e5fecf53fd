"""Finds stop strings in a text that comes in pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, whatever the borders of the pieces.

    The first match is the one that ends first; of those that end at the same position, the longest. That
    makes the outcome independent of how the text was cut into pieces. Text is held back only if it may become
    a stop string: the longest end of the text that a stop string starts with.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.matched = ""
        """The stop string found; empty while there is none."""

    def feed(self, text: str) -> str:
        """Takes the next piece; returns what may be shown. After a match everything is swallowed."""
        if self.matched:
            return ""
        if not self._stop:
            return text
        self._held += text
        found = self._first_match()
        if found is not None:
            start, self.matched = found
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._undecided()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """Ends the text: what was held back can no longer become a stop string and is returned."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self) -> tuple[int, str] | None:
        # What is held never contains a whole stop string, so every match ends in the new piece.
        matches = ((self._held.find(stop), stop) for stop in self._stop)
        found = [(start + len(stop), start, stop) for start, stop in matches if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _undecided(self) -> int:
        """Characters at the end that are a proper beginning of a stop string."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stop):
                return size
        return 0
