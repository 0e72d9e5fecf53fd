"""Moves pages between the allocator, the prefix tree and the sequences that hold them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.kvcache.page_allocator import (
    AccountingError,
    OutOfPages,
    PageAllocator,
    PageCounts,
    PageState,
    require,
)
from baton.kvcache.prefix_tree import Node, PrefixTree, Tokens, TreeObserver


@dataclass(slots=True, eq=False)
class Holding:
    """What one sequence holds. Made by `KvCache.hold`, given up by `KvCache.release`.

    Each page of the page table is one of
      matched  the first `shared` pages: the tree's, locked by this holding;
      owned    taken by `extend`, in `owned`: only this sequence writes it, the holding gives it back;
      cached   was owned until `commit` gave it to the tree; locked by this holding, final.
    Quarantined pages stay in the table and belong to none of these.
    """

    pages: list[int]
    """Page table: page ids in the order of the tokens. Changed by `extend` only."""
    namespace: str
    node: Node
    """Where the tree's part of the page table ends; locked."""
    owned: set[int] = field(default_factory=set)
    pins: int = 0
    """Leases and pulls that have not ended yet."""
    release_step: int | None = None
    """Set by the release: the step after which the pages are freed."""
    shared: int = field(init=False)
    """Leading pages that were found in the tree."""
    committed: int = field(init=False)
    """Leading pages whose tokens are in the tree, with these or with other page ids."""

    def __post_init__(self) -> None:
        self.shared = self.committed = len(self.pages)

    @property
    def released(self) -> bool:
        return self.release_step is not None


class KvCache:
    """The pages of one pool. For one thread.

    Every page that leaves a sequence does so by `release`, and only once the last launched step that uses it
    has retired and nothing pins it.
    """

    def __init__(self, allocator: PageAllocator, tree: PrefixTree) -> None:
        self.page_size = tree.page_size
        self._allocator = allocator
        self._tree = tree
        self._holdings: set[Holding] = set()
        self._waiting: list[tuple[int, int, Holding]] = []
        self._serial = 0
        self._retired = 0
        self._pending = 0

    def encode(self, tokens: Sequence[int]) -> bytes:
        """Encodes tokens that are looked up several times: see PrefixTree.encode."""
        return self._tree.encode(tokens)

    @property
    def version(self) -> int:
        """Changes whenever the set of cached prefixes may have changed."""
        return self._tree.version

    def hold(self, tokens: Tokens, namespace: str = "", max_pages: int | None = None) -> Holding:
        """Begins a sequence: finds and locks the longest cached prefix, of `max_pages` pages at most."""
        node, pages = self._tree.match(tokens, namespace, max_pages)
        self._tree.lock(node)
        holding = Holding(pages, namespace, node)
        self._holdings.add(holding)
        return holding

    def match_length(self, tokens: Tokens, namespace: str = "", max_pages: int | None = None) -> int:
        """Tokens of `tokens` that are cached, in whole pages; changes nothing."""
        return self._tree.match_length(tokens, namespace, max_pages) * self.page_size

    def unlocked(self, tokens: Tokens, namespace: str, max_pages: int) -> int:
        """By how many pages `hold` with these arguments would lower `available`; changes nothing."""
        return self._tree.unlocked_length(tokens, max_pages, namespace)

    def observe(self, observer: TreeObserver | None) -> None:
        """See PrefixTree.observe."""
        self._tree.observe(observer)

    def extend(self, holding: Holding, count: int) -> list[int]:
        """Takes `count` pages for the end of the page table, evicting cached ones where too few are free.

        Raises OutOfPages, having changed nothing, when that is not enough.
        """
        self._require_held(holding)
        if count > self.available:
            raise OutOfPages(
                f"{count} pages wanted, {self._allocator.free} free, {self._tree.evictable} evictable"
            )
        if count > self._allocator.free:
            self._allocator.drop_cached(self._tree.evict(count - self._allocator.free))
        pages = self._allocator.take(count)
        holding.pages += pages
        holding.owned.update(pages)
        return pages

    def commit(
        self, holding: Holding, tokens: Sequence[int], namespace: str = "", spare: int | None = None
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
        end = len(tokens) // self.page_size
        if end > len(holding.pages):
            raise ValueError(f"{len(tokens)} tokens for a page table of {len(holding.pages)} pages")
        pages = holding.pages[holding.committed : end]
        if not pages:
            return
        for page in pages:
            if page not in holding.owned:
                raise AccountingError(f"page {page} is not owned by its holding and cannot be cached")
        fresh = tokens[holding.committed * self.page_size :]
        if (
            spare is not None
            and self._tree.unlocked_length(fresh, len(pages), namespace, holding.node) > spare
        ):
            return
        # Unlocked first, so that the tree may extend a node that no other holding has locked.
        self._tree.unlock(holding.node)
        try:
            holding.node, present = self._tree.insert(fresh, pages, namespace, after=holding.node)
            holding.committed = end
        finally:
            self._tree.lock(holding.node)
        cached = pages[present:]
        self._allocator.to_cached(cached)
        holding.owned.difference_update(cached)

    def pin(self, holding: Holding) -> None:
        """A lease on the holding or a pull into it begins."""
        self._require_held(holding)
        holding.pins += 1

    def unpin(self, holding: Holding) -> None:
        """A lease or pull has ended; a pull ends when its transport has reported completion."""
        if holding.pins == 0:
            raise AccountingError("a holding was unpinned more often than pinned")
        holding.pins -= 1
        if holding.release_step is not None and holding.release_step <= self._retired:
            self._free(holding)

    def release(self, holding: Holding, after_step: int) -> None:
        """Gives the holding up, exactly once. Its pages are freed when step `after_step`, the last launched
        one that uses them, has retired and the last pin is gone, perhaps at once. Step 0 is before every
        step."""
        self._require_held(holding)
        holding.release_step = after_step
        self._pending += 1
        if holding.release_step <= self._retired:
            self._free(holding)
        else:
            self._serial += 1
            heapq.heappush(self._waiting, (holding.release_step, self._serial, holding))

    def retire(self, step: int) -> None:
        """This step and all earlier ones have retired: performs the releases that waited for them."""
        self._retired = max(self._retired, step)
        while self._waiting and self._waiting[0][0] <= self._retired:
            self._free(heapq.heappop(self._waiting)[2])

    def quarantine(self, holding: Holding, pages: Iterable[int]) -> None:
        """Withdraws owned pages of the holding: something may still write them. Possible until a released
        holding's last `unpin`; pages that have not been recovered by then are lost."""
        withdrawn = list(pages)
        for page in withdrawn:
            if page not in holding.owned:
                raise AccountingError(f"page {page} is not owned by its holding and cannot be quarantined")
        self._allocator.quarantine(withdrawn)
        holding.owned.difference_update(withdrawn)

    def recover(self, holding: Holding, pages: Iterable[int]) -> None:
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

    def generation(self, page: int) -> int:
        return self._allocator.generation(page)

    def counts(self) -> PageCounts:
        return self._allocator.counts()

    def states(self) -> bytearray:
        """See PageAllocator.states."""
        return self._allocator.states()

    def check(self, idle: bool = False) -> None:
        """Compares allocator, tree and holdings, O(pages). Raises AccountingError.

        `idle`: also that nothing is held, locked or waiting, so that free + cached + quarantined = total.
        """
        self._allocator.check()
        self._tree.check()
        counts, state = self._allocator.counts(), self._allocator.state
        wrong = [page for page in self._tree.pages() if state(page) is not PageState.CACHED]
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
        released = sum(holding.released for holding in self._holdings)
        require(released == self._pending, f"{self._pending} releases pending, {released} holdings released")
        if idle:
            require(not self._holdings, f"{len(self._holdings)} holdings at idle")
            require(counts.owned == 0, f"{counts.owned} pages owned at idle")

    def _free(self, holding: Holding) -> None:
        if holding.pins:
            return
        self._tree.unlock(holding.node)
        self._allocator.give_back(holding.owned)
        holding.owned.clear()
        self._holdings.remove(holding)
        self._pending -= 1

    def _require_held(self, holding: Holding) -> None:
        if holding.released:
            raise AccountingError("a holding was used after its release, or released twice")
        if holding not in self._holdings:
            raise AccountingError("a holding of another cache")
