"""The scheduler: chooses the tokens that the next step computes, and applies its results.

Pure: no clock, no I/O, no device. The caller alternates `plan`, launching, reading and `commit`; with overlap
it plans and launches step N+1 before it commits step N. Page ownership goes through KvCacheManager alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.engine.draft.base import Drafter
from baton.engine.draft.planner import DraftPlanner
from baton.engine.image_waits import ImageWaits, WantImages, want_none
from baton.engine.plan import Logprobs, Pooling, RowResult, StepResult
from baton.engine.request import (
    ChunkEvent,
    EmbeddedEvent,
    EngineFinishReason,
    EngineRequest,
    PromptEvent,
    RecordEvent,
    Refused,
    Sequence,
    SequencePhase,
    TokenEvent,
    nothing,
)
from baton.engine.scheduler_config import PromptRoute, SchedulerConfig
from baton.engine.scheduler_state import SchedulerState
from baton.engine.step_builder import Record, Step, StepBuilder, divide_budget
from baton.kvcache import KvCacheManager
from baton.tracing.recorder import EventKind

if TYPE_CHECKING:
    import torch


class Scheduler(SchedulerState):
    """Moves requests from submission to their last token.

    Those of higher priority go first everywhere: at admission, in prompts' chunks, and they are retracted
    last. Among equals it is the policy's order at admission, and elsewhere the order of arrival.

    `route` decides where a prompt is computed; `abandon` is called before a sequence in HANDOFF loses its
    pages; `record` gets what happens to requests; `ask_turn` gets a suspect that there is room for.
    """

    def __init__(
        self,
        cache: KvCacheManager,
        config: SchedulerConfig,
        route: Callable[[Sequence, int], PromptRoute] = lambda sequence, uncached: PromptRoute.LOCAL,
        abandon: Callable[[Sequence], None] = lambda sequence: None,
        may_admit: Callable[[EngineRequest], bool] = lambda request: True,
        record: RecordEvent = nothing,
        ask_turn: Callable[[EngineRequest], None] = lambda request: None,
        drafter: Drafter | None = None,
        want_images: WantImages = want_none,
    ) -> None:
        if config.token_budget < config.max_rows:
            raise ValueError("token_budget must be at least max_rows")
        super().__init__(cache, config.policy, config.max_rows, abandon, record)
        self.config = config
        self.step_number = 0
        self.computed_tokens = 0
        self.local_prompts = 0
        """Prompts whose prefill began here."""
        self._route = route
        self._may_admit = may_admit
        self._ask_turn = ask_turn
        self.images = ImageWaits(want_images, record)
        self.drafts: DraftPlanner | None = None
        """None: no row has drafts."""
        if drafter is not None and config.draft_tokens:
            self.drafts = DraftPlanner(drafter, config, cache, self.extend)
        self._drafted_step = 0
        """The last step with drafts, if it must be read before the next is planned: for states, which take in
        right ones only, and for drafters that compute, which need to know where rows end."""
        self._ahead = 2 * config.token_budget
        """Tokens of a sequence in steps that have not retired, at most: two with overlap."""
        self._room = cache.longest(config.context_length, self._ahead)

    def submit(self, request: EngineRequest) -> None:
        """Queues a request. Raises Refused when it could never run, or when too many wait."""
        config, room = self.config, self._room
        known = max(len(sequence.tokens) for sequence in request.sequences)
        if not request.prompt:
            raise Refused("EMPTY_PROMPT", "the prompt has no tokens", "token_ids")
        prompt_only = config.prompt_only or request.pooling is not None
        # A single token is sampled and never computed on, so that the prompt may fill the context.
        last = prompt_only or request.params.max_tokens == 1
        if known + (0 if last else 1) > room:
            raise Refused("PROMPT_TOO_LONG", f"{known} tokens; this node holds at most {room}", "token_ids")
        if not last and len(request.prompt) + request.params.max_tokens > room:
            sizes = f"prompt ({len(request.prompt)}) and max_tokens ({request.params.max_tokens})"
            text = f"{sizes} exceed {room} tokens"
            raise Refused("TOO_MANY_TOKENS", text, "sampling.max_tokens")
        if request.n > self.slots.count:
            raise Refused("TOO_MANY_CHOICES", f"n must be at most {self.slots.count}", "n")
        if request.key in self.requests:
            raise Refused("DUPLICATE_REQUEST", "a request of this name is running", "request")
        if len(self.waiting) >= config.max_waiting:
            raise Refused("QUEUE_FULL", f"{config.max_waiting} requests are waiting")
        self.enqueue(request)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to compute here. All tokens of waiting prompts count, because their cached
        part is not known yet; none if they may be computed elsewhere."""
        waiting = sum(len(s.tokens) for s in self.waiting) if self.config.prompt_only else 0
        return waiting + sum(sequence.missing for sequence in self.prompts)

    # --- admission --------------------------------------------------------------------------------------

    def admit_elsewhere(self) -> None:
        """Admits prompts that are computed elsewhere, in order; `plan` admits the others.

        The first prompt that is computed here waits for `plan`, and so do all after it, because more of it
        may be cached by then. Under longest prefix match all wait, to be sorted with later arrivals.
        """
        if self.config.policy != "lpm":
            self._admit(elsewhere=True)

    def _admit(self, elsewhere: bool = False) -> None:
        if not self.slots.free or not self.waiting:
            return
        self.cache_pending_prefixes()
        for sequence in self.waiting.in_order():
            request = sequence.request
            if (request.awaits_grammar and not request.held) or not self._may_admit(request):
                continue
            if self._tries_other_suspect(request):
                continue
            if sequence.phase is SequencePhase.WAITING and not self._try_admit(sequence, elsewhere):
                # No request overtakes one that lacks room: small requests must not starve a large one.
                break

    def _tries_other_suspect(self, request: EngineRequest) -> bool:
        """Whether the request waits for another one that may also have made a step fail or ended a node: when
        the next step fails, at most one of them was in it."""
        doubtful = request.failed_steps or request.suspect
        admitted = {s.request for s in (*self.prompts, *self.handoffs, *self.running)} if doubtful else ()
        return any((r.failed_steps or r.suspect) and r is not request for r in admitted)

    def _try_admit(self, leader: Sequence, elsewhere: bool) -> bool:
        """Returns False if there is no room now, or if `elsewhere` is set and the prompt is computed here.
        Returns True if it was admitted, or cannot be for another reason."""
        request, config, size = leader.request, self.config, self.cache.page_size
        followers = [] if request.forked else request.sequences[1:]
        if self.slots.free < 1 + len(followers):
            return False
        if leader.awaits_pages or request.awaits_images:
            return True
        known = len(leader.tokens)
        cached = self.cached_pages(leader)
        if request.wants_all_positions:
            cached = 0
        promoted, _ = self.promotable(leader, cached)
        embeds = request.pooling is not None
        route = PromptRoute.LOCAL if embeds else self._route(leader, known - promoted * size)
        if route is PromptRoute.DEFER or leader.phase is not SequencePhase.WAITING:
            return True
        if elsewhere and route is PromptRoute.LOCAL:
            return False
        margin = min(config.output_margin, request.params.max_tokens)
        if config.prompt_only or embeds:
            margin = 0
        need = self.cache.peak(known + margin, self._ahead)
        if not config.prompt_only:
            need += len(followers) * len(self.cache.groups) * (1 + self.rows(margin))
        need = min(need, self.cache.counts().total)
        spare = self.reservations.headroom
        if self.prompts or self.running or self.handoffs:
            spare -= config.watermark
        if route is PromptRoute.REMOTE:
            if spare < need:
                return False
            self.admit(leader, followers, need, None)
            return True
        need -= self.cache.matched(cached)
        encoded = leader.encoded
        assert encoded is not None
        # Cached pages that nobody has locked yet cost room too.
        if spare < need or spare - self.cache.unlocked(encoded, request.namespace, cached) < need:
            return False
        if promoted > cached and self.promote(leader, promoted):
            return True
        if not self.images.over(request, cached * size):
            return True
        if request.held:
            self._ask_turn(request)
            return True
        self.admit(leader, followers, need, self.cache.hold(encoded, request.namespace, cached))
        if request.cached_tokens is None:
            request.cached_tokens = leader.computed
            self.local_prompts += 1
        return True

    # --- steps ------------------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """The next step, or None when there is nothing to compute: one row for each running sequence, then
        prompt chunks with what is left of the token budget."""
        if self._drafted_step > self.retired_step:
            return None
        self._admit()
        config, size = self.config, self.cache.page_size
        step, rows = StepBuilder(self.step_number + 1), list[Sequence]()
        # In the order of rank: a retraction relies on its victim having no row yet.
        for sequence in list(self.running):
            if sequence.phase is not SequencePhase.RUNNING or not self._wants_token(sequence):
                continue
            if self.extend_or_retract(sequence, sequence.computed // size + 1):
                rows.append(sequence)
        drafts = self.drafts.plan(rows, self.prompts, step.number) if self.drafts is not None else {}
        for sequence in rows:
            step.add_decode(sequence, drafts.get(sequence, ()))
        budget, short = config.token_budget - step.tokens, False
        for sequence, count in divide_budget(self.prompts, budget, size, config.full_step):
            if self.extend(sequence, self.rows(sequence.computed + count)):
                step.add_chunk(sequence, count)
                self.record(sequence.request, EventKind.CHUNK_BEGUN, count, step.number)
            else:
                short = True
        if short and not step.records and not self.copies and self._retract_prompt():
            return self.plan()
        copies, self.copies = self.copies, []
        # A choice that no longer runs has lost its pages: it cannot run again before this plan.
        running = [copy for copy in copies if copy.sequence.phase is SequencePhase.RUNNING]
        pinned = tuple(copy.block_table for copy in copies)
        built = step.build(running, pinned)
        if built is None:
            for block_table in pinned:
                self.cache.unpin(block_table)
        else:
            self.step_number = step.number
            waits = self.drafts is not None and self.drafts.waits
            if waits and any(record.drafts for record in step.records):
                self._drafted_step = step.number
        return built

    def _retract_prompt(self) -> bool:
        """Prompts that share window pages with others may lack pages: sharing ones do not become free. If all
        that are being computed do, the last gives up its own; admitted again it has what it needs reserved.
        Returns False if pages are about to be freed anyway."""
        leased = len(self.requests) - len(self.waiting) - len(self.prompts)
        if self.cache.pending or (self.config.prompt_only and leased):
            return False
        last = max(self.prompts, key=lambda s: s.rank)
        if self.config.prompt_only and last.request.pooling is None:
            # Its pages have been announced: it is computed again as another attempt.
            self.fail(last.request, "NO_PAGES", "the prompt ran out of pages; try again")
        else:
            self.retract_last()
        return True

    def _wants_token(self, sequence: Sequence) -> bool:
        """Whether the sequence wants another token after those in flight."""
        return not sequence.request.paused and sequence.num_output < sequence.request.params.max_tokens

    def commit(self, step: Step, result: StepResult, seconds: float = 0.0) -> None:
        """Applies a step's results in the order of its rows, and frees what the step was the last to use.
        A row is dropped if its sequence has been placed again or has ended since. `seconds`: the step's time;
        0: not known."""
        self.retire(step.plan.number, step.pinned)
        self.computed_tokens += step.plan.num_tokens
        if self.drafts is not None and seconds > 0:
            self.drafts.timed(step.plan.rows, seconds)
        for record, row in zip(step.records, result.rows, strict=True):
            sequence = record.sequence
            if sequence.epoch != record.epoch or sequence.phase is SequencePhase.ENDED:
                continue
            if row.error is not None and not _stops_before_error(sequence, row):
                if row.reason == "BAD_LOGITS":
                    for each in sequence.request.sequences:
                        each.retired = 0  # nobody may reuse what its pages hold
                        if each.block_table is not None:
                            self.cache.withdraw(each.block_table)
                self.fail(sequence.request, row.reason, row.error)
            elif sequence.phase is SequencePhase.RUNNING:
                self._commit_decode(record, row)
                if sequence.finish is not None:
                    self.end_finished([sequence])
                elif self.cache.has_windows:
                    self.drop_unseen(sequence)
            else:
                sequence.retired = record.end
                encoding = round(1e6 * result.encode_seconds)
                self.record(sequence.request, EventKind.CHUNK_ENDED, encoding, step.plan.number)
                self._commit_chunk(record, row)
            if row.hidden is not None and self.drafts is not None:
                self.drafts.observe(sequence, row.hidden, sequence.retired)

    def _commit_decode(self, record: Record, row: RowResult) -> None:
        """Takes back what the row counted for drafts that were wrong."""
        sequence, drafts = record.sequence, record.drafts
        if not drafts:
            sequence.unread -= 1
            sequence.retired += 1
            self._take_token(sequence, row.tokens[0], row.logprobs[0] if row.logprobs else None)
            return
        # Nothing counts behind a stop token, which a draft may have been.
        stops, kept = sequence.request.params.stop_token_ids, row.sampled()
        end = next((i + 1 for i, (token, _) in enumerate(kept) if token in stops), len(kept))
        verified = (end, end) if end < len(kept) or row.error is not None else (drafts, end - 1)
        right = end - 1
        sequence.unread -= 1 + drafts
        sequence.drafted -= drafts
        sequence.computed -= drafts - right
        sequence.retired += 1 + right
        if self.cache.has_states:
            sequence.replay = right
        for token, logprobs in kept[:end]:
            self._take_token(sequence, token, logprobs)
        if self.drafts is not None:
            self.drafts.verified(sequence, record.kind, *verified)

    def fail_step(self, step: Step, message: str) -> None:
        """The step could not be executed: everything in it fails."""
        self.retire(step.plan.number, step.pinned)
        failed = [*(record.sequence for record in step.records), *step.copied]
        for request in {id(sequence.request): sequence.request for sequence in failed}.values():
            if self.requests.get(request.key) is request:
                self.fail(request, "STEP_FAILED", message)

    def _commit_chunk(self, record: Record, row: RowResult) -> None:
        leader = record.sequence
        request = leader.request
        request.prompt_logprobs.extend(row.prompt_logprobs)
        if request.pooling is not None:
            self._commit_pooled(record, row)
            return
        if not record.targets:
            self.cache_prefix(leader)
            self.events.append(ChunkEvent(leader))
            return
        for sequence in record.targets:
            sequence.unread -= 1
        if request.hidden_layers:
            request.hidden = row.hidden
        self._take_first_tokens(leader, row.sampled())
        # After the tokens, so that a receiver whose request they finish does not begin to pull.
        self.events.append(ChunkEvent(leader))
        if self.config.prompt_only:
            self.lease(leader)
        else:
            self.start_decoding(leader, self.config.output_margin)

    def _commit_pooled(self, record: Record, row: RowResult) -> None:
        """A chunk of a prompt whose embedding is wanted."""
        sequence, request = record.sequence, record.sequence.request
        if row.pooled is None:
            self.fail(request, "NO_EMBEDDINGS", "this node's runner computes no embeddings")
            return
        before = request.pooled if request.pooling is Pooling.MEAN else None
        request.pooled = row.pooled if before is None else before + row.pooled
        if record.end < len(sequence.tokens):
            self.cache_prefix(sequence)
            return
        self.end(sequence)
        self.forget(request)
        self.embedded.append(EmbeddedEvent(request))

    def _take_first_tokens(self, leader: Sequence, tokens: list[tuple[int, Logprobs | None]]) -> None:
        """First tokens of the leader and its followers, in order."""
        request = leader.request
        if not request.reported:
            request.reported = True
            self.record(request, EventKind.FIRST_TOKEN, 0, 0)
            self.events.append(PromptEvent(request))
        for sequence, (token, logprobs) in zip([leader, *leader.followers], tokens, strict=True):
            self._take_token(sequence, token, logprobs)
        request.forked = True

    def _take_token(self, sequence: Sequence, token: int, logprobs: Logprobs | None) -> None:
        """Appends a token to the sequence and decides whether it is the last."""
        sequence.tokens.append(token)
        params = sequence.request.params
        if not self.config.prompt_only:
            if token in params.stop_token_ids:
                sequence.finish = EngineFinishReason.STOP
            elif sequence.num_read >= params.max_tokens:
                sequence.finish = EngineFinishReason.LENGTH
        self.events.append(TokenEvent(sequence, token, logprobs, sequence.finish))

    # --- hand-offs --------------------------------------------------------------------------------------

    def first_tokens(
        self, leader: Sequence, tokens: list[tuple[int, Logprobs | None]], hidden: torch.Tensor | None = None
    ) -> None:
        """Tokens that a prefill node has sampled for a sequence in HANDOFF and its followers. `hidden`:
        states of the last tokens before them, for a drafter."""
        if hidden is not None and self.drafts is not None:
            for sequence in (leader, *leader.followers):
                self.drafts.observe(sequence, hidden, len(leader.tokens))
        self._take_first_tokens(leader, tokens)
        group = [leader, *leader.followers]
        if all(sequence.finish is not None for sequence in group):
            self.abandon(leader)
            self.end_finished(group)

    def arrive(self, leader: Sequence) -> None:
        """The leader's pages hold the confirmed KV of all tokens but the last: it joins the running batch."""
        leader.computed = leader.retired = len(leader.tokens) - 1
        self.start_decoding(leader, self.config.output_margin)


def _stops_before_error(sequence: Sequence, row: RowResult) -> bool:
    """Whether what failed lies behind a token that ends the sequence."""
    return not sequence.request.params.stop_token_ids.isdisjoint(row.tokens[: row.failed_at])
