"""Bugs that can be planted into the real core, one at a time, to show that the simulator finds them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from baton.engine.batch import Step
from baton.engine.plan import StepResult
from baton.engine.request import Phase, TokenEvent
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_state import Slots
from baton.gateway.attempts import Attempts
from baton.handoff.decode_side import DecodeSide, Handoff
from baton.handoff.messages import AttemptName, ChunkAnnounced, LeaseFinished, PrefillOutput, ReleaseLease
from baton.handoff.prefill_side import Attempt, PrefillSide
from baton.handoff.pulls import Pull, Pulls
from baton.kvcache import Holding, KvCache, PageAllocator
from baton.prefill.core import PrefillCore
from baton.rpc.errors import BatonError
from baton.sim.transport import Pull as SimPull

Patch = Callable[[Any, str, Callable[[Any], Any]], None]
"""(owner, attribute, make): make(original) replaces the attribute."""


@dataclass(frozen=True, slots=True)
class Bug:
    name: str
    text: str
    """What is wrong, in one line."""
    within: int
    """A run of this many seeds, from 0 on, finds it, with some margin."""
    plant: Callable[[Patch], None]


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
            """Hand-offs are tied to an address, not to an incarnation of the process there."""

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
    Bug("expired-lease", "an expired lease is still confirmed (vLLM #52234, 5)", 200, _expired_lease),
)


PullEnded = Callable[[DecodeSide, int, str | None, Any, float], None]


def _free_at_cancel(patch: Patch) -> None:
    def make(forget: Callable[[DecodeSide, Handoff], None]) -> Callable[[DecodeSide, Handoff], None]:
        def wrong(side: DecodeSide, handoff: Handoff) -> None:
            forget(side, handoff)
            if handoff.pull is not None:
                side._pulls.end(handoff.pull)

        return wrong

    patch(DecodeSide, "_forget", make)


def _generation_at_start(patch: Patch) -> None:
    def make(begin: Callable[[SimPull], None]) -> Callable[[SimPull], None]:
        def wrong(pull: SimPull) -> None:
            for known in pull._node.core.handoffs._pulls.running.values():
                if set(known.targets) == pull.targets and pull._pool is not None:
                    known.generations = tuple(pull._pool.generations[source] for source, _ in pull._pairs)
            begin(pull)

        return wrong

    patch(SimPull, "_begin", make)


def _unconfirmed(patch: Patch) -> None:
    def make(pull_ended: PullEnded) -> PullEnded:
        def wrong(side: DecodeSide, number: int, error: str | None, generations: Any, now: float) -> None:
            pull = side._pulls.running.get(number)
            pull_ended(side, number, error, pull.generations if pull is not None else None, now)

        return wrong

    patch(DecodeSide, "pull_ended", make)


def _failed_pull(patch: Patch) -> None:
    def make(pull_ended: PullEnded) -> PullEnded:
        def wrong(side: DecodeSide, number: int, error: str | None, generations: Any, now: float) -> None:
            pull = side._pulls.running.get(number)
            if error is not None and pull is not None:
                error, generations = None, pull.generations
            pull_ended(side, number, error, generations, now)

        return wrong

    patch(DecodeSide, "pull_ended", make)


def _consumed_reference(patch: Patch) -> None:
    def make(advance: Callable[..., None]) -> Callable[..., None]:
        def wrong(side: DecodeSide, handoff: Handoff, now: float) -> None:
            advance(side, handoff, now)
            if handoff.pull is not None and handoff.announced_all and handoff.first and not handoff.released:
                handoff.released = True
                side.effects.append(ReleaseLease(handoff.address, handoff.name))

        return wrong

    patch(DecodeSide, "_advance", make)


def _free_when_overdue(patch: Patch) -> None:
    def make(expire: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(pulls: Pulls[Handoff], now: float) -> list[Pull[Handoff]]:
            late = [number for number, pull in pulls.running.items() if pull.due <= now]
            return [pull for number in late if (pull := pulls.end(number)) is not None]

        return wrong

    patch(Pulls, "expire", make)


def _early(patch: Patch) -> None:
    def make(
        plan: Callable[[PrefillCore, float], Step | None],
    ) -> Callable[[PrefillCore, float], Step | None]:
        def wrong(core: PrefillCore, now: float) -> Step | None:
            step = plan(core, now)
            if step is not None:
                core.retire(step.plan.number)
            return step

        return wrong

    patch(PrefillCore, "plan", make)


def _unwaited(patch: Patch) -> None:
    def make(announced: Callable[..., None]) -> Callable[..., None]:
        def wrong(side: DecodeSide, handoff: Handoff, chunk: ChunkAnnounced, now: float) -> None:
            announced(side, handoff, replace(chunk, step=0), now)

        return wrong

    patch(DecodeSide, "_announced", make)


def _never_stopped(patch: Patch) -> None:
    patch(DecodeSide, "_stop", lambda stop: lambda side, pull, address: None)


def _stale_reference(patch: Patch) -> None:
    def make(take: Callable[[PageAllocator, int], list[int]]) -> Callable[[PageAllocator, int], list[int]]:
        def wrong(allocator: PageAllocator, count: int) -> list[int]:
            pages = take(allocator, count)
            for page in pages:
                allocator._generations[page] = 1
            return pages

        return wrong

    patch(PageAllocator, "take", make)


PULL_BUGS = (
    Bug("free-at-cancel", "a pull's target is freed when its request is cancelled", 25, _free_at_cancel),
    Bug("late-generation", "the expected generation is read when the copy starts", 800, _generation_at_start),
    Bug("free-overdue", "a pull's target is freed when the pull is overdue", 400, _free_when_overdue),
    Bug("unconfirmed", "nothing is confirmed after the copy", 800, _unconfirmed),
    Bug("failed-pull", "a pull that failed counts as done (vLLM #52234, 2)", 50, _failed_pull),
    Bug("consumed-reference", "pages are read after their release (vLLM #52234, 3)", 25, _consumed_reference),
    Bug("early-retired", "a step counts as retired when it is planned", 100, _early),
    Bug("unwaited", "pages announced ahead are pulled without waiting for their step", 100, _unwaited),
    Bug("never-stopped", "an unwanted pull keeps waiting for its step", 100, _never_stopped),
    Bug("stale-reference", "a reused page keeps its generation (vLLM #52234, 4)", 800, _stale_reference),
)


def _free_at_abort(patch: Patch) -> None:
    def make(release: Callable[[KvCache, Holding, int], None]) -> Callable[[KvCache, Holding, int], None]:
        def wrong(cache: KvCache, holding: Holding, after_step: int) -> None:
            release(cache, holding, 0)

        return wrong

    patch(KvCache, "release", make)


def _row_reuse(patch: Patch) -> None:
    def make(give_back: Callable[[Slots, int, int], None]) -> Callable[[Slots, int, int], None]:
        def wrong(slots: Slots, slot: int, after_step: int) -> None:
            give_back(slots, slot, 0)

        return wrong

    patch(Slots, "give_back", make)


def _after_end(patch: Patch) -> None:
    def make(
        commit: Callable[[Scheduler, Step, StepResult], None],
    ) -> Callable[[Scheduler, Step, StepResult], None]:
        def wrong(scheduler: Scheduler, step: Step, result: StepResult) -> None:
            for record, row in zip(step.records, result.rows, strict=True):
                sequence = record.sequence
                if sequence.phase is Phase.ENDED and sequence.finish is not None and row.tokens:
                    late = row.tokens[0]
                    scheduler.events.append(TokenEvent(sequence, late, None, None))
            commit(scheduler, step, result)

        return wrong

    patch(Scheduler, "commit", make)


STEP_BUGS = (
    Bug("free-at-abort", "pages are freed while the batch that uses them is in flight", 25, _free_at_abort),
    Bug("row-reuse", "a batch slot is reused before its step has retired", 25, _row_reuse),
    Bug("after-end", "a token in flight is emitted after the end of its sequence", 50, _after_end),
)


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
            """Each choice continues from the output of the first."""
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


BUGS: dict[str, Bug] = {bug.name: bug for bug in (*LEASE_BUGS, *PULL_BUGS, *STEP_BUGS, *RESUME_BUGS)}

__all__ = ["BUGS", "Bug", "planted"]


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plants the named bug; an empty name plants none. Raises KeyError for an unknown name."""
    originals: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, attribute)
        originals.append((owner, attribute, original))
        setattr(owner, attribute, make(original))

    if name:
        BUGS[name].plant(patch)
    try:
        yield
    finally:
        for owner, attribute, original in reversed(originals):
            setattr(owner, attribute, original)
