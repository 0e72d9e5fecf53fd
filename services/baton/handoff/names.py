"""Names of attempts (design rule 2)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class AttemptName:
    """Name of one try at a request; late or foreign messages have another name."""

    gateway: int
    """The incarnation of the caller at the decode node."""
    request: int
    attempt: int
    decode_try: int

    def __str__(self) -> str:
        return f"{self.gateway:016x}/{self.request}/{self.attempt}/{self.decode_try}"


class RecentNames:
    """The last names that ended here: messages that were under way at that time are expected and need no
    answer."""

    def __init__(self, limit: int = 8192) -> None:
        self._limit = limit
        self._names: OrderedDict[AttemptName, None] = OrderedDict()

    def add(self, name: AttemptName) -> None:
        self._names[name] = None
        while len(self._names) > self._limit:
            self._names.popitem(last=False)

    def __contains__(self, name: AttemptName) -> bool:
        return name in self._names
