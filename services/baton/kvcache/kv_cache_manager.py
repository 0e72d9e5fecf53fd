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
        self._block_tables: set[BlockTable] = set()
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
        block_table = BlockTable(tables, namespace, node, dropped)
        self._block_tables.add(block_table)
        return block_table

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
        """Pages of a block table that was made with `rows` cached page indexes."""
        at = rows * self.page_size
        return sum(rows - group.spec.sees(at, self.page_size) for group in self.groups)

    def unlocked(self, tokens: TokenKey, namespace: str, rows: int, position: int | None = None) -> int:
        """By how many pages `hold` with these arguments, where so many rows are usable, would lower
        `available`; changes nothing."""
        return self._tree.unlocked_pages(tokens, rows, namespace, position)

    def content(self, block_table: BlockTable) -> bytes:
        """kv_events.content_digest of the block table's pages in the tree, by what the tree says that they
        hold."""
        return content_digest(self.page_size, *self._tree.path_key(block_table.node))

    @property
    def locks(self) -> int:
        """How many sequences, leases and copies hold pages."""
        return len(self._block_tables)

    def observe(self, observer: TreeObserver | None, before: TreeObserver | None = None) -> None:
        """See PrefixTree.observe."""
        self._tree.observe(observer, before)

    def lacking(self, block_table: BlockTable, rows: int) -> int:
        """Pages that `extend` to `rows` page indexes would take."""
        begin = len(block_table)
        pairs = zip(self.groups, block_table.dropped, strict=True)
        return sum(len(group.spec.takes(max(begin, dropped), rows)) for group, dropped in pairs)

    def extend(self, block_table: BlockTable, rows: int) -> int:
        """Extends the page tables to `rows` page indexes, evicting cached pages where too few are free.
        Returns the number of pages taken: a group takes none for indexes that it has dropped, and those of
        the others that its spec names.

        Raises OutOfPages, having changed nothing, when that is not enough.
        """
        self._require_held(block_table)
        begin, count = len(block_table), self.lacking(block_table, rows)
        if count > self.available:
            raise OutOfPages(
                f"{count} pages wanted, {self._allocator.free} free, {self._tree.evictable} evictable"
            )
        if count > self._allocator.free:
            self._allocator.drop_cached(self._tree.evict(count - self._allocator.free))
        pages = self._allocator.take(count)
        block_table.owned.update(pages)
        for table, group, dropped in zip(block_table.tables, self.groups, block_table.dropped, strict=True):
            taken = len(group.spec.takes(max(begin, dropped), rows))
            table += [NO_PAGE] * (rows - begin - taken)
            table += pages[:taken]
            del pages[:taken]
        block_table.changed()
        return count

    def drop(self, block_table: BlockTable, position: int) -> int:
        """No later row of the sequence begins before `position`, and all steps that begin there have retired:
        gives up the pages that it no longer keeps. They are freed, or stay cached.
        Returns by how much `available` has grown. Does nothing while the block table is pinned."""
        self._require_held(block_table)
        if block_table.pins:
            return 0
        before = self.available
        for i, group in self._windows:
            table, dropped = block_table.tables[i], block_table.dropped[i]
            first = min(group.spec.keeps(position, self.page_size), len(table))
            if first > dropped:
                self._leave(block_table, table[dropped:first])
                table[dropped:first] = [NO_PAGE] * (first - dropped)
                block_table.dropped[i] = first
                block_table.changed()
        return self.available - before

    def _leave(self, block_table: BlockTable, pages: Sequence[int]) -> None:
        """Gives up these pages of a window group."""
        owned = block_table.owned.intersection(pages)
        self._allocator.give_back(owned)
        block_table.owned -= owned
        self._tree.windows.unreference([page for page in pages if page != NO_PAGE and page not in owned])

    def commit(
        self, block_table: BlockTable, tokens: TokenKey, namespace: str = "", spare: int | None = None
    ) -> None:
        """Inserts into the tree the full pages that `tokens`, the sequence from its start, cover.

        The caller knows that their contents are final once all launched steps have run. May be called again
        as the sequence grows. Pages that the tree holds already under other ids stay owned, and those of the
        tree are locked: `available` falls by as many of them as nobody had locked. Where these are more than
        `spare`, nothing is inserted now. None: whatever it takes.
        Raises ValueError when the page table is shorter than the tokens or the namespace not the table's.
        """
        self._require_held(block_table)
        if namespace != block_table.namespace:
            raise ValueError(f"held in namespace {block_table.namespace!r}, committed in {namespace!r}")
        end = self._tree.whole_rows(tokens)
        if end > len(block_table):
            raise ValueError(f"{end} pages of tokens for a page table of {len(block_table)} pages")
        rows = list(zip(*(table[block_table.committed : end] for table in block_table.tables), strict=True))
        if not rows:
            return
        for row in rows:
            for page in row:
                if page not in block_table.owned and page != NO_PAGE:
                    raise AccountingError(f"page {page} is not owned by its block table and cannot be cached")
        stride = self._tree.row_bytes if isinstance(tokens, bytes) else self.page_size
        fresh = tokens[block_table.committed * stride :]
        if spare is not None:
            unlocked = self._tree.unlocked_rows(fresh, len(rows), namespace, block_table.node)
            if unlocked * self._tree.full_groups > spare:
                return
        # Unlocked first, so that the tree may extend a node that no other block table has locked.
        self._tree.unlock(block_table.node)
        try:
            block_table.node, taken = self._tree.insert(fresh, rows, namespace, after=block_table.node)
            first, block_table.committed = block_table.committed, end
        finally:
            self._tree.lock(block_table.node)
        self._allocator.to_cached(taken)
        cached = set(taken)
        block_table.owned -= cached
        for i, _ in self._windows:
            self._tree.windows.reference([p for p in block_table.tables[i][first:end] if p in cached])

    def pin(self, block_table: BlockTable) -> None:
        """A lease on the block table or a pull into it begins."""
        self._require_held(block_table)
        block_table.pins += 1

    def unpin(self, block_table: BlockTable) -> None:
        """A lease or pull has ended; a pull ends when its transport has reported completion."""
        if block_table.pins == 0:
            raise AccountingError("a block table was unpinned more often than pinned")
        block_table.pins -= 1
        if block_table.release_step is not None and block_table.release_step <= self._retired:
            self._free(block_table)

    def release(self, block_table: BlockTable, after_step: int) -> None:
        """Gives the block table up, exactly once. Its pages are freed when step `after_step`, the last
        launched one that uses them, has retired and the last pin is gone, perhaps at once. Step 0 is before
        every step."""
        self._require_held(block_table)
        block_table.release_step = after_step
        self._pending += 1
        if block_table.release_step <= self._retired:
            self._free(block_table)
        else:
            heapq.heappush(self._waiting, (block_table.release_step, next(self._serials), block_table))

    def retire(self, step: int) -> None:
        """This step and all earlier ones have retired: performs the releases that waited for them."""
        self._retired = max(self._retired, step)
        while self._waiting and self._waiting[0][0] <= self._retired:
            self._free(heapq.heappop(self._waiting)[2])

    def withdraw(self, block_table: BlockTable) -> None:
        """What the tree holds of this sequence is damaged: nobody finds it, or what follows it, any more."""
        if self.tier is not None and block_table.committed:
            first = self._tree.path_of(block_table.node)[1][: self._tree.row_bytes]
            self.tier.withdraw(block_table.namespace, first)
        self._tree.withdraw(block_table.node)

    def withdraw_prefix(self, first: bytes, namespace: str) -> None:
        """Withdraws all that begins with a page of these tokens, 4 bytes each."""
        self._tree.withdraw_prefix(first, namespace)

    def quarantine(self, block_table: BlockTable, pages: Iterable[int]) -> None:
        """Withdraws owned pages of the block table: something may still write them. Possible until a released
        block table's last `unpin`; pages that have not been recovered by then are lost."""
        withdrawn = list(pages)
        for page in withdrawn:
            if page not in block_table.owned:
                raise AccountingError(
                    f"page {page} is not owned by its block table and cannot be quarantined"
                )
        self._allocator.quarantine(withdrawn)
        block_table.owned.difference_update(withdrawn)

    def recover(self, block_table: BlockTable, pages: Iterable[int]) -> None:
        """Nothing writes these quarantined pages any more: they are the block table's again. Before its last
        `unpin`."""
        found = list(pages)
        self._allocator.recover(found)
        block_table.owned.update(found)

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
        """Compares allocator, tree and block tables, O(pages). Raises AccountingError.

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
        owned = [page for block_table in self._block_tables for page in block_table.owned]
        wrong = [page for page in owned if state(page) is not PageState.OWNED]
        require(not wrong, f"pages {wrong} of block tables are not owned")
        require(
            len(owned) == counts.owned == len(set(owned)), f"{counts.owned} owned pages, {len(owned)} held"
        )
        require(
            self._tree.locks == len(self._block_tables),
            f"{self._tree.locks} locks, {len(self._block_tables)} block tables",
        )
        used = Counter(page for block_table in self._block_tables for page in self._referenced(block_table))
        require(
            used == self._tree.windows.references,
            "window pages of block tables are not those kept",
        )
        released = sum(block_table.released for block_table in self._block_tables)
        require(
            released == self._pending, f"{self._pending} releases pending, {released} block tables released"
        )
        if idle:
            require(not self._block_tables, f"{len(self._block_tables)} block tables at idle")
            require(counts.owned == 0, f"{counts.owned} pages owned at idle")

    def _free(self, block_table: BlockTable) -> None:
        if block_table.pins:
            return
        self._tree.windows.unreference(self._referenced(block_table))
        self._tree.unlock(block_table.node)
        self._allocator.give_back(block_table.owned)
        block_table.owned.clear()
        self._block_tables.remove(block_table)
        self._pending -= 1

    def _referenced(self, block_table: BlockTable) -> list[int]:
        """The tree's pages of window groups that the block table uses."""
        return [
            page
            for i, _ in self._windows
            for page in block_table.tables[i][block_table.dropped[i] : block_table.committed]
            if page != NO_PAGE and page not in block_table.owned
        ]

    def _require_held(self, block_table: BlockTable) -> None:
        if block_table.released:
            raise AccountingError("a block table was used after its release, or released twice")
        if block_table not in self._block_tables:
            raise AccountingError("a block table of another cache")
