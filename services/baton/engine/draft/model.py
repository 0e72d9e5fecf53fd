"""A smaller model of the same vocabulary guesses how sequences go on.

As in speculative decoding (Leviathan et al., arXiv:2211.17192), with its own runner and its own KV. Its
tokens are drawn with the noise that the large model draws with, which is a function of seed, position and
token: where the two models' probabilities are alike, so are their tokens.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any

import torch

from baton.engine.draft.kv_slots import DraftKv, DraftKvSlots, slot_init
from baton.engine.draft.paged_drafter import PagedDrafter
from baton.engine.plan import PlanRow, Runner, SlotInit, StepPlan
from baton.engine.request import Sequence as TokenSequence

CPU = torch.device("cpu")


class ModelDrafter(PagedDrafter):
    name = "model"

    def __init__(
        self,
        runner: Runner[Any],
        *,
        pages: int,
        page_size: int,
        groups: int,
        context_length: int,
        token_budget: int,
        generations: MutableSequence[int] | None = None,
        device: torch.device = CPU,
    ) -> None:
        """`pages`: those of the runner's pool, of `groups` KV groups together, and their `generations`, where
        others see them; `context_length`: positions that the model knows; `token_budget`: known tokens that
        it computes in a step, at most. Sequences that it has not caught up with get no drafts."""
        self._runner, self.device = runner, device
        self.slots = DraftKvSlots(runner.max_slots, pages, page_size, groups, generations)
        self._context, self._budget = context_length, token_budget
        self._step = 0
        self._launched = 0
        """Steps of its own runner."""
        self._filling: Any = None
        """The last of these that `fill` has launched, until it is read."""

    def prepare(self, limits: Sequence[tuple[TokenSequence, int]]) -> None:
        self._step += 1
        budget = self._budget
        rows, inits = list[PlanRow](), list[SlotInit]()
        going: list[tuple[DraftKv, int, int]] = []
        """What is kept of a sequence, its tokens, and how many are drafted."""
        known: list[tuple[DraftKv, list[int], int]] = []
        """What is kept of each row's sequence, its tokens, and how many then have keys and values."""
        for sequence, most in limits:
            tokens = sequence.tokens
            most = min(most, self._context - len(tokens))
            if most < 1 or not budget:
                continue
            kept = sequence.drafting if isinstance(sequence.drafting, DraftKv) else None
            room = len(tokens) + most - 1
            kv = self.slots.take(kept, room, self._step, tokens, sequence.request.namespace)
            if kv is None:
                continue
            sequence.drafting = kv
            start = min(kv.agree(tokens), len(tokens) - 1)
            chunk = tokens[start : start + budget]
            budget -= len(chunk)
            kv.written[start:] = chunk
            known.append((kv, tokens, start + len(chunk)))
            caught_up = start + len(chunk) == len(tokens)
            rows.append(PlanRow(kv.slot, chunk, start, kv.tables, (kv.slot,) if caught_up else ()))
            if caught_up:
                inits.append(slot_init(kv.slot, sequence))
                going.append((kv, len(tokens), most))
        if rows:
            failed = self._draft(rows, inits, going)
            for kv, tokens, count in known:
                if kv.slot not in failed:
                    # The last are written again if it is asked again before there is another token.
                    self.slots.keep(kv, tokens, count - 1)

    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        kv = sequence.drafting
        return kv.guess[:most] if isinstance(kv, DraftKv) and kv.used == self._step else ()

    def fill(self, prompts: Sequence[tuple[TokenSequence, int]]) -> None:
        missing = [(sequence, count) for sequence, count in prompts if count <= self._context]
        while missing:
            self._step += 1
            budget, rows, left = self._budget, list[PlanRow](), list[tuple[TokenSequence, int]]()
            for sequence, count in missing:
                kept = sequence.drafting if isinstance(sequence.drafting, DraftKv) else None
                tokens = sequence.tokens[:count]
                kv = self.slots.take(kept, count, self._step, tokens, sequence.request.namespace)
                if kv is None:
                    continue
                sequence.drafting = kv
                start = kv.agree(tokens)
                chunk = tokens[start : start + budget]
                if chunk:
                    budget -= len(chunk)
                    kv.written += chunk
                    rows.append(PlanRow(kv.slot, chunk, start, kv.tables, ()))
                if start + len(chunk) < count:
                    left.append((sequence, count))
            if rows:
                _, self._filling = self._launch(rows, ())
            missing = left

    def filled(self, sequence: TokenSequence) -> tuple[DraftKv, int] | None:
        kv = sequence.drafting
        return (kv, len(kv.written)) if isinstance(kv, DraftKv) and kv.slot >= 0 else None

    def keep(self, sequence: TokenSequence, kv: DraftKv, entries: int, tokens: int) -> None:
        self.slots.keep(kv, sequence.tokens, entries)

    def room(self, sequence: TokenSequence, entries: int, tokens: int) -> DraftKv | None:
        if self._filling is not None:
            # Those that make room may have pages that the device still writes.
            self._runner.read(self._filling)
            self._filling = None
        prefix = sequence.tokens[:entries]
        return self.slots.take(None, entries, self._step, prefix, sequence.request.namespace)

    def arrived(self, sequence: TokenSequence, kv: DraftKv, entries: int, tokens: int) -> None:
        if kv.slot < 0:
            return
        if isinstance(sequence.drafting, DraftKv):
            self.slots.drop(sequence.drafting)
        sequence.drafting = kv
        kv.written = sequence.tokens[:entries]
        self.keep(sequence, kv, entries, tokens)

    def _draft(
        self, rows: list[PlanRow], inits: list[SlotInit], going: list[tuple[DraftKv, int, int]]
    ) -> set[int]:
        """Launches all passes, then reads them: a GPU is not waited for in between. Returns the slots of rows
        that failed."""
        failed = set[int]()
        sampling = {kv.slot: kv for kv, _, _ in going}
        launched = [self._launch(rows, inits)]
        for depth in range(1, max((most for _, _, most in going), default=0)):
            rows = [
                PlanRow(kv.slot, None, tokens + depth - 1, kv.tables, (kv.slot,))
                for kv, tokens, most in going
                if most > depth
            ]
            launched.append(self._launch(rows, ()))
        for plan, launched_step in launched:
            for row, result in zip(plan.rows, self._runner.read(launched_step).rows, strict=True):
                kv = sampling.get(row.slot)
                if result.error is not None:
                    failed.add(row.slot)
                    sampling.pop(row.slot, None)
                elif row.sample and kv is not None:
                    kv.guess += result.tokens
        for kv, _, _ in going:
            kv.written += kv.guess[:-1]
        return failed

    def _launch(self, rows: Sequence[PlanRow], inits: Sequence[SlotInit]) -> tuple[StepPlan, Any]:
        self._launched += 1
        plan = StepPlan(self._launched, tuple(rows), tuple(inits))
        return plan, self._runner.launch(plan)
