"""Bugs of requests that go on at another decode node."""

from __future__ import annotations

from collections.abc import Callable

from baton.gateway.attempts import Attempts
from baton.rpc.errors import BatonError
from baton.sim.bugs.patching import Bug, Patch

Delivered = tuple[tuple[int, ...] | None, ...]


def _late_tokens(patch: Patch) -> None:
    def make(current: Callable[[Attempts, str, int], bool]) -> Callable[[Attempts, str, int], bool]:
        def wrong(attempts: Attempts, address: str, attempt: int) -> bool:
            return True

        return wrong

    patch(Attempts, "current", make)


def _sampled_again(patch: Patch) -> None:
    def make(delivered: Callable[[Attempts], Delivered]) -> Callable[[Attempts], Delivered]:
        def wrong(attempts: Attempts) -> Delivered:
            return tuple(tokens and tokens[:-1] for tokens in delivered(attempts))

        return wrong

    patch(Attempts, "delivered", make)


def _other_choice(patch: Patch) -> None:
    def make(delivered: Callable[[Attempts], Delivered]) -> Callable[[Attempts], Delivered]:
        def wrong(attempts: Attempts) -> Delivered:
            """Each choice goes on from the output of the first."""
            carried = delivered(attempts)
            return tuple((tokens and carried[0]) or tokens for tokens in carried)

        return wrong

    patch(Attempts, "delivered", make)


def _uncounted_failure(patch: Patch) -> None:
    def make(ended: Callable[..., None]) -> Callable[..., None]:
        def wrong(attempts: Attempts, error: BatonError, now: float, *, lost: bool) -> None:
            ended(attempts, error, now, lost=lost)
            attempts.failed_steps = 0

        return wrong

    patch(Attempts, "ended", make)


RESUME_BUGS = (
    Bug("late-tokens", "tokens of an attempt that has been given up are accepted", 100, _late_tokens),
    Bug("sampled-again", "a resume samples the last delivered position again", 50, _sampled_again),
    Bug("poison", "nodes that a request has ended are not counted", 200, _uncounted_failure),
    Bug("other-choice", "a resumed choice continues another choice's output", 100, _other_choice),
)
