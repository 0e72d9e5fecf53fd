"""The prefix tree's pages of window groups. Unlike others they are held one by one, and evicted apart from
the rows they belong to: vLLM's hybrid KV cache manager and SGLang's radix cache for windows do so too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.kvcache.eviction import EvictionQueue, Policy
from baton.kvcache.kv_groups import NO_PAGE, KvGroup
from baton.kvcache.page_allocator import require
from baton.kvcache.tree_node import PageRow, TreeNode


class WindowPages:
    """References to pages of window groups in the tree, and which of them may be evicted.

    A row's page is *inner* where the node goes on beyond the window: only a sequence that leaves the node
    there would need it. Inner pages are evicted before whole rows, others only if nothing else can be
    evicted.
    """

    def __init__(self, groups: Sequence[KvGroup], page_size: int, policy: Policy) -> None:
        self.groups = [(index, group) for index, group in enumerate(groups) if group.spec.rows_may_lack]
        """Window groups, with their indices in a row."""
        self._page_size = page_size
        self.references: dict[int, int] = {}
        self._home: dict[int, TreeNode] = {}
        """The node of each page."""
        # A node with unreferenced pages is in one of these, or in both. If only in `_ends`, none is inner.
        self._inner = EvictionQueue(policy)
        self._ends = EvictionQueue(policy)

    @property
    def referenced(self) -> int:
        """Pages that cannot be evicted now."""
        return len(self.references)

    def usable(self, rows: Sequence[PageRow], position: int | None) -> int:
        """Length of the longest prefix of `rows` that holds what a sequence needs to go on at `position`
        (None: at the token that follows the prefix)."""
        length = len(rows)
        while length:
            missing = self._missing(rows, length, position)
            if missing is None:
                return length
            length = missing
        return 0

    def _missing(self, rows: Sequence[PageRow], length: int, position: int | None) -> int | None:
        """Index of the last row that lacks a page which is seen."""
        found: int | None = None
        for column, group in self.groups:
            for index in range(length - 1, group.spec.needs(length, position, self._page_size) - 1, -1):
                if rows[index][column] == NO_PAGE:
                    found = max(index, found or 0)
                    break
        return found

    def unreferenced(self, rows: Sequence[PageRow], position: int | None) -> int:
        """Number of pages that `usable` wants of these rows, and that are there and nobody references."""
        return sum(
            row[column] != NO_PAGE and row[column] not in self.references
            for column, group in self.groups
            for row in rows[group.spec.needs(len(rows), position, self._page_size) :]
        )

    def reference(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.references[page] = self.references.get(page, 0) + 1

    def unreference(self, pages: Iterable[int]) -> None:
        for page in pages:
            count = self.references[page] - 1
            if count:
                self.references[page] = count
            else:
                del self.references[page]
                self._inner.put(self._home[page])

    def moved(self, *nodes: TreeNode) -> None:
        """Takes note that these nodes have other rows than before."""
        for node in nodes:
            self._home.update((page, node) for page in self._pages(node))
            self._inner.put(node)

    def touched(self, node: TreeNode) -> None:
        """The node's usage has changed."""
        for queue in (self._inner, self._ends):
            if node in queue:
                queue.put(node)

    def removed(self, row: PageRow) -> None:
        """The tree holds the row no more."""
        for column, _ in self.groups:
            if row[column] != NO_PAGE:
                del self._home[row[column]]

    def forget(self, node: TreeNode) -> None:
        self._inner.discard(node)
        self._ends.discard(node)

    def fill(self, node: TreeNode, rows: Sequence[PageRow]) -> list[int]:
        """Takes those pages of `rows`, which hold the same as the node's, that the node lacks."""
        taken: list[int] = []
        for index, row in enumerate(rows):
            cached = node.rows[index]
            if NO_PAGE in cached and cached != row:
                filled = tuple(new if old == NO_PAGE else old for old, new in zip(cached, row, strict=True))
                taken += [new for old, new in zip(cached, filled, strict=True) if new != old]
                node.rows[index] = filled
        if taken:
            self.moved(node)
        return taken

    def evict_inner(self, count: int) -> list[int]:
        """Removes `count` inner pages or more, all of a node together; or all that there are."""
        evicted: list[int] = []
        while len(evicted) < count and (node := self._inner.first()) is not None:
            evicted += self._evict(node, inner=True)
            self._inner.discard(node)
            self._ends.put(node)
        return evicted

    def evict_ends(self, count: int) -> list[int]:
        """Evicts other pages of window groups, when there is no inner one left."""
        evicted: list[int] = []
        while len(evicted) < count and (node := self._ends.first()) is not None:
            evicted += self._evict(node, inner=False)
            self._ends.discard(node)
        return evicted

    def _evict(self, node: TreeNode, inner: bool) -> list[int]:
        evicted: list[int] = []
        for column, group in self.groups:
            behind = group.spec.keeps(node.end * self._page_size, self._page_size) if inner else node.end
            for index in range(min(behind - node.first, len(node.rows))):
                row = node.rows[index]
                page = row[column]
                if page != NO_PAGE and page not in self.references:
                    node.rows[index] = (*row[:column], NO_PAGE, *row[column + 1 :])
                    del self._home[page]
                    evicted.append(page)
        return evicted

    def _pages(self, node: TreeNode) -> list[int]:
        return [row[column] for column, _ in self.groups for row in node.rows if row[column] != NO_PAGE]

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Raises AccountingError."""
        home: dict[int, TreeNode] = {}
        queued = 0
        for node in nodes:
            queued += (node in self._inner) + (node in self._ends)
            pages = self._pages(node)
            home.update(dict.fromkeys(pages, node))
            loose = any(page not in self.references for page in pages)
            require(
                not loose or node in self._inner or node in self._ends,
                "a node's window pages cannot be evicted",
            )
        require(queued == len(self._inner) + len(self._ends), "an evicted node waits for eviction")
        require(home == self._home, "window pages are not where they are said to be")
        require(self.references.keys() <= home.keys(), "a window page is referenced and not in the tree")
