"""Heads that read a model's hidden states guess how sequences go on: EAGLE-3, multi-token prediction.

A head computes pairs: the model's hidden states at a position, and the token that follows it. Its keys and
values are those of the pairs that it has had, in the order of their positions. Whole pages of pairs without a
gap are found by later sequences that begin with the same tokens, whose hidden states the model then does not
compute. Positions that are neither found nor computed are left out, and the head attends to what it has.
Guesses behind the first take the head's own states for the model's; their keys and values are written over.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

import torch

from baton.attention.base import AttentionBackend
from baton.attention.paged import PagedAttention
from baton.attention.step import ModelAttention
from baton.engine.draft.draft_head import DraftHead
from baton.engine.draft.head_graphs import HeadGraphs, HeadRow, HeadShape, LaunchedDrafts, Unread
from baton.engine.draft.head_passes import HeadPasses
from baton.engine.draft.head_state import HeadState, HeadWork
from baton.engine.draft.kv_slots import DraftKv, DraftKvSlots
from baton.engine.draft.paged_drafter import PagedDrafter
from baton.engine.draft.sampling import DraftSampler
from baton.engine.launched_step import LaunchedStep
from baton.engine.plan import PlanRow
from baton.engine.request import Sequence as TokenSequence
from baton.engine.request import SequencePhase
from baton.kvcache import BlockTable
from baton.kvcache.kv_pool import PagePool

Going = tuple[HeadState, int, int]
"""A sequence, how many drafts of it are under way, and its index among those that are."""
MOST_WAITING = 64
"""Hidden states of a sequence that is not asked for drafts wait for it; with more, it is caught up with."""


class HeadDrafter(PagedDrafter):
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
        graph_drafts: int = 0,
        kernels: bool = False,
        generations: MutableSequence[int] | None = None,
    ) -> None:
        """`pool`: for its keys and values, where kernels pad rows with a spare page; `generations`: of its
        pages, where others see them; `attention`: for prompts, for rows of one
        token. `token_budget`: pairs that it computes in a step, at most; `vocab_size` and `context_length`:
        the model's. `graph_drafts`: steps have CUDA graphs, of rows with at most so many drafts; 0: none.
        `kernels`: see HeadGraphs."""
        self.name, self.tap, self.states = head.name, head.tap, (head.values, head.dtype)
        self._head, self._pool = head, pool
        self._attention = ModelAttention(pool, head.heads, head.attention_options, *attention)
        layout, self.device = pool.layout, pool.device
        limits = max_slots, pool.num_pages, layout.page_size, len(layout.groups)
        self.slots = DraftKvSlots(*limits, generations)
        sampler = DraftSampler(max_slots, vocab_size, pool.device)
        paged = any(issubclass(each, PagedAttention) for each in attention)
        self._passes = HeadPasses(head, pool, self._attention, sampler, paged=paged)
        self._graphs: HeadGraphs | None = None
        if graph_drafts:
            with torch.inference_mode():
                most = context_length, graph_drafts, max_slots
                self._graphs = HeadGraphs(head, self._attention, vocab_size, *most, kernels)
        self._context, self._budget = context_length, token_budget
        self._step = 0
        self._asked: dict[int, tuple[HeadState, int]] = {}
        """By the batch slot: those that drafts are wanted of in this step and were in the one before, and how
        many are."""
        self._going: list[tuple[HeadState, int]] = []
        """Those whose drafts `_launched` has, and how many they are."""
        self._launched: LaunchedDrafts | None = None
        self._unread: list[tuple[LaunchedDrafts, list[Going]]] = []
        """Drafts that the last step has had of the device, before the host knew whether they are numbers."""
        self._failed: Exception | None = None
        """What `follow` failed at."""
        self._waiting: dict[HeadState, None] = {}
        """Those with hidden states that have not been computed."""

    def observe(self, sequence: TokenSequence, start: int, hidden: torch.Tensor) -> None:
        if sequence.phase is SequencePhase.ENDED:
            return
        state = sequence.drafting
        if not isinstance(state, HeadState):
            state = sequence.drafting = HeadState(sequence)
        if state.going == start and not state.lost:
            # The device has them.
            state.pairs, state.seen, state.going = state.pairs + len(hidden), start + len(hidden), -1
            return
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
    def prepare(self, limits: Sequence[tuple[TokenSequence, int]]) -> None:
        if self._failed is not None:
            raise self._failed
        self._check_unread()
        self._step += 1
        asked = {
            state: min(most, self._context - len(sequence.tokens))
            for sequence, most in limits
            if isinstance(state := sequence.drafting, HeadState)
        }
        self._asked = {
            state.sequence.slot: (state, drafts)
            for state, drafts in asked.items()
            if state.asked == self._step - 1 and state.sequence.slot is not None
        }
        for state in asked:
            state.asked = self._step
        going = self._take_going(asked)
        self._forget_ended()
        for state in [each for each in self._waiting if each not in asked]:
            if sum(len(hidden) for _, hidden in state.waiting) > MOST_WAITING:
                asked[state] = 0
        budget, works = self._budget, []
        for state, drafts in asked.items():
            work = self._work(state, drafts, budget, len(state.sequence.tokens))
            if work is not None:
                works.append(work)
                budget -= len(work.positions)
        ready = [work for work in works if work.drafts > 0 and work.positions and self._ends(work)]
        shape = None
        if self._graphs is not None and ready:
            shape = self._graphs.shape(len(ready), max(work.drafts for work in ready))
        if shape is not None:
            # The graph takes their last pairs.
            works = [work for work in works if work not in ready] + [w.split(shape.pairs) for w in ready]
        behind = [work for work in works if work.positions]
        if behind:
            self._catch_up(behind)
        for work in behind:
            self.keep(work.state.sequence, work.kv, work.state.pairs, work.state.behind)
        for found in self._passes.draft([w for w in works if w.drafts > 0 and _is_ready(w.state)]):
            self._add(*found)
        if going and self._launched is not None:
            self._name(self._launched, going)
        if shape is not None:
            self._draft_by_graph(shape, ready)

    def _name(self, launched: LaunchedDrafts, going: list[Going]) -> None:
        """Lets the step have drafts of the device, if they are numbers or not."""
        first, tokens = 0, launched.tokens
        if self._unread and self.guesses is not None:
            first, tokens = len(self.guesses), torch.cat((self.guesses, tokens))
        for state, drafts, index in going:
            assert state.kv is not None
            state.kv.guess = launched.names(index, drafts, first)
        self.guesses = tokens
        self._unread.append((launched, going))

    def _check_unread(self) -> None:
        unread, self._unread = self._unread, []
        for launched, going in unread:
            finite = launched.finite()
            for state, drafts, index in going:
                if not all(finite[index][:drafts]) and state.kv is not None and not state.lost:
                    self.slots.drop(state.kv, damaged=True)

    def follow(self, launched: LaunchedStep) -> None:
        try:
            self._follow(launched)
        except Exception as error:
            self._failed = error

    @torch.inference_mode()
    def _follow(self, launched: LaunchedStep) -> None:
        """Lets the device take the pairs of rows with drafts, and draft behind them, before the host knows
        them: of rows that have had all before, and were asked for drafts in two steps running."""
        asked, self._asked = self._asked, {}
        if self._graphs is None or not asked or launched.slots is None:
            return
        assert launched.tapped is not None and launched.verified is not None
        samples = {slot: i for i, slot in enumerate(launched.slots.tolist())}
        states, rows, unread = list[tuple[HeadState, int]](), list[HeadRow](), list[Unread]()
        for index, row in enumerate(launched.rows):
            if row.slot not in asked or not row.drafts or row.ahead:
                continue
            state, drafts = asked[row.slot]
            sequence = state.sequence
            drafts = min(drafts, self._context - (row.start + row.count + 1))
            if (
                drafts < 1
                or state.lost
                or state.waiting
                or not state.seen == row.start == len(sequence.tokens) - 1
            ):
                continue
            kv = self.slots.take(state.kv, state.pairs + row.count + drafts - 1, self._step)
            if kv is None:
                continue
            sample, positions = samples[row.slot], range(row.start, row.start + row.count)
            seed, temperature = sequence.seed, sequence.request.params.temperature
            row_values = positions, positions, state.pairs, kv.tables[0], temperature, seed, row.start + 2
            rows.append(HeadRow(*row_values))
            unread.append(Unread(launched.tapped_at[index], launched.firsts[sample], sample))
            states.append((state, drafts))
        if not rows:
            return
        longest = max(max(drafts for _, drafts in states), max(len(row.tokens) - 1 for row in rows))
        shape = self._graphs.shape(len(rows), longest)
        if shape is None:
            return
        for (state, _), head_row in zip(states, rows, strict=True):
            state.going, state.last = head_row.positions[0], None
        self._going = states
        self._launched = self._graphs.run_behind(shape, rows, unread, launched.tapped, launched.verified)

    def _take_going(self, asked: dict[HeadState, int]) -> list[Going]:
        """Takes those out of `asked` whose drafts are under way behind their last token."""
        found, going, self._going = [], self._going, []
        for index, (state, drafts) in enumerate(going):
            came, state.going = state.going < 0, -1
            if not came or state.kv is None or state.lost or state not in asked:
                continue
            if state.seen == len(state.sequence.tokens) - 1:
                self.slots.use(state.kv, self._step)
                found.append((state, min(drafts, asked.pop(state)), index))
        return found

    def _forget_ended(self) -> None:
        for state in [each for each in self._waiting if each.sequence.phase is SequencePhase.ENDED]:
            del self._waiting[state]

    @torch.inference_mode()
    def fill(self, prompts: Sequence[tuple[TokenSequence, int]]) -> None:
        self._forget_ended()
        works: list[HeadWork] | None = None
        while works or works is None:
            self._step += 1
            budget, works = self._budget, []
            for sequence, count in prompts:
                state = sequence.drafting
                if not isinstance(state, HeadState) or not state.waiting:
                    continue
                if state.lost or state.waiting[0][0] < count - 1:
                    work = self._work(state, 0, budget, count) if budget else None
                    if work is not None and work.positions:
                        works.append(work)
                        budget -= len(work.positions)
            if works:
                self._catch_up(works, drafts=False)

    def filled(self, sequence: TokenSequence) -> tuple[DraftKv, int] | None:
        state = sequence.drafting
        if not isinstance(state, HeadState) or state.kv is None or state.kv.slot < 0:
            return None
        return state.kv, state.pairs

    def lend(self, sequence: TokenSequence) -> BlockTable | None:
        if isinstance(sequence.drafting, HeadState):
            self._waiting.pop(sequence.drafting, None)
        return super().lend(sequence)

    def room(self, sequence: TokenSequence, entries: int, tokens: int) -> DraftKv | None:
        # Those that make room may have pages that the device still writes.
        for launched in (self._launched, *(each for each, _ in self._unread)):
            if launched is not None:
                launched.wait()
        self._passes.wait()
        following, namespace = _key(sequence, entries + 1 if entries == tokens - 1 else 0)
        return self.slots.take(None, entries, self._step, following, namespace, last=0)

    def arrived(self, sequence: TokenSequence, kv: DraftKv, entries: int, tokens: int) -> None:
        if kv.slot < 0:
            return
        state = sequence.drafting
        if not isinstance(state, HeadState):
            state = sequence.drafting = HeadState(sequence)
        if state.kv is not None:
            self.slots.drop(state.kv)
        state.kv, state.pairs, state.last = kv, entries, None
        state.skip(tokens - 1)
        state.seen = max(state.seen, tokens - 1)
        self.keep(sequence, kv, entries, tokens)

    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        state = sequence.drafting
        if not isinstance(state, HeadState) or state.kv is None or state.kv.used != self._step:
            return ()
        return state.kv.guess[:most]

    def _work(self, state: HeadState, drafts: int, budget: int, known: int) -> HeadWork | None:
        """Takes what waits of the first `known` tokens, as much as the budget allows, and the pages that it
        needs; None: there are none, and the head goes on without."""
        if not state.waiting and drafts < 1:
            return None
        if state.lost:
            following, namespace = _key(state.sequence, state.seen)
            state.kv = self.slots.take(state.kv, 0, self._step, following, namespace, last=0)
            state.pairs, state.last = len(state.kv.written) if state.kv is not None else 0, None
            state.skip(state.pairs)
        waiting = sum(len(hidden) for _, hidden in state.waiting)
        pairs = state.pairs + min(waiting, budget) + max(drafts, 1) - 1
        kv = self.slots.take(state.kv, pairs, self._step) if state.kv is not None else None
        if kv is None:
            state.waiting.clear()
            self._waiting.pop(state, None)
            return None
        work = HeadWork(state, kv, drafts, [], [])
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

    def _catch_up(self, works: Sequence[HeadWork], drafts: bool = True) -> None:
        """`drafts`: some may follow on these pairs."""
        rows = []
        for work in works:
            tokens = work.state.sequence.tokens
            following = [tokens[position + 1] for position in work.positions]
            rows.append(PlanRow(work.kv.slot, following, work.state.pairs, work.kv.tables, (work.kv.slot,)))
        parts = [work.hidden[0] if len(work.hidden) == 1 else torch.cat(work.hidden) for work in works]
        hidden = [self._head.enter(part) for part in parts]
        positions = [work.positions for work in works]
        ends: Sequence[torch.Tensor | None] = [None] * len(works)
        if drafts:
            ends = self._passes.run(rows, positions, hidden).unbind(0)
        else:
            self._passes.write(rows, positions, hidden)
        for work, last in zip(works, ends, strict=True):
            state = work.state
            state.pairs += len(work.positions)
            state.last, state.behind = last, work.positions[-1] + 2

    def keep(self, sequence: TokenSequence, kv: DraftKv, entries: int, tokens: int) -> None:
        """Unless pairs are left out."""
        if entries != tokens - 1 or entries // self.slots.cache.page_size <= kv.block_table.committed:
            return
        following, namespace = _key(sequence, tokens)
        if namespace == kv.block_table.namespace:
            self.slots.keep(kv, following, entries)

    @staticmethod
    def _ends(work: HeadWork) -> bool:
        """Whether its pairs reach the sequence's last token."""
        return work.positions[-1] + 2 == len(work.state.sequence.tokens)

    def _draft_by_graph(self, shape: HeadShape, works: Sequence[HeadWork]) -> None:
        assert self._graphs is not None
        rows = []
        for work in works:
            tokens, request = work.state.sequence.tokens, work.state.sequence.request
            following = [tokens[position + 1] for position in work.positions]
            row_state = work.positions, work.state.pairs, work.kv.tables[0]
            seed = work.state.sequence.seed
            rows.append(HeadRow(following, *row_state, request.params.temperature, seed, len(tokens)))
        launched = self._graphs.run(shape, rows, [work.hidden[0] for work in works])
        for work in works:
            state = work.state
            state.pairs += len(work.positions)
            state.last, state.behind = None, len(state.sequence.tokens)
        self._name(launched, [(work.state, work.drafts, index) for index, work in enumerate(works)])

    def _add(self, state: HeadState, depth: int, token: int, is_number: bool) -> None:
        """A draft, if those before it came of numbers; else the head begins anew."""
        kv = state.kv
        assert kv is not None
        if is_number and len(kv.guess) == depth:
            kv.guess.append(token)
        elif not state.lost:
            self.slots.drop(kv, damaged=True)


def _key(sequence: TokenSequence, tokens: int) -> tuple[Sequence[int], str]:
    """What the pairs of a sequence's first tokens are found by: each by its second token. The first token of
    all is a part of the namespace."""
    return sequence.tokens[1:tokens], f"{sequence.tokens[0]} {sequence.request.namespace}"


def _is_ready(state: HeadState) -> bool:
    """Whether the head has had the pair before the sequence's last token."""
    return state.last is not None and state.behind == len(state.sequence.tokens)
