"""A page-aligned radix tree from token sequences to the pages that hold their KV.

After the radix tree of SGLang's RadixAttention (Zheng et al., 2023, arXiv:2312.07104), over whole pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count as counter

from baton.kvcache.eviction import EvictionQueue, Policy, make_policy
from baton.kvcache.kv_groups import FULL, NO_PAGE, KvGroup
from baton.kvcache.page_allocator import AccountingError, require
from baton.kvcache.page_keys import page_key
from baton.kvcache.tree_node import PageRow, TreeNode
from baton.kvcache.tree_observer import WITHDRAWN, TreeObserver, report
from baton.kvcache.window_pages import WindowPages

TokenKey = Sequence[int] | bytes
"""Token ids, or what `PrefixTree.encode` has made of them."""


class PrefixTree:
    """Keys are a namespace and token ids (0 <= id < 2**32, or placeholders of images), values whole pages of
    `page_size` tokens: for each page index a row with the page of each group.

    A row's pages of groups that see all positions live and die with the row. A window group's may go earlier:
    a prefix is usable at a length where each window group holds what the next token sees.
    """

    def __init__(
        self,
        page_size: int,
        policy: str | Policy = "lru",
        groups: Sequence[KvGroup] = (FULL,),
        images: bool = False,
    ) -> None:
        """`images`: there may be placeholders among the tokens: see page_keys."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self.groups = tuple(groups)
        self.images = images
        self.row_bytes = self._stride = len(page_key([0] * page_size, page_size, images))
        """Bytes of a page's key."""
        self._policy = make_policy(policy)
        # Holds exactly the leaves without locks. Locks count upwards, so below a node without locks there are
        # none: every page outside locked nodes can be evicted, leaf after leaf. A window page in use is in a
        # locked node.
        self._queue = EvictionQueue(self._policy)
        self.windows = WindowPages(self.groups, page_size, self._policy)
        """Those that sequences use are referenced there; their rows are locked."""
        self._has_windows = bool(self.windows.groups)
        self.full_groups = len(self.groups) - len(self.windows.groups)
        """Pages of a row that live as long as the row."""
        self._root = TreeNode(None, ("", b""), b"", 0, [], [])
        self._ids = counter()
        self._observers: list[TreeObserver] = []
        self.version = 0
        """Counts changes of which pages are held."""
        self.cached = 0
        """Pages held."""
        self._locked_rows = 0
        self._now = 0

    def encode(self, tokens: TokenKey, max_rows: int | None = None) -> bytes:
        """The keys of the first `max_rows` whole pages. For who searches for the same tokens several times.

        Raises OverflowError for a token id that is out of range, as all methods that take token ids.
        """
        count = self.whole_rows(tokens)
        if max_rows is not None:
            count = min(count, max(0, max_rows))
        if isinstance(tokens, bytes):
            return tokens[: count * self._stride]
        return page_key(tokens[: count * self.page_size], self.page_size, self.images)

    def whole_rows(self, tokens: TokenKey) -> int:
        """Whole pages of tokens."""
        return len(tokens) // (self._stride if isinstance(tokens, bytes) else self.page_size)

    def match(
        self, tokens: TokenKey, namespace: str = "", max_rows: int | None = None, position: int | None = None
    ) -> tuple[TreeNode, list[PageRow]]:
        """Finds the longest usable prefix in whole pages, and counts as a use of it: its rows, and the node
        that ends with it. Locks nothing; the node is stale after an `evict`.

        `position`: the first that will be computed here; None: the one that follows the prefix.
        """
        node, inside, rows = self._descend(self._root, self.encode(tokens, max_rows), namespace)
        if self._has_windows:
            del rows[self.windows.usable(rows, position) :]
            while node.first >= len(rows) and node.parent is not None:
                node = node.parent
            inside = len(rows) - node.first
        if inside < len(node.rows):
            node = self._split(node, inside)
        self._touch(node, hits=1)
        return node, rows

    @staticmethod
    def path_key(node: TreeNode) -> tuple[str, bytes]:
        """Namespace and tokens, as `encode` has them, of the rows that lead to a node's end."""
        *nodes, _ = node.path()
        return (nodes[-1].child_key[0] if nodes else ""), b"".join(each.key for each in reversed(nodes))

    def match_length(self, tokens: TokenKey, namespace: str = "", max_rows: int | None = None) -> int:
        """Rows that `match` would find; changes nothing."""
        rows = self._descend(self._root, self.encode(tokens, max_rows), namespace)[2]
        return self.windows.usable(rows, None) if self._has_windows else len(rows)

    def find(self, tokens: TokenKey, namespace: str) -> tuple[TreeNode, int]:
        """The node in which the longest prefix of `tokens` ends that the tree has in whole pages, whether it
        is usable or not, and its rows. Changes nothing."""
        node, _, rows = self._descend(self._root, self.encode(tokens), namespace)
        return node, len(rows)

    def unlocked_rows(
        self, tokens: TokenKey, rows: int, namespace: str, after: TreeNode | None = None
    ) -> int:
        """Number of unlocked rows in the tree among the first `rows` of tokens that follow `after` (None: the
        beginning). Changes nothing."""
        after = self._root if after is None else after
        node, inside, _ = self._descend(after, self.encode(tokens, rows), namespace)
        count, size = 0, inside
        while node is not after and node.locks == 0:
            assert node.parent is not None
            count += size
            node = node.parent
            size = len(node.rows)
        return count

    def unlocked_pages(self, tokens: TokenKey, rows: int, namespace: str, position: int | None) -> int:
        """By how much `evictable` falls when a prefix of `rows` usable rows is matched and held."""
        count = self.unlocked_rows(tokens, rows, namespace) * self.full_groups
        if self._has_windows:
            found = self._descend(self._root, self.encode(tokens, rows), namespace)[2]
            count += self.windows.unreferenced(found, position)
        return count

    def lock(self, node: TreeNode) -> None:
        """Keeps the rows of the node and its ancestors from eviction, until as many calls of `unlock`."""
        if node.parent is None and node is not self._root:
            raise AccountingError("a node that was evicted cannot be locked")
        self._queue.discard(node)
        node.own_locks += 1
        for above in node.path():
            if above.locks == 0:
                self._locked_rows += len(above.rows)
            above.locks += 1

    def unlock(self, node: TreeNode) -> None:
        if node.own_locks == 0:
            raise AccountingError("a node was unlocked more often than locked")
        node.own_locks -= 1
        for above in node.path():
            above.locks -= 1
            if above.locks == 0:
                self._locked_rows -= len(above.rows)
        self._enqueue(node)

    def insert(
        self, tokens: TokenKey, rows: Sequence[PageRow], namespace: str = "", after: TreeNode | None = None
    ) -> tuple[TreeNode, list[int]]:
        """Inserts `rows`, which hold the KV of `tokens` (those beyond the last whole page are left out).

        Returns the node that ends where the rows end, and the pages that the tree has taken: all of new rows,
        and of rows that it held already those that it lacked.
        `after`: the tokens follow the prefix that ends with this node, of the same namespace; None: they
        begin a sequence. Raises ValueError when there are too few tokens for the rows.
        """
        if self.whole_rows(tokens) < len(rows):
            raise ValueError(f"{len(rows)} pages of {self.page_size} for only {len(tokens)} tokens")
        key = self.encode(tokens, len(rows))
        start = self._root if after is None else after
        node, inside, found = self._descend(start, key, namespace)
        if inside < len(node.rows):
            node = self._split(node, inside)
        self._touch(node, hits=0)
        fresh = list(rows[len(found) :])
        taken: list[int] = []
        if self._has_windows:
            taken = self._fill(node, start, rows)
        if fresh:
            rest = key[len(found) * self._stride :]
            ids = [next(self._ids) for _ in fresh]
            for observer in self._observers:
                observer.stored(node.ids[-1] if node.ids else None, namespace, rest, ids)
            node = self._append(node, namespace, rest, fresh, ids)
            taken += [page for row in fresh for page in row if page != NO_PAGE]
            self._now += len(fresh)
        if taken:
            self.cached += len(taken)
            self.version += 1
        return node, taken

    def evict(self, count: int) -> list[int]:
        """Removes `count` pages, or a few more, or all that are not in use if those are fewer; returns their
        ids. Inner window pages go first."""
        evicted = self.windows.evict_inner(count) if self._has_windows else []
        removed: list[int] = []
        while len(evicted) < count:
            leaf = self._queue.first()
            if leaf is None:
                break
            while leaf.rows and (len(evicted) < count or max(leaf.rows[-1]) == NO_PAGE):
                row = leaf.rows.pop()
                evicted += [page for page in row if page != NO_PAGE]
                removed.append(leaf.ids.pop())
                if self._has_windows:
                    self.windows.removed(row)
            if leaf.rows:
                leaf.key = leaf.key[: len(leaf.rows) * self._stride]
            else:
                self._remove(leaf)
        if self._has_windows and len(evicted) < count:
            evicted += self.windows.evict_ends(count - len(evicted))
        self.cached -= len(evicted)
        self.version += bool(evicted)
        if removed:
            for observer in self._observers:
                observer.removed(removed)
        return evicted

    def leaving(self, pages: int) -> Iterator[TreeNode]:
        """Leaves in the order of their eviction, until they and what is above them have so many pages that
        could be evicted, roughly. Nothing may be changed meanwhile but `demoted`."""
        seen: set[TreeNode] = set()
        for leaf in self._queue.in_order():
            if pages <= 0:
                return
            for node in leaf.path():
                if node in seen or node.locks:
                    break
                seen.add(node)
                pages -= len(node.rows) * self.full_groups
            if not leaf.withdrawn:
                yield leaf

    def path_of(self, node: TreeNode) -> tuple[str, bytes, list[PageRow]]:
        """See TreeNode.whole; the rows as far as they are usable."""
        namespace, key, rows = node.whole()
        return namespace, key, rows[: self.windows.usable(rows, None)]

    def withdraw(self, node: TreeNode) -> None:
        """No search from the root finds any more what leads to `node`, nor what follows any of it: the
        contents are damaged. The rows stay until they are evicted, before others, for observers in
        another namespace."""
        *_, top, _ = (None, *node.path())
        if top is None or top.withdrawn:
            return
        del self._root.children[top.child_key]
        top.child_key = (f"{WITHDRAWN}{next(self._ids)}", top.child_key[1])
        self._root.children[top.child_key] = top
        self.version += 1
        for each in top.subtree():
            each.withdrawn = True
            self._enqueue(each)
            self.windows.touched(each)
        for observer in self._observers:
            observer.removed([row for each in top.subtree() for row in each.ids])
            report(observer, top)

    def withdraw_prefix(self, first: bytes, namespace: str) -> None:
        """Withdraws all that begins with a page of these tokens, 4 bytes each."""
        node = self._root.children.get((namespace, first))
        if node is not None:
            self.withdraw(node)

    def observe(self, observer: TreeObserver | None, before: TreeObserver | None = None) -> None:
        """`observer` is called for all rows present, parents first, and then for each change; None: nobody.
        It replaces `before`, which is called no more."""
        if before is not None:
            self._observers.remove(before)
        if observer is not None:
            self._observers.append(observer)
            report(observer, self._root)
            observer.all_reported()

    @property
    def locked(self) -> int:
        """Pages that cannot be evicted now."""
        return self._locked_rows * self.full_groups + self.windows.referenced

    @property
    def evictable(self) -> int:
        """Pages that `evict` could remove now."""
        return self.cached - self.locked

    @property
    def locks(self) -> int:
        """Calls of `lock` whose `unlock` is still due."""
        return self._root.locks

    def pages(self) -> Iterator[tuple[str, int]]:
        """All pages held, with their namespaces, in no particular order."""
        for node in self._root.subtree():
            for row in node.rows:
                yield from ((node.child_key[0], page) for page in row if page != NO_PAGE)

    def check(self) -> None:
        """Compares structure, locks, counts and candidates with each other, O(n). Raises AccountingError."""
        locked = leaves = 0
        for node in self._root.subtree():
            node.check(self._stride)
            if node is not self._root:
                require(bool(node.rows), "a node without rows")
                candidate = not node.children and node.locks == 0
                require(candidate == (node in self._queue), "the eviction queue is not the unlocked leaves")
                leaves += candidate
            locked += len(node.rows) if node.locks else 0
        require(len(self._queue) == leaves, "candidates for eviction are not as many as unlocked leaves")
        pages = [page for _, page in self.pages()]
        require(len(set(pages)) == len(pages), "a page is in the tree twice")
        require((len(pages), locked) == (self.cached, self._locked_rows), "pages in the tree were miscounted")
        self.windows.check(self._root.subtree())

    def _descend(self, node: TreeNode, key: bytes, namespace: str) -> tuple[TreeNode, int, list[PageRow]]:
        """Follows `key` below `node`: the last node reached, how many of its rows match, all rows found."""
        inside = len(node.rows)
        found: list[PageRow] = []
        offset = 0
        while offset < len(key):
            child = node.children.get((namespace, key[offset : offset + self._stride]))
            if child is None:
                break
            node = child
            inside = node.common_rows(key, offset, self._stride)
            found += node.rows[:inside]
            if inside < len(node.rows):
                break
            offset += len(node.key)
        return node, inside, found

    def _split(self, node: TreeNode, rows: int) -> TreeNode:
        upper = node.split(rows, self._stride)
        if self._has_windows:
            self.windows.moved(upper, node)
        return upper

    def _fill(self, node: TreeNode, start: TreeNode, rows: Sequence[PageRow]) -> list[int]:
        """Gives to the nodes from `node` up to `start`, that one left out, those pages of `rows` that they
        lack; the rows begin where `start` ends."""
        taken: list[int] = []
        while node is not start:
            taken += self.windows.fill(node, rows[node.first - start.end : node.end - start.end])
            assert node.parent is not None
            node = node.parent
        return taken

    def _append(
        self, node: TreeNode, namespace: str, key: bytes, rows: list[PageRow], ids: list[int]
    ) -> TreeNode:
        """Adds rows below a node just touched; extends the node instead if that makes no difference."""
        child = TreeNode(node, (namespace, key[: self._stride]), key, node.end, rows, ids)
        child.created = child.last_used = self._now
        child.withdrawn = node.withdrawn
        alone = node is not self._root and not node.children and node.locks == 0
        if alone and self._policy(node) == self._policy(child):
            node.key += key
            node.rows += rows
            node.ids += ids
            child = node
        else:
            self._queue.discard(node)
            node.children[child.child_key] = child
            self._enqueue(child)
        if self._has_windows:
            self.windows.moved(child)
        return child

    def _remove(self, leaf: TreeNode) -> None:
        assert leaf.parent is not None
        self._queue.discard(leaf)
        if self._has_windows:
            self.windows.forget(leaf)
        del leaf.parent.children[leaf.child_key]
        self._enqueue(leaf.parent)
        leaf.parent = None

    def _touch(self, node: TreeNode, hits: int) -> None:
        self._now += 1
        for above in node.path():
            above.last_used = self._now
            above.hits += hits
            above.demoted = False
            if self._has_windows:
                self.windows.touched(above)
        self._enqueue(node)

    def _enqueue(self, node: TreeNode) -> None:
        if node is not self._root and not node.children and node.locks == 0:
            self._queue.put(node)
