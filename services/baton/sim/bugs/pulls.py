"""Bugs of pulls and of what confirms them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton.engine.batch import Step
from baton.handoff.decode_side import DecodeSide, Handoff
from baton.handoff.messages import ChunkAnnounced, ReleaseLease
from baton.handoff.pulls import Pull, Pulls
from baton.kvcache import PageAllocator
from baton.prefill.core import PrefillCore
from baton.sim.bugs.patching import Bug, Patch
from baton.sim.transport import Pull as SimPull

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
            pulls = pull._node.core.handoffs._pulls.running
            known = next((pulls.get(number) for number, p in pull._node._pulls.items() if p is pull), None)
            if known is not None and pull._pool is not None:
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
