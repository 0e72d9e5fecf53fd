"""What a gateway has sent to its workers and not heard back of: the newest part of their load. Pure.

What a node itself reports is older: it is counted as far as it exceeds what this gateway had there at that
moment, and so is other callers'.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True)
class _Sent:
    decode: str
    computed_at: str
    tokens: int
    """Prompt tokens to compute there."""
    prompt: int
    computed: bool = False


class Sent:
    """Requests by number. All calls may be made for a number that is not known."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}
        self._queued: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()
        self._keys: Counter[str] = Counter()
        self._foreign: dict[str, tuple[int, int, int]] = {}

    def begin(self, number: int, decode: str, computed_at: str, tokens: int, prompt: int) -> None:
        """A request has been sent; `tokens` of its prompt are to be computed at one of the two addresses."""
        self.end(number)
        self._sent[number] = _Sent(decode, computed_at, tokens, prompt)
        _add(self._queued, computed_at, tokens)

    def computed(self, number: int) -> None:
        """Its prompt has been."""
        sent = self._sent.get(number)
        if sent is not None and not sent.computed:
            sent.computed = True
            _add(self._queued, sent.computed_at, -sent.tokens)
            _add(self._rows, sent.decode, 1)
            _add(self._keys, sent.decode, sent.prompt)

    def end(self, number: int) -> None:
        """It has ended, or is to go elsewhere."""
        sent = self._sent.pop(number, None)
        if sent is None:
            return
        if sent.computed:
            _add(self._rows, sent.decode, -1)
            _add(self._keys, sent.decode, -sent.prompt)
        else:
            _add(self._queued, sent.computed_at, -sent.tokens)

    def reported(self, address: str, queued: int, rows: int, keys: int) -> None:
        """A node's own figures have come."""
        own = self._own(address)
        self._foreign[address] = (
            max(0, queued - own[0]),
            max(0, rows - own[1]),
            max(0, keys - own[2]) if rows > own[1] else 0,
        )

    def silent(self, address: str) -> None:
        """None come any more."""
        self._foreign.pop(address, None)

    def load(self, address: str) -> tuple[int, int, int]:
        """Prompt tokens to compute, rows, and positions that these attend to."""
        foreign = self._foreign.get(address, (0, 0, 0))
        own = self._own(address)
        return own[0] + foreign[0], own[1] + foreign[1], own[2] + foreign[2]

    def _own(self, address: str) -> tuple[int, int, int]:
        return self._queued[address], self._rows[address], self._keys[address]


def _add(counts: Counter[str], address: str, count: int) -> None:
    """Addresses without anything are forgotten: a fleet that changes has many in time."""
    counts[address] += count
    if not counts[address]:
        del counts[address]
