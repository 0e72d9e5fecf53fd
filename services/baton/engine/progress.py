"""How sequences go on as results arrive: chunks, first tokens, forks, the running batch, the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engine.batch import Copy, Record, Step
from baton.engine.plan import Logprobs, RowResult, StepResult
from baton.engine.request import (
    ChunkEvent,
    FinishedEvent,
    FinishReason,
    Phase,
    PromptEvent,
    Request,
    Sequence,
    TokenEvent,
)

if TYPE_CHECKING:
    from baton.engine.scheduler import Scheduler


def commit_rows(scheduler: Scheduler, step: Step, result: StepResult) -> None:
    """Applies results in the order of the rows. A row whose sequence has moved on since is dropped."""
    scheduler.computed_tokens += step.plan.num_tokens
    for record, row in zip(step.records, result.rows, strict=True):
        sequence = record.sequence
        if sequence.epoch != record.epoch or sequence.phase is Phase.ENDED:
            continue
        sequence.retired = record.end
        if row.error is not None:
            scheduler.fail(sequence.request, "BAD_LOGITS", row.error)
        elif sequence.phase is Phase.RUNNING:
            sample = row.samples[0]
            sequence.unread -= 1
            take_token(scheduler, sequence, sample.token, sample.logprobs)
            if sequence.finish is not None:
                settle(scheduler, [sequence])
        else:
            _commit_chunk(scheduler, record, row)


def _commit_chunk(scheduler: Scheduler, record: Record, row: RowResult) -> None:
    leader = record.sequence
    request = leader.request
    assert leader.holding is not None
    if row.prompt_logprobs:
        request.prompt_logprobs.extend(row.prompt_logprobs)
    if not record.targets:
        scheduler.enter(leader)
        scheduler.events.append(ChunkEvent(leader))
        return
    scheduler.prompts.remove(leader)
    report_prompt(scheduler, request)
    for sequence, sample in zip(record.targets, row.samples, strict=True):
        sequence.unread -= 1
        take_token(scheduler, sequence, sample.token, sample.logprobs)
    # After the tokens: a receiver whose request they finish need not begin to pull.
    scheduler.events.append(ChunkEvent(leader))
    request.forked = True
    if scheduler.config.prompt_only:
        _lease(scheduler, leader)
    else:
        complete_prompt(scheduler, leader)


def _lease(scheduler: Scheduler, leader: Sequence) -> None:
    scheduler.enter_later(leader)
    for sequence in (leader, *leader.followers):
        if sequence.slot is not None:
            scheduler.slots.give_back(sequence.slot, sequence.last_step)
            sequence.slot = None
        scheduler.reservations.set(sequence, 0)
        sequence.phase = Phase.LEASED


def take_token(scheduler: Scheduler, sequence: Sequence, token: int, logprobs: Logprobs | None) -> None:
    """Appends a token to the sequence's log and decides whether it was the last."""
    sequence.tokens.append(token)
    params, context = sequence.request.params, scheduler.config.context_length
    if not scheduler.config.prompt_only:
        if token in params.stop_token_ids and sequence.num_read > params.min_tokens:
            sequence.finish = FinishReason.STOP
        elif min(params.max_tokens - sequence.num_read, context - len(sequence.tokens)) <= 0:
            sequence.finish = FinishReason.LENGTH
    scheduler.events.append(TokenEvent(sequence, token, logprobs, sequence.finish))


def first_tokens(scheduler: Scheduler, leader: Sequence, tokens: list[tuple[int, Logprobs | None]]) -> None:
    """Tokens that a prefill node has sampled for a sequence in HANDOFF and its followers."""
    request = leader.request
    report_prompt(scheduler, request)
    for sequence, (token, logprobs) in zip([leader, *leader.followers], tokens, strict=True):
        take_token(scheduler, sequence, token, logprobs)
    request.forked = True
    if all(sequence.finish is not None for sequence in (leader, *leader.followers)):
        scheduler.abandon(leader)
        settle(scheduler, [leader, *leader.followers])


def report_prompt(scheduler: Scheduler, request: Request) -> None:
    if not request.reported:
        request.reported = True
        scheduler.events.append(PromptEvent(request))


def arrive(scheduler: Scheduler, leader: Sequence) -> None:
    """All KV but the last token's is in the leader's pages, confirmed: it joins the running batch."""
    leader.computed = leader.retired = len(leader.tokens) - 1
    scheduler.handoffs.remove(leader)
    complete_prompt(scheduler, leader)


def complete_prompt(scheduler: Scheduler, leader: Sequence) -> None:
    """Prompt computed, first tokens known: forks the followers and starts decoding."""
    group = [leader, *leader.followers]
    prefix = leader.tokens[: leader.retired]
    if leader.followers:
        scheduler.enter(leader)  # they share what the tree holds
    else:
        scheduler.enter_later(leader)
    for follower in leader.followers:
        if follower.finish is None:
            _fork(scheduler, leader, follower, prefix)
    leader.followers = []
    if leader.finish is None:
        leader.phase = Phase.RUNNING
        scheduler.running.append(leader)
    scheduler.running.sort(key=lambda s: s.age)
    settle(scheduler, group)


def _fork(scheduler: Scheduler, leader: Sequence, follower: Sequence, prefix: list[int]) -> None:
    """Gives the follower the shared full pages and a copy of the last, partial one."""
    assert leader.holding is not None
    full = len(prefix) // scheduler.cache.page_size
    follower.phase = Phase.RUNNING
    if leader.holding.committed < full:
        # Not in the tree: it would lock what belongs to nobody it may take it from.
        scheduler.requeue(follower)
        return
    follower.holding = scheduler.cache.hold(prefix, leader.request.namespace, full)
    # Each choice takes its own page for the tail and its share of the output margin.
    share = min(leader.reserved, 1 + scheduler.pages(scheduler.config.output_margin))
    scheduler.reservations.set(leader, leader.reserved - share)
    scheduler.reservations.set(follower, share)
    partial = len(prefix) % scheduler.cache.page_size != 0
    if len(follower.holding.pages) < full or (partial and not scheduler.extend(follower, full + 1)):
        scheduler.requeue(follower)
        return
    if partial:
        scheduler.cache.pin(leader.holding)
        source, target = leader.holding.pages[full], follower.holding.pages[full]
        scheduler.copies.append(Copy(leader.holding, follower, follower.epoch, source, target))
    follower.computed = follower.retired = len(prefix)
    scheduler.running.append(follower)


def settle(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    """Ends the finished ones; reports a request whose choices have all finished."""
    for sequence in sequences:
        if sequence.finish is not None:
            scheduler.end(sequence)
    request = sequences[0].request
    if request.ended and scheduler.forget(request):
        scheduler.events.append(FinishedEvent(request))
