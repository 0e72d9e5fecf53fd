"""Bugs of leases and names."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from baton.handoff.decode_side import DecodeSide
from baton.handoff.messages import LeaseFinished, PrefillOutput
from baton.handoff.names import AttemptName
from baton.handoff.prefill_side import Attempt, PrefillSide
from baton.sim.bugs.patching import Bug, Patch

TIMER_SECONDS = 0.1


def _on_timer(patch: Patch) -> None:
    def make(tick: Callable[[PrefillSide, float], None]) -> Callable[[PrefillSide, float], None]:
        def wrong(side: PrefillSide, now: float) -> None:
            tick(side, now)
            for attempt in side._attempts.values():
                if attempt.complete_since is not None and now - attempt.complete_since > TIMER_SECONDS:
                    side.scheduler.close(attempt.request)

        return wrong

    patch(PrefillSide, "tick", make)


def _without_attempt(patch: Patch) -> None:
    def make(
        receive: Callable[[DecodeSide, str, PrefillOutput, float], None],
    ) -> Callable[[DecodeSide, str, PrefillOutput, float], None]:
        def wrong(side: DecodeSide, address: str, message: PrefillOutput, now: float) -> None:
            for name in side._by_name:
                if (name.gateway, name.request) == (message.name.gateway, message.name.request):
                    message = replace(message, name=name)
                    break
            receive(side, address, message, now)

        return wrong

    patch(DecodeSide, "receive", make)


def _silent_failure(patch: Patch) -> None:
    def make(fail: Callable[..., None]) -> Callable[..., None]:
        def wrong(side: PrefillSide, attempt: Attempt, code: str, reason: str, message: str) -> None:
            fail(side, attempt, code, reason, message)
            if not attempt.first:
                side.outputs.pop()

        return wrong

    patch(PrefillSide, "_fail", make)


def _any_release_stood(patch: Patch) -> None:
    def make(release: Callable[..., None]) -> Callable[..., None]:
        def wrong(side: PrefillSide, holder: Hashable, name: AttemptName, now: float) -> None:
            if name in side._attempts:
                release(side, holder, name, now)
            else:
                side.outputs.append((holder, LeaseFinished(name, stood=True)))

        return wrong

    patch(PrefillSide, "release", make)


def _unknown_reference(patch: Patch) -> None:
    _any_release_stood(patch)

    def make(peer_down: Any) -> Callable[[DecodeSide, str, str], None]:
        def wrong(side: DecodeSide, address: str, reason: str) -> None:
            """Hand-offs are tied to an address, not to a life of the process there."""

        return wrong

    patch(DecodeSide, "peer_down", make)


def _expired_lease(patch: Patch) -> None:
    _any_release_stood(patch)

    def make(fail: Callable[..., None]) -> Callable[..., None]:
        def wrong(side: PrefillSide, attempt: Attempt, code: str, reason: str, message: str) -> None:
            fail(side, attempt, code, reason, message)
            if reason == "LEASE_EXPIRED":
                side.outputs.pop()

        return wrong

    patch(PrefillSide, "_fail", make)


LEASE_BUGS = (
    Bug("lease-timer", "a lease ends on a timer although a pull runs", 100, _on_timer),
    Bug("no-attempt", "messages are matched by request, whatever the attempt", 100, _without_attempt),
    Bug("silent-failure", "a failure before the first token is not announced", 100, _silent_failure),
    Bug(
        "unknown-reference",
        "a release with an unknown name is confirmed (vLLM #52234, 1)",
        100,
        _unknown_reference,
    ),
    Bug("expired-lease", "an expired lease is still confirmed (vLLM #52234, 5)", 50, _expired_lease),
)
