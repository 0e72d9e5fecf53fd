"""What drafters with a model of their own keep of sequences: a batch slot and pages of a pool of their own.

Nobody tells a drafter that a sequence has ended. What was not used for longest makes room, and what a
sequence has lost is computed again if it is still wanted: drafts are guesses. Whole pages are found again by
later sequences, in a prefix tree of their own.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field, replace

from baton.engine.plan import SlotInit
from baton.engine.request import Sequence as TokenSequence
from baton.kvcache import FULL, BlockTable, KvCacheManager, PageAllocator, PrefixTree


@dataclass(slots=True, eq=False)
class DraftKv:
    """Keys and values of one sequence's drafts."""

    slot: int
    """-1: it has made room for others."""
    block_table: BlockTable
    written: list[int] = field(default_factory=list)
    """Tokens whose keys and values the pages hold, drafts among them."""
    agreed: int = 0
    """Those of them that are the sequence's, as far as is known."""
    used: int = 0
    """The last step that it was wanted in."""
    guess: list[int] = field(default_factory=list)
    """What follows the sequence's tokens in that step."""

    @property
    def found(self) -> int:
        """Leading page indexes that were kept from earlier sequences."""
        return self.block_table.shared

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """The page table of each KV group."""
        return self.block_table.page_tables()

    def agree(self, tokens: Sequence[int]) -> int:
        """How many of the tokens are written; forgets what is written behind them."""
        most = min(len(self.written), len(tokens))
        while self.agreed < most and self.written[self.agreed] == tokens[self.agreed]:
            self.agreed += 1
        del self.written[self.agreed :]
        return self.agreed


class DraftKvSlots:
    """Slots and pages of all sequences. Pages of windows are kept, whatever a window sees."""

    def __init__(
        self,
        slots: int,
        pages: int,
        page_size: int,
        groups: int,
        generations: MutableSequence[int] | None = None,
    ) -> None:
        """`generations`: of the pages, where others see them."""
        self._free = list(range(slots))
        tree = PrefixTree(page_size, groups=(FULL,) * groups)
        self.cache = KvCacheManager(PageAllocator(pages, generations), tree)
        self._kept: dict[DraftKv, None] = {}
        """Those with a slot, the one that was not used for longest first."""

    def take(
        self,
        kv: DraftKv | None,
        room: int,
        step: int,
        tokens: Sequence[int] = (),
        namespace: str = "",
        last: int = 1,
    ) -> DraftKv | None:
        """What is kept of a sequence (`kv`, as long as it has a slot, else anew), with pages for `room`
        tokens; None: there is no room beside what else this step uses. `tokens`: the sequence's, all but the
        `last` of which may be found where earlier ones were kept."""
        if kv is None or kv.slot < 0:
            if not self._free and not self._make_room(step):
                return None
            size = self.cache.page_size
            block_table = self.cache.hold(tokens, namespace, max(0, len(tokens) - last) // size)
            kv = DraftKv(self._free.pop(), block_table, list(tokens[: len(block_table) * size]))
        self.use(kv, step)
        rows = -(-room // self.cache.page_size)
        if rows <= len(kv.block_table):
            return kv
        while self.cache.lacking(kv.block_table, rows) > self.cache.available:
            if not self._make_room(step):
                return None
        self.cache.extend(kv.block_table, rows)
        return kv

    def use(self, kv: DraftKv, step: int) -> None:
        """It makes no room for others in this step."""
        self._kept.pop(kv, None)
        self._kept[kv] = None
        kv.used, kv.guess = step, []

    def keep(self, kv: DraftKv, tokens: Sequence[int], count: int) -> None:
        """Keys and values of the sequence's first `count` tokens are in its pages for good."""
        if count // self.cache.page_size > kv.block_table.committed:
            self.cache.commit(kv.block_table, tokens[:count], kv.block_table.namespace)

    def lend(self, kv: DraftKv) -> BlockTable:
        """Gives up its slot; its pages are the caller's to release."""
        self._free.append(kv.slot)
        kv.slot = -1
        del self._kept[kv]
        return kv.block_table

    def drop(self, kv: DraftKv, damaged: bool = False) -> None:
        """Gives up its slot, if it has one, and its pages. `damaged`: nobody may find these any more."""
        if kv.slot >= 0:
            if damaged:
                self.cache.withdraw(kv.block_table)
            self.cache.release(self.lend(kv), 0)

    def check(self) -> None:
        """Raises AccountingError."""
        self.cache.check()

    def _make_room(self, step: int) -> bool:
        oldest = next(iter(self._kept), None)
        if oldest is None or oldest.used == step:
            return False
        self.drop(oldest)
        return True


def slot_init(slot: int, sequence: TokenSequence) -> SlotInit:
    """The sequence's sampling state, without what only its answer needs. The grammar is not known here."""
    request = sequence.request
    params = replace(request.params, logprobs=None, prompt_logprobs=None, grammar=None)
    prompt = request.prompt if params.penalized else ()
    return SlotInit(slot, params, sequence.seed, prompt, tuple(sequence.tokens[len(request.prompt) :]))
