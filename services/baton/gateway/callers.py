"""Who asks: an API key's running requests and open streams, against its limits."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.errors import exhausted, invalid, unauthenticated


@dataclass(frozen=True, slots=True)
class Limits:
    """0: none."""

    requests: int = 0
    streams: int = 0
    prompt_tokens: int = 0


class Caller:
    """One API key, or everybody where there are none. Used on one event loop only."""

    def __init__(self, name: str, limits: Limits) -> None:
        """name: for people and logs; no part of the key."""
        self.name = name
        self.limits = limits
        self.revoked = False
        self._requests = 0
        self._streams = 0

    def begin_request(self) -> None:
        """Counts a request until `end_request`. Raises BatonError when it is one too many."""
        self._check_key()
        if self.limits.requests and self._requests >= self.limits.requests:
            raise exhausted(
                f"this API key has {self._requests} requests running already", "KEY_REQUESTS", 1000
            )
        self._requests += 1

    def end_request(self) -> None:
        self._requests -= 1

    def open_stream(self) -> None:
        """Counts a stream until `close_stream`. Raises BatonError when it is one too many."""
        self._check_key()
        if self.limits.streams and self._streams >= self.limits.streams:
            raise exhausted(f"this API key has {self._streams} streams open already", "KEY_STREAMS", 1000)
        self._streams += 1

    def close_stream(self) -> None:
        self._streams -= 1

    def check_prompt(self, tokens: int, field: str) -> None:
        """Raises BatonError, naming the field, for a prompt that is longer than this caller may send."""
        longest = self.limits.prompt_tokens
        if longest and tokens > longest:
            text = f"the prompt has {tokens} tokens; {longest} are allowed here"
            raise invalid(field, text, "PROMPT_TOO_LONG")

    def _check_key(self) -> None:
        """A stream may outlive its key."""
        if self.revoked:
            raise unauthenticated("this API key has been withdrawn", "KEY_WITHDRAWN")
