"""Drafters with keys and values of their own, which travel with a prompt from the node that computes it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from baton.engine.draft.base import Drafter
from baton.engine.draft.kv_slots import DraftKv, DraftKvSlots
from baton.engine.request import EngineRequest
from baton.engine.request import Sequence as TokenSequence
from baton.engine.sampling_params import SamplingParams
from baton.kvcache import BlockTable


class PagedDrafter(Drafter):
    """A drafter whose pages hold *entries*: of a model one a token, of a head one a pair (see `heads`)."""

    computes = True
    slots: DraftKvSlots
    device: torch.device
    states: tuple[int, torch.dtype] | None = None
    """Values of a token's hidden states, as `observe` takes them, and their dtype; None: it reads none."""

    # --- where prompts are computed: `observe`, `fill`, `lend`, and `keep` ---

    @abstractmethod
    def fill(self, prompts: Sequence[tuple[TokenSequence, int]]) -> None:
        """Computes what is missing of the first so many tokens of each sequence, as far as there is room. A
        GPU does so behind what its stream holds; all pages are written in the order of that stream."""

    @abstractmethod
    def filled(self, sequence: TokenSequence) -> tuple[DraftKv, int] | None:
        """What is kept of the sequence, and the number of entries in its pages. None: there is nothing."""

    @abstractmethod
    def keep(self, sequence: TokenSequence, kv: DraftKv, entries: int, tokens: int) -> None:
        """`kv`'s pages hold so many entries of the sequence's first `tokens` tokens for good: later sequences
        may find them."""

    def fill_most(self, entries: int) -> None:
        """Computes so many entries of no prompt in one `fill` and forgets them: what its passes need is then
        allocated. Needs as many free pages."""
        count = entries if self.states is None else entries + 1
        (sequence,) = EngineRequest("", (0,) * count, SamplingParams()).sequences
        if self.states is not None:
            values, dtype = self.states
            self.observe(sequence, 0, torch.zeros(entries, values, dtype=dtype, device=self.device))
        self.fill([(sequence, count)])
        lent = self.lend(sequence)
        if lent is not None:
            self.slots.cache.release(lent, 0)

    def lend(self, sequence: TokenSequence) -> BlockTable | None:
        """Gives away what is kept of the sequence: its pages, which the caller releases. None: there is
        nothing."""
        found, sequence.drafting = self.filled(sequence), None
        return None if found is None else self.slots.lend(found[0])

    # --- where they are decoded: `room`, then `arrived`, or `slots.drop` ---

    @abstractmethod
    def room(self, sequence: TokenSequence, entries: int, tokens: int) -> DraftKv | None:
        """Pages for so many entries of the sequence's first `tokens` tokens, the first of which may be there
        (`found`). None: there is no room."""

    @abstractmethod
    def arrived(self, sequence: TokenSequence, kv: DraftKv, entries: int, tokens: int) -> None:
        """`room`'s pages hold the entries of the sequence's first `tokens` tokens. They may be what the
        sequence goes on from; `kv` may have lost its slot meanwhile."""
