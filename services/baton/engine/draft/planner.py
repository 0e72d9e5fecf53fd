"""The drafts of a step: which rows may have any, what the drafter guesses, and how many of them are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from baton.engine.draft.base import Drafter
from baton.engine.draft.length import DraftKind, DraftLengths, graph_tokens
from baton.engine.plan import PlanRow
from baton.engine.request import Sequence as TokenSequence
from baton.engine.scheduler_config import SchedulerConfig
from baton.kvcache import KvCacheManager
from baton.layers.cache_spec import State

Drafts = tuple[int, ...]


class DraftPlanner:
    def __init__(
        self,
        drafter: Drafter,
        config: SchedulerConfig,
        cache: KvCacheManager,
        extend: Callable[[TokenSequence, int], bool],
    ) -> None:
        """`extend(sequence, rows)`: gives the sequence so many page indexes, if there are pages."""
        self.broken = ""
        """Why the drafter is not asked any more; empty: it is."""
        self.lengths = DraftLengths(graph_tokens if config.draft_padding else None, drafter.computes)
        self.name = drafter.name
        self.drafted = [0] * config.draft_tokens
        """Drafts that have been verified, by their index in the row."""
        self.accepted = [0] * config.draft_tokens
        """Those of them that were right."""
        self.drafter, self._config, self._page_size, self._extend = drafter, config, cache.page_size, extend
        self._states = cache.has_states
        self.waits = self._states or drafter.computes
        """Whether a step with drafts must be read before the next is planned."""

    def plan(
        self, rows: Sequence[TokenSequence], prompts: Sequence[TokenSequence], step: int
    ) -> dict[TokenSequence, Drafts]:
        """Drafts behind the last tokens of `rows`, the step's decode rows; of those that have any. There are
        pages for them, and all may be delivered. Half of the token budget is left to prompts. Of a sequence
        with unread drafts they are as many more: see PlanRow.ahead."""
        if self.broken:
            return {}
        config, lengths = self._config, self.lengths
        room = config.token_budget // 2 - len(rows)
        limits = [(sequence, most) for sequence in rows if (most := self._most(sequence, room, step)) > 0]
        found: dict[TokenSequence, Drafts] = {}
        with self._guarded():
            found = self._guesses(limits, room)
        if config.draft_adaptive and found:
            budget = config.token_budget - len(rows)
            chosen = lengths.choose(
                [
                    (s.row_drafts, (s.draft_kind, s.unread), len(drafts) - s.drafted)
                    for s, drafts in found.items()
                ],
                len(rows),
                room,
                sum(sequence.computed for sequence in rows),
                min(budget, sum(sequence.missing for sequence in prompts)),
                step,
            )
            pairs = zip(found.items(), chosen, strict=True)
            found = {s: drafts[: s.drafted + count] for (s, drafts), count in pairs if count}
        return {sequence: self._with_pages(sequence, drafts) for sequence, drafts in found.items()}

    def _guesses(self, limits: Sequence[tuple[TokenSequence, int]], room: int) -> dict[TokenSequence, Drafts]:
        """What the drafter guesses for each sequence that it has a guess for."""
        # It does not know the tokens in flight, and guesses them too.
        self.drafter.prepare([(sequence, sequence.unread + most) for sequence, most in limits])
        found: dict[TokenSequence, Drafts] = {}
        for sequence, most in limits:
            unread, stops = sequence.unread, sequence.request.params.stop_token_ids
            guess = self.drafter.draft(sequence, unread + min(most, room))[unread - sequence.drafted :]
            # Nothing follows a stop token; a grammar cannot even say what might.
            drafts = tuple(guess[: next((i for i, token in enumerate(guess) if token in stops), None)])
            if len(drafts) > sequence.drafted:
                found[sequence] = drafts
                room -= 0 if self._config.draft_adaptive else len(drafts) - sequence.drafted
        return found

    def _most(self, sequence: TokenSequence, room: int, step: int) -> int:
        """How many drafts the drafter is asked for."""
        config, params, row = self._config, sequence.request.params, sequence.row_drafts
        if sequence.num_output - sequence.drafted < params.min_tokens:
            return 0
        if sequence.request.grammar is not None and not config.draft_grammars:
            return 0
        if sequence.request.images:  # which no drafter knows
            return 0
        most = min(config.draft_tokens, params.max_tokens - sequence.num_output - 1, room)
        if self._states:
            most = min(most, State.most_drafts(sequence.computed + 1, self._page_size))
        if config.draft_adaptive:
            if step < (row.until or self.lengths.until):
                return 0
            if self.drafter.computes:
                most = min(most, row.taken + 2)
        return most

    def _with_pages(self, sequence: TokenSequence, drafts: Drafts) -> Drafts:
        """The drafts for which there are pages."""
        assert sequence.block_table is not None
        end = sequence.computed + 1 - sequence.drafted
        self._extend(sequence, -(-(end + len(drafts)) // self._page_size))
        drafts = drafts[: len(sequence.block_table) * self._page_size - end]
        return drafts if len(drafts) > sequence.drafted else ()

    def observe(self, sequence: TokenSequence, hidden: torch.Tensor, end: int) -> None:
        """The hidden states of the sequence's last tokens before position `end`."""
        if not self.broken and not sequence.request.images:
            with self._guarded():
                self.drafter.observe(sequence, end - len(hidden), hidden)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """What a drafter fails at costs drafts, not requests."""
        try:
            yield
        except Exception as error:
            self.broken = f"the drafter failed, and rows have no drafts any more: {error!r}"

    def verified(self, sequence: TokenSequence, kind: DraftKind, count: int, right: int) -> None:
        """The first `right` of the sequence's `count` drafts were right."""
        self.lengths.verified(sequence.row_drafts, kind, count, right)
        sequence.request.drafted_tokens += count
        sequence.request.accepted_drafts += right
        for at in range(count):
            self.drafted[at] += 1
            self.accepted[at] += at < right

    def timed(self, rows: Sequence[PlanRow], seconds: float) -> None:
        """A step has taken `seconds` > 0."""
        if rows and all(row.tokens is None for row in rows):
            counts = [row.count - 1 for row in rows]
            context = sum(row.start for row in rows)
            self.lengths.timed(len(rows), sum(counts), max(counts), context, seconds)
