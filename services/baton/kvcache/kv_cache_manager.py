"""Moves pages between the allocator, the prefix tree and the sequences that hold them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count as counter
from typing import TYPE_CHECKING

from baton.kvcache import kv_groups
from baton.kvcache.block_table import BlockTable
from baton.kvcache.kv_events import content_digest
from baton.kvcache.kv_groups import NO_PAGE
from baton.kvcache.page_allocator import (
    AccountingError,
    OutOfPages,
    PageAllocator,
    PageCounts,
    PageState,
    require,
)
from baton.kvcache.prefix_tree import PrefixTree, TokenKey
from baton.kvcache.tree_node import PageRow, TreeNode
from baton.kvcache.tree_observer import TreeObserver
from baton.kvcache.tree_walk import TreeWalk
from baton.layers.cache_spec import State

if TYPE_CHECKING:
    from baton.kvcache.host_tier import HostTier


class KvCacheManager:
    """The pages of one pool. For one thread.

    Every page that leaves a sequence does so by `release`, and only once the last launched step that uses it
    has retired and nothing pins it.
    """

    def __init__(self, allocator: PageAllocator, tree: PrefixTree) -> None:
        self.page_size, self.row_bytes, self.images = tree.page_size, tree.row_bytes, tree.images
        self.groups = tree.groups
        self._allocator = allocator
        self._tree = tree
        self._holdings: set[BlockTable] = set()
        self._waiting: list[tuple[int, int, BlockTable]] = []
        self._serials = counter()
        self._retired = 0
        self._pending = 0
        self._windows = [(i, group) for i, group in enumerate(self.groups) if group.spec.rows_may_lack]
        self.has_windows = bool(self._windows)
        """Whether `drop` ever has anything to do."""
        self.has_states = any(isinstance(group.spec, State) for group in self.groups)
        self.tier: HostTier | None = None
        """Keeps what this pool evicts; sets this itself."""

    def encode(self, tokens: Sequence[int]) -> bytes:
        """Encodes tokens that are looked up several times: see PrefixTree.encode."""
        return self._tree.encode(tokens)

    @property
    def version(self) -> int:
        """Changes whenever the set of cached prefixes may have changed."""
        return self._tree.version

    def peak(self, tokens: int, ahead: int) -> int:
        """Most pages at a time of a sequence that grows to `tokens` tokens: see CacheSpec.peak."""
        return kv_groups.peak(self.groups, tokens, self.page_size, ahead)

    def longest(self, limit: int, ahead: int) -> int:
        """Tokens of the longest sequence, of `limit` at most, that fits into the whole pool."""
        return kv_groups.longest(self.groups, self.counts().total, limit, self.page_size, ahead)

    def hold(
        self,
        tokens: TokenKey,
        namespace: str = "",
        max_rows: int | None = None,
        position: int | None = None,
    ) -> BlockTable:
        """Begins a sequence: finds and locks the longest usable cached prefix, of `max_rows` page indexes at
        most. `position`: the first that will be computed here; None: the one that follows the prefix."""
        node, rows = self._tree.match(tokens, namespace, max_rows, position)
        self._tree.lock(node)
        tables = [list(table) for table in zip(*rows, strict=True)] if rows else [[] for _ in self.groups]
        size = self.page_size
        if position is None:
            dropped = [group.spec.sees(len(rows) * size, size) for group in self.groups]
        else:
            dropped = [group.spec.keeps(position, size) for group in self.groups]
        for i, _ in self._windows:
            table, first = tables[i], min(dropped[i], len(rows))
            table[:first] = [NO_PAGE] * first
            self._tree.windows.reference(table[first:])
        holding = BlockTable(tables, namespace, node, dropped)
        self._holdings.add(holding)
        return holding

    def find(self, tokens: TokenKey, namespace: str, max_rows: int, position: int) -> list[PageRow]:
        """The pages that `hold` with these arguments would find. Counts as a use, and holds nothing: they may
        be evicted at any time."""
        return self._tree.match(tokens, namespace, max_rows, position)[1]

    def walk(self, namespace: str) -> TreeWalk:
        """For a sequence, to see what followed its tokens in earlier ones."""
        return TreeWalk(self._tree, namespace)

    def leaving(self, pages: int) -> Iterator[TreeNode]:
        """See PrefixTree.leaving."""
        return self._tree.leaving(pages)

    def path_of(self, node: TreeNode) -> tuple[str, bytes, list[PageRow]]:
        """See PrefixTree.path_of."""
        return self._tree.path_of(node)

    def match_length(self, tokens: TokenKey, namespace: str = "", max_rows: int | None = None) -> int:
        """Tokens of `tokens` that `hold` would find, in whole pages; changes nothing."""
        return self._tree.match_length(tokens, namespace, max_rows) * self.page_size

    def known_length(self, tokens: TokenKey, namespace: str = "") -> int:
        """Tokens, in whole pages, with which an earlier sequence began; `hold` may find fewer of them."""
        return self._tree.find(tokens, namespace)[1] * self.page_size

    def matched(self, rows: int) -> int:
        """Pages that a holding has which was made with `rows` cached page indexes."""
        at = rows * self.page_size
        return sum(rows - group.spec.sees(at, self.page_size) for group in self.groups)

    def unlocked(self, tokens: TokenKey, namespace: str, rows: int, position: int | None = None) -> int:
        """By how many pages `hold` with these arguments, where so many rows are usable, would lower
        `available`; changes nothing."""
        return self._tree.unlocked_pages(tokens, rows, namespace, position)

    def content(self, holding: BlockTable) -> bytes:
        """kv_events.content_digest of the holding's pages in the tree, by what the tree says that they
        hold."""
        return content_digest(self.page_size, *self._tree.path_key(holding.node))

    @property
    def locks(self) -> int:
        """How many sequences, leases and copies hold pages."""
        return len(self._holdings)

    def observe(self, observer: TreeObserver | None, before: TreeObserver | None = None) -> None:
        """See PrefixTree.observe."""
        self._tree.observe(observer, before)

    def lacking(self, holding: BlockTable, rows: int) -> int:
        """Pages that `extend` to `rows` page indexes would take."""
        begin = len(holding)
        pairs = zip(self.groups, holding.dropped, strict=True)
        return sum(len(group.spec.takes(max(begin, dropped), rows)) for group, dropped in pairs)

    def extend(self, holding: BlockTable, rows: int) -> int:
        """Extends the page tables to `rows` page indexes, evicting cached pages where too few are free.
        Returns the number of pages taken: a group takes none for indexes that it has dropped, and those of
        the others that its spec names.

        Raises OutOfPages, having changed nothing, when that is not enough.
        """
        self._require_held(holding)
        begin, count = len(holding), self.lacking(holding, rows)
        if count > self.available:
            raise OutOfPages(
                f"{count} pages wanted, {self._allocator.free} free, {self._tree.evictable} evictable"
            )
        if count > self._allocator.free:
            self._allocator.drop_cached(self._tree.evict(count - self._allocator.free))
        pages = self._allocator.take(count)
        holding.owned.update(pages)
        for table, group, dropped in zip(holding.tables, self.groups, holding.dropped, strict=True):
            taken = len(group.spec.takes(max(begin, dropped), rows))
            table += [NO_PAGE] * (rows - begin - taken)
            table += pages[:taken]
            del pages[:taken]
        holding.changed()
        return count

    def drop(self, holding: BlockTable, position: int) -> int:
        """No later row of the sequence begins before `position`, and all steps that begin there have retired:
        gives up the pages that it no longer keeps. They are freed, or stay cached.
        Returns by how much `available` has grown. Does nothing while the holding is pinned."""
        self._require_held(holding)
        if holding.pins:
            return 0
        before = self.available
        for i, group in self._windows:
            table, dropped = holding.tables[i], holding.dropped[i]
            first = min(group.spec.keeps(position, self.page_size), len(table))
            if first > dropped:
                self._leave(holding, table[dropped:first])
                table[dropped:first] = [NO_PAGE] * (first - dropped)
                holding.dropped[i] = first
                holding.changed()
        return self.available - before

    def _leave(self, holding: BlockTable, pages: Sequence[int]) -> None:
        """Gives up these pages of a window group."""
        owned = holding.owned.intersection(pages)
        self._allocator.give_back(owned)
        holding.owned -= owned
        self._tree.windows.unreference([page for page in pages if page != NO_PAGE and page not in owned])

    def commit(
        self, holding: BlockTable, tokens: TokenKey, namespace: str = "", spare: int | None = None
    ) -> None:
        """Inserts into the tree the full pages that `tokens`, the sequence from its start, cover.

        The caller knows that their contents are final once all launched steps have run. May be called again
        as the sequence grows. Pages that the tree holds already under other ids stay owned, and those of the
        tree are locked: `available` falls by as many of them as nobody had locked. Where these are more than
        `spare`, nothing is inserted now. None: whatever it takes.
        Raises ValueError when the page table is shorter than the tokens or the namespace not the holding's.
        """
        self._require_held(holding)
        if namespace != holding.namespace:
            raise ValueError(f"held in namespace {holding.namespace!r}, committed in {namespace!r}")
        end = self._tree.whole_rows(tokens)
        if end > len(holding):
            raise ValueError(f"{end} pages of tokens for a page table of {len(holding)} pages")
        rows = list(zip(*(table[holding.committed : end] for table in holding.tables), strict=True))
        if not rows:
            return
        for row in rows:
            for page in row:
                if page not in holding.owned and page != NO_PAGE:
                    raise AccountingError(f"page {page} is not owned by its holding and cannot be cached")
        stride = self._tree.row_bytes if isinstance(tokens, bytes) else self.page_size
        fresh = tokens[holding.committed * stride :]
        if spare is not None:
            unlocked = self._tree.unlocked_rows(fresh, len(rows), namespace, holding.node)
            if unlocked * self._tree.full_groups > spare:
                return
        # Unlocked first, so that the tree may extend a node that no other holding has locked.
        self._tree.unlock(holding.node)
        try:
            holding.node, taken = self._tree.insert(fresh, rows, namespace, after=holding.node)
            first, holding.committed = holding.committed, end
        finally:
            self._tree.lock(holding.node)
        self._allocator.to_cached(taken)
        cached = set(taken)
        holding.owned -= cached
        for i, _ in self._windows:
            self._tree.windows.reference([p for p in holding.tables[i][first:end] if p in cached])

    def pin(self, holding: BlockTable) -> None:
        """A lease on the holding or a pull into it begins."""
        self._require_held(holding)
        holding.pins += 1

    def unpin(self, holding: BlockTable) -> None:
        """A lease or pull has ended; a pull ends when its transport has reported completion."""
        if holding.pins == 0:
            raise AccountingError("a holding was unpinned more often than pinned")
        holding.pins -= 1
        if holding.release_step is not None and holding.release_step <= self._retired:
            self._free(holding)

    def release(self, holding: BlockTable, after_step: int) -> None:
        """Gives the holding up, exactly once. Its pages are freed when step `after_step`, the last launched
        one that uses them, has retired and the last pin is gone, perhaps at once. Step 0 is before every
        step."""
        self._require_held(holding)
        holding.release_step = after_step
        self._pending += 1
        if holding.release_step <= self._retired:
            self._free(holding)
        else:
            heapq.heappush(self._waiting, (holding.release_step, next(self._serials), holding))

    def retire(self, step: int) -> None:
        """This step and all earlier ones have retired: performs the releases that waited for them."""
        self._retired = max(self._retired, step)
        while self._waiting and self._waiting[0][0] <= self._retired:
            self._free(heapq.heappop(self._waiting)[2])

    def withdraw(self, holding: BlockTable) -> None:
        """What the tree holds of this sequence is damaged: nobody finds it, or what follows it, any more."""
        if self.tier is not None and holding.committed:
            first = self._tree.path_of(holding.node)[1][: self._tree.row_bytes]
            self.tier.withdraw(holding.namespace, first)
        self._tree.withdraw(holding.node)

    def withdraw_prefix(self, first: bytes, namespace: str) -> None:
        """Withdraws all that begins with a page of these tokens, 4 bytes each."""
        self._tree.withdraw_prefix(first, namespace)

    def quarantine(self, holding: BlockTable, pages: Iterable[int]) -> None:
        """Withdraws owned pages of the holding: something may still write them. Possible until a released
        holding's last `unpin`; pages that have not been recovered by then are lost."""
        withdrawn = list(pages)
        for page in withdrawn:
            if page not in holding.owned:
                raise AccountingError(f"page {page} is not owned by its holding and cannot be quarantined")
        self._allocator.quarantine(withdrawn)
        holding.owned.difference_update(withdrawn)

    def recover(self, holding: BlockTable, pages: Iterable[int]) -> None:
        """Nothing writes these quarantined pages any more: they are the holding's again. Before its last
        `unpin`."""
        found = list(pages)
        self._allocator.recover(found)
        holding.owned.update(found)

    @property
    def available(self) -> int:
        """Pages that `extend` could take now."""
        return self._allocator.free + self._tree.evictable

    @property
    def pending(self) -> int:
        """Releases that wait for a step or a pin."""
        return self._pending

    @contextmanager
    def borrowed(self, count: int) -> Iterator[list[int]]:
        """Free pages, for a step that ends within the block. Nothing is evicted for them. Raises
        OutOfPages."""
        pages = self._allocator.take(count)
        try:
            yield pages
        finally:
            self._allocator.give_back(pages)

    def generation(self, page: int) -> int:
        return self._allocator.generation(page)

    def counts(self) -> PageCounts:
        return self._allocator.counts()

    def states(self) -> bytearray:
        """See PageAllocator.states."""
        return self._allocator.states()

    def cached_pages(self) -> Iterator[tuple[str, int]]:
        """All pages of the tree, with their namespaces."""
        return self._tree.pages()

    def check(self, idle: bool = False) -> None:
        """Compares allocator, tree and holdings, O(pages). Raises AccountingError.

        `idle`: also that nothing is held, locked or waiting, so that free + cached + quarantined = total.
        """
        self._allocator.check()
        self._tree.check()
        counts, state = self._allocator.counts(), self._allocator.state
        wrong = [page for _, page in self._tree.pages() if state(page) is not PageState.CACHED]
        require(not wrong, f"pages {wrong} of the tree are not cached")
        require(
            self._tree.cached == counts.cached,
            f"{counts.cached} cached pages, {self._tree.cached} in the tree",
        )
        owned = [page for holding in self._holdings for page in holding.owned]
        wrong = [page for page in owned if state(page) is not PageState.OWNED]
        require(not wrong, f"pages {wrong} of holdings are not owned")
        require(
            len(owned) == counts.owned == len(set(owned)), f"{counts.owned} owned pages, {len(owned)} held"
        )
        require(
            self._tree.locks == len(self._holdings),
            f"{self._tree.locks} locks, {len(self._holdings)} holdings",
        )
        used = Counter(page for holding in self._holdings for page in self._referenced(holding))
        require(
            used == self._tree.windows.references,
            "window pages of holdings are not those kept",
        )
        released = sum(holding.released for holding in self._holdings)
        require(released == self._pending, f"{self._pending} releases pending, {released} holdings released")
        if idle:
            require(not self._holdings, f"{len(self._holdings)} holdings at idle")
            require(counts.owned == 0, f"{counts.owned} pages owned at idle")

    def _free(self, holding: BlockTable) -> None:
        if holding.pins:
            return
        self._tree.windows.unreference(self._referenced(holding))
        self._tree.unlock(holding.node)
        self._allocator.give_back(holding.owned)
        holding.owned.clear()
        self._holdings.remove(holding)
        self._pending -= 1

    def _referenced(self, holding: BlockTable) -> list[int]:
        """The tree's pages of window groups that the holding uses."""
        return [
            page
            for i, _ in self._windows
            for page in holding.tables[i][holding.dropped[i] : holding.committed]
            if page != NO_PAGE and page not in holding.owned
        ]

    def _require_held(self, holding: BlockTable) -> None:
        if holding.released:
            raise AccountingError("a holding was used after its release, or released twice")
        if holding not in self._holdings:
            raise AccountingError("a holding of another cache")
