"""What a gateway has sent to one node, so that a burst counts before the node tells of it. Pure."""

from __future__ import annotations

SETTLE_SECONDS = 0.25
"""A node's figures count a request in when they come so long after it was sent."""


class Sent:
    """Requests on their way to a node, or there."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[float, int]] = {}
        """When, and tokens; in the order of their sending."""
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: int, tokens: int, now: float) -> None:
        self.drop(request)
        self._requests[request] = (now, tokens)
        self.tokens += tokens

    def drop(self, request: int) -> None:
        """Idempotent."""
        self.tokens -= self._requests.pop(request, (0.0, 0))[1]

    def unseen(self, told: float) -> tuple[int, int]:
        """Requests, and their tokens, that figures told at this moment do not count in yet."""
        count = tokens = 0
        for at, size in reversed(self._requests.values()):
            if at <= told - SETTLE_SECONDS:
                break
            count += 1
            tokens += size
        return count, tokens
