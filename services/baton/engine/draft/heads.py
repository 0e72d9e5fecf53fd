"""Heads that read a model's hidden states guess how sequences go on: EAGLE-3, multi-token prediction.

A head computes pairs: the model's hidden states at a position, and the token that follows it. Its keys and
values are those of the pairs that it has had, in the order of their positions. Positions whose hidden states
never came (cached prefixes, prompts computed elsewhere but for their ends) are left out, and the head attends
to what it has.
Guesses behind the first take the head's own states for the model's; their keys and values are written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from baton.attention.base import AttentionBackend, AttentionRows
from baton.attention.step import ModelAttention
from baton.engine.batch import HostBatch
from baton.engine.draft.base import Drafter
from baton.engine.draft.kv_slots import DraftKv, DraftKvSlots, slot_init
from baton.engine.plan import PlanRow
from baton.engine.request import Sequence as TokenSequence
from baton.engine.request import SequencePhase
from baton.engine.sampler import Sampler
from baton.kvcache.kv_pool import PagePool
from baton.layers.attention import AttentionOptions
from baton.layers.batch import Batch

MOST_WAITING = 64
"""Hidden states of a sequence that is not asked for drafts wait for it; with more, it is caught up with."""


class DraftHead(Protocol):
    tap: tuple[int, ...]
    """Hidden states of the model that it reads: see `layers.batch.HiddenTap.layers`."""

    @property
    def heads(self) -> int:
        """Attention heads of each layer."""

    @property
    def attention_options(self) -> Sequence[AttentionOptions]: ...

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the model's hidden states [tokens, values] become: [tokens, hidden]."""

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Next tokens, and hidden states before them [tokens, hidden] -> hidden states at them, likewise."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """-> float32 [rows, the model's vocabulary]"""


@dataclass(slots=True, eq=False)
class HeadState:
    """What the drafter keeps of a sequence."""

    sequence: TokenSequence
    kv: DraftKv | None = None
    pairs: int = 0
    """Whose keys and values the pages hold."""
    seen: int = 0
    """Position behind the last hidden states that came."""
    waiting: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """First position and hidden states, not computed yet."""
    last: torch.Tensor | None = None
    """The head's hidden states [hidden] at the last pair, which predict what follows its token."""
    behind: int = 0
    """Position that they predict."""

    @property
    def lost(self) -> bool:
        return self.kv is None or self.kv.slot < 0


@dataclass(slots=True)
class _Work:
    """A sequence's part of the first pass."""

    state: HeadState
    kv: DraftKv
    drafts: int
    positions: list[int]
    hidden: list[torch.Tensor]


class HeadDrafter(Drafter):
    computes = True

    def __init__(
        self,
        head: DraftHead,
        pool: PagePool,
        attention: tuple[type[AttentionBackend], type[AttentionBackend]],
        *,
        max_slots: int,
        vocab_size: int,
        context_length: int,
        token_budget: int,
    ) -> None:
        """`pool`: for its keys and values; `attention`: for prompts, for rows of one token. `token_budget`:
        pairs that it computes in a step, at most; `vocab_size` and `context_length`: the model's."""
        self.tap = head.tap
        self._head, self._pool = head, pool
        self._attention = ModelAttention(pool, head.heads, head.attention_options, *attention)
        layout = pool.layout
        self._slots = DraftKvSlots(max_slots, pool.num_pages, layout.page_size, len(layout.groups))
        self._sampler = Sampler(max_slots, vocab_size, pool.device)
        self._context, self._budget = context_length, token_budget
        self._step = 0
        self._waiting: dict[HeadState, None] = {}
        """Those with hidden states that have not been computed."""

    def observe(self, sequence: TokenSequence, start: int, hidden: torch.Tensor) -> None:
        if sequence.phase is SequencePhase.ENDED:
            return
        state = sequence.drafting
        if not isinstance(state, HeadState):
            state = sequence.drafting = HeadState(sequence)
        if state.lost and not state.waiting:
            state.seen = 0
        # What is computed again, after a retraction, is known.
        known = max(0, state.seen - start)
        if known < len(hidden):
            # A copy: it is a part of what the whole step has computed.
            state.waiting.append((start + known, hidden[known:].to(self._pool.device, copy=True)))
            state.seen = start + len(hidden)
            self._waiting[state] = None

    @torch.inference_mode()
    def prepare(self, wanted: Sequence[tuple[TokenSequence, int]]) -> None:
        self._step += 1
        asked = {
            state: min(most, self._context - len(sequence.tokens))
            for sequence, most in wanted
            if isinstance(state := sequence.drafting, HeadState)
        }
        for state in [each for each in self._waiting if each not in asked]:
            if state.sequence.phase is SequencePhase.ENDED:
                del self._waiting[state]
            elif sum(len(hidden) for _, hidden in state.waiting) > MOST_WAITING:
                asked[state] = 0
        budget, works = self._budget, []
        for state, drafts in asked.items():
            work = self._work(state, drafts, budget)
            if work is not None:
                works.append(work)
                budget -= len(work.positions)
        if any(work.positions for work in works):
            self._catch_up([work for work in works if work.positions])
        self._draft([work for work in works if work.drafts > 0 and _is_ready(work.state)])

    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        state = sequence.drafting
        if not isinstance(state, HeadState) or state.kv is None or state.kv.used != self._step:
            return ()
        return state.kv.guess[:most]

    def _work(self, state: HeadState, drafts: int, budget: int) -> _Work | None:
        """Takes what waits, as much as the budget allows, and the pages that it needs; None: there are none,
        and the head goes on without."""
        known = len(state.sequence.tokens)
        waiting = sum(len(hidden) for _, hidden in state.waiting)
        if not waiting and drafts < 1:
            return None
        lost = state.lost
        pairs = (0 if lost else state.pairs) + min(waiting, budget) + max(drafts, 1) - 1
        kv = self._slots.take(state.kv, pairs, self._step)
        if kv is None:
            state.waiting.clear()
            self._waiting.pop(state, None)
            return None
        if lost:
            state.pairs, state.last = 0, None
        state.kv = kv
        work = _Work(state, kv, drafts, [], [])
        while state.waiting and budget:
            start, hidden = state.waiting.pop(0)
            count = min(len(hidden), budget, known - 1 - start)
            if count < len(hidden):
                state.waiting.insert(0, (start + count, hidden[count:].clone()))
            if count < 1:
                break
            work.positions += range(start, start + count)
            work.hidden.append(hidden[:count])
            budget -= count
        if not state.waiting:
            self._waiting.pop(state, None)
        return work

    def _catch_up(self, works: Sequence[_Work]) -> None:
        rows = []
        for work in works:
            tokens = work.state.sequence.tokens
            following = [tokens[position + 1] for position in work.positions]
            rows.append(PlanRow(work.kv.slot, following, work.state.pairs, work.kv.tables, (work.kv.slot,)))
        hidden = [self._head.enter(torch.cat(work.hidden)) for work in works]
        positions = [work.positions for work in works]
        found = self._pass(rows, positions, hidden)
        for work, last in zip(works, found.unbind(0), strict=True):
            state = work.state
            state.pairs += len(work.positions)
            state.last, state.behind = last, work.positions[-1] + 2

    def _draft(self, works: Sequence[_Work]) -> None:
        """A token of each sequence in a pass, for those that want so many."""
        for work in works:
            self._sampler.init(slot_init(work.kv.slot, work.state.sequence))
        hidden = [work.state.last for work in works if work.state.last is not None]
        for depth in range(max((work.drafts for work in works), default=0)):
            if depth:
                going = [i for i, work in enumerate(works) if len(work.kv.guess) == depth < work.drafts]
                works, before = [works[i] for i in going], [hidden[i] for i in going]
                rows = [
                    PlanRow(w.kv.slot, w.kv.guess[-1:], w.state.pairs + depth - 1, w.kv.tables, (w.kv.slot,))
                    for w in works
                ]
                positions = [[work.state.behind + depth - 2] for work in works]
                if works:
                    hidden = list(self._pass(rows, positions, [each[None] for each in before]).unbind(0))
            if not works:
                return
            logits = self._head.logits(torch.stack(hidden))
            slots = np.array([work.kv.slot for work in works], np.int64)
            behind = np.array([work.state.behind + depth for work in works], np.int64)
            tokens, finite = self._sampler.sample(logits, slots, behind).read()
            for work, token, is_number in zip(works, tokens, finite, strict=True):
                if is_number:
                    work.kv.guess.append(token)
                else:
                    self._slots.drop(work.kv)

    def _pass(
        self, rows: Sequence[PlanRow], positions: Sequence[Sequence[int]], hidden: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """One pass of the head; `positions` and `hidden` of each row's tokens. -> hidden states at the last
        token of each row, [rows, hidden]."""
        host, device = HostBatch.of(rows), self._pool.device
        parts, single = [], host.single
        if single:
            parts.append(AttentionRows(host.rows[:single], 0, single))
        if single < len(rows):
            count = host.tokens - single
            parts.append(AttentionRows(host.rows[single:], single, count, longest=host.longest))
        at = torch.tensor([position for i in host.order for position in positions[i]], device=device)
        tokens = torch.from_numpy(host.ids).to(device)
        batch = Batch(tokens, at, self._attention.over(*parts))
        found = self._head.forward(tokens, torch.cat([hidden[i] for i in host.order]), batch)
        return found.index_select(0, torch.from_numpy(host.wanted).to(device))


def _is_ready(state: HeadState) -> bool:
    """Whether the head has had the pair before the sequence's last token."""
    return state.last is not None and state.behind == len(state.sequence.tokens)
