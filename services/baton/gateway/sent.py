"""What a gateway has sent to one node: the newest part of its load. Pure.

A node's own word is older, and counts in what this gateway had there at that time, or most of it. So it tells
only of others: what it says beyond that, until it says more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What a node has to do."""

    tokens: int = 0
    """Prompt tokens still to be computed there."""
    rows: int = 0
    """Sequences in its batch, waiting for it, or on their way (decode)."""
    running: int = 0
    """Of these, those that steps hold now: their prompts have been computed."""
    keys: int = 0
    """Positions that the running ones attend to, together."""


@dataclass(slots=True)
class _Request:
    tokens: int
    prompt: int
    running: bool = False


class Sent:
    """Requests on their way to a node, or there, by number. All calls may name one that is not known."""

    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}
        self._others = Work()
        self.tokens = 0
        """Prompt tokens to be computed there, of requests that were sent there."""
        self._running = self._keys = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: int, tokens: int, prompt: int = 0) -> None:
        """`tokens`: of its prompt, to be computed there. `prompt`: how many a row of it attends to there."""
        self.drop(request)
        self._requests[request] = _Request(tokens, prompt)
        self.tokens += tokens

    def computed(self, request: int) -> None:
        """Its prompt has been, wherever."""
        sent = self._requests.get(request)
        if sent is not None and not sent.running:
            sent.running = True
            self.tokens -= sent.tokens
            self._running += 1
            self._keys += sent.prompt

    def drop(self, request: int) -> None:
        sent = self._requests.pop(request, None)
        if sent is not None and sent.running:
            self._running -= 1
            self._keys -= sent.prompt
        elif sent is not None:
            self.tokens -= sent.tokens

    def told(self, said: Work) -> None:
        """The node has just said this of itself."""
        own = self._own()
        running = max(0, said.running - own.running)
        self._others = Work(
            tokens=max(0, said.tokens - own.tokens),
            rows=max(0, said.rows - own.rows),
            running=running,
            keys=said.keys * running // max(1, said.running),
        )

    def work(self, *, others: bool = True) -> Work:
        """`others`: with what is not this gateway's."""
        own, more = self._own(), self._others if others else Work()
        return Work(
            own.tokens + more.tokens,
            own.rows + more.rows,
            own.running + more.running,
            own.keys + more.keys,
        )

    def _own(self) -> Work:
        return Work(self.tokens, len(self._requests), self._running, self._keys)
