"""What drafters with a model of their own keep of sequences: a batch slot and pages of a pool of their own.

Nobody tells a drafter that a sequence has ended. What was not used for longest makes room, and what a
sequence has lost is computed again if it is still wanted: drafts are guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.engine.plan import SlotInit
from baton.engine.request import Sequence as TokenSequence
from baton.kvcache.page_allocator import PageAllocator


@dataclass(slots=True, eq=False)
class DraftKv:
    """Of one sequence."""

    slot: int
    """-1: it has made room for others."""
    written: list[int] = field(default_factory=list)
    """Tokens whose keys and values the pages hold, drafts among them."""
    agreed: int = 0
    """Those of them that are the sequence's, as far as is known."""
    tables: tuple[tuple[int, ...], ...] = ()
    """The page table of each KV group."""
    used: int = 0
    """The last step that it was wanted in."""
    guess: list[int] = field(default_factory=list)
    """What follows the sequence's tokens in that step."""

    def agree(self, tokens: Sequence[int]) -> int:
        """How many of the tokens are written; forgets what is written behind them."""
        most = min(len(self.written), len(tokens))
        while self.agreed < most and self.written[self.agreed] == tokens[self.agreed]:
            self.agreed += 1
        del self.written[self.agreed :]
        return self.agreed


class DraftKvSlots:
    """Slots and pages of all sequences. Pages of windows are kept, whatever a window sees."""

    def __init__(self, slots: int, pages: int, page_size: int, groups: int) -> None:
        self._free = list(range(slots))
        self._allocator = PageAllocator(pages)
        self._page_size, self._groups = page_size, groups
        self._kept: dict[DraftKv, None] = {}
        """Those with a slot, the one that was not used for longest first."""

    def take(self, kv: DraftKv | None, tokens: int, step: int) -> DraftKv | None:
        """What is kept of a sequence (`kv`, as long as it has a slot, else anew), with pages for so many
        tokens; None: there is no room beside what else this step uses."""
        if kv is None or kv.slot < 0:
            if not self._free and not self._make_room(step):
                return None
            kv = DraftKv(self._free.pop())
        self._kept.pop(kv, None)
        self._kept[kv] = None
        kv.used, kv.guess = step, []
        rows = -(-tokens // self._page_size)
        have = len(kv.tables[0]) if kv.tables else 0
        while (rows - have) * self._groups > self._allocator.counts().free:
            if not self._make_room(step):
                return None
        if rows > have:
            new = [tuple(self._allocator.take(rows - have)) for _ in range(self._groups)]
            kv.tables = tuple(a + b for a, b in zip(kv.tables or ((),) * self._groups, new, strict=True))
        return kv

    def drop(self, kv: DraftKv) -> None:
        """Gives up its slot and its pages."""
        self._free.append(kv.slot)
        self._allocator.give_back(page for table in kv.tables for page in table)
        kv.slot, kv.tables = -1, ()
        del self._kept[kv]

    def _make_room(self, step: int) -> bool:
        oldest = next(iter(self._kept), None)
        if oldest is None or oldest.used == step:
            return False
        self.drop(oldest)
        return True


def slot_init(slot: int, sequence: TokenSequence) -> SlotInit:
    """As the sequence's own, but without what only its answer needs. The grammar is not known here."""
    request = sequence.request
    params = replace(request.params, logprobs=None, prompt_logprobs=None, grammar=None)
    prompt = request.prompt if params.penalized else ()
    return SlotInit(slot, params, sequence.seed, prompt, tuple(sequence.tokens[len(request.prompt) :]))
