"""A page-aligned radix tree from token sequences to the pages that hold their KV.

After the radix tree of SGLang's RadixAttention (Zheng et al., 2023, arXiv:2312.07104), over whole pages.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.kvcache.page_allocator import AccountingError, require


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of pages with common usage and locks, so that the tree behaves as if every page were a separate
    node. When a run is split, the node object keeps its end, and the upper part is new.
    """

    parent: Node | None
    """None: the root, or a node that was evicted."""
    child_key: tuple[str, bytes]
    """The parent's key of it: namespace, and the first page's tokens."""
    key: bytes
    """Tokens of its pages, 4 bytes each."""
    pages: list[int]
    children: dict[tuple[str, bytes], Node] = field(default_factory=dict)
    own_locks: int = 0
    """Locks on exactly this end."""
    locks: int = 0
    """Locks on it and on its descendants."""
    created: int = 0
    """Times are values of one counter."""
    last_used: int = 0
    hits: int = 0

    def split(self, pages: int, stride: int) -> Node:
        """Splits the run after `pages` of its pages, of `stride` key bytes each; returns the new upper
        part."""
        parent = self.parent
        assert parent is not None, "the root has no pages to split"
        border = pages * stride
        upper = Node(parent, self.child_key, self.key[:border], self.pages[:pages])
        upper.locks, upper.created = self.locks, self.created
        upper.last_used, upper.hits = self.last_used, self.hits
        parent.children[self.child_key] = upper
        self.parent, self.key, self.pages = upper, self.key[border:], self.pages[pages:]
        self.child_key = (self.child_key[0], self.key[:stride])
        upper.children[self.child_key] = self
        return upper

    def common_pages(self, key: bytes, offset: int, stride: int) -> int:
        """How many of its pages hold the tokens of `key` from `offset` on; the first does."""
        if key.startswith(self.key, offset):
            return len(self.pages)
        # Bisection: a shorter prefix of a common prefix is common too.
        low, high = 1, min(len(self.pages), (len(key) - offset) // stride)
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(self.key[: middle * stride], offset):
                low = middle
            else:
                high = middle - 1
        return low

    def path(self) -> Iterator[Node]:
        """It and all above it, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        """It and all below it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node


Policy = Callable[[Node], tuple[int, ...]]
"""Orders candidates: the smallest is evicted first."""

POLICIES: dict[str, Policy] = {
    "lru": lambda node: (node.last_used,),
    "lfu": lambda node: (node.hits, node.last_used),
    "fifo": lambda node: (node.created,),
    "mru": lambda node: (-node.last_used,),
}


def make_policy(name: str) -> Policy:
    """Raises ValueError for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}: use one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]


class EvictionQueue:
    """Candidates in a policy's order. Operations take amortized O(log n).

    A heap whose outdated entries stay until they surface; it is rebuilt when they outnumber the valid ones.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._valid: dict[Node, int] = {}
        self._serial = 0

    def put(self, candidate: Node) -> None:
        """Adds a candidate, or moves it to where its usage now belongs."""
        self._serial += 1
        self._valid[candidate] = self._serial
        heapq.heappush(self._heap, (self._policy(candidate), self._serial, candidate))
        if len(self._heap) > 2 * len(self._valid) + 64:
            self._heap = [entry for entry in self._heap if self._valid.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, candidate: Node) -> None:
        self._valid.pop(candidate, None)

    def first(self) -> Node | None:
        """The next to evict; stays in the queue."""
        while self._heap:
            _, serial, candidate = self._heap[0]
            if self._valid.get(candidate) == serial:
                return candidate
            heapq.heappop(self._heap)
        return None

    def __contains__(self, candidate: Node) -> bool:
        return candidate in self._valid

    def __len__(self) -> int:
        return len(self._valid)


Tokens = Sequence[int] | bytes
"""Token ids, or what `PrefixTree.encode` has made of them."""


class TreeObserver(Protocol):
    """Called for each change, in the tree's thread; must return at once."""

    def stored(self, after: int | None, namespace: str, key: bytes, pages: Sequence[int]) -> None:
        """`pages` have come; they hold the tokens of `key`, of 4 bytes each, and follow page `after` (None:
        they begin a sequence). The sequence may be the tree's own: to be copied."""

    def removed(self, pages: Sequence[int]) -> None:
        """These have gone; likewise."""


class PrefixTree:
    """Keys are a namespace and token ids (0 <= id < 2**32), values whole pages of `page_size` tokens."""

    def __init__(self, page_size: int, policy: str = "lru") -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self._stride = page_size * array("I").itemsize
        self._policy = make_policy(policy)
        # Holds exactly the leaves without locks. Locks count upwards, so below a node without locks there are
        # none: every page outside locked nodes can be evicted, leaf after leaf.
        self._queue = EvictionQueue(self._policy)
        self._root = Node(None, ("", b""), b"", [])
        self._observer: TreeObserver | None = None
        self.version = 0
        """Counts changes of which pages are held."""
        self.cached = 0
        """Pages held."""
        self.locked = 0
        """Pages that cannot be evicted now."""
        self._now = 0

    def encode(self, tokens: Tokens, max_pages: int | None = None) -> bytes:
        """The keys of the first `max_pages` whole pages. For who searches for the same tokens several times.

        Raises OverflowError for a token id that is out of range, as all methods that take token ids.
        """
        encoded = isinstance(tokens, bytes)
        count = len(tokens) // (self._stride if encoded else self.page_size)
        if max_pages is not None:
            count = min(count, max(0, max_pages))
        if isinstance(tokens, bytes):
            return tokens[: count * self._stride]
        return array("I", tokens[: count * self.page_size]).tobytes()

    def match(
        self, tokens: Tokens, namespace: str = "", max_pages: int | None = None
    ) -> tuple[Node, list[int]]:
        """Finds the longest cached prefix in whole pages, and counts as a use of it: its pages, and the node
        that ends with it. Locks nothing; the node is stale after an `evict`."""
        node, inside, pages = self._descend(self._root, self.encode(tokens, max_pages), namespace)
        if inside < len(node.pages):
            node = node.split(inside, self._stride)
        self._touch(node, hits=1)
        return node, pages

    def match_length(self, tokens: Tokens, namespace: str = "", max_pages: int | None = None) -> int:
        """Pages that `match` would find; changes nothing."""
        return len(self._descend(self._root, self.encode(tokens, max_pages), namespace)[2])

    def unlocked_length(self, tokens: Tokens, pages: int, namespace: str, after: Node | None = None) -> int:
        """Number of unlocked pages in the tree among the first `pages` pages of tokens that follow `after`
        (None: the beginning). Changes nothing."""
        after = self._root if after is None else after
        node, inside, _ = self._descend(after, self.encode(tokens, pages), namespace)
        count, size = 0, inside
        while node is not after and node.locks == 0:
            assert node.parent is not None
            count += size
            node = node.parent
            size = len(node.pages)
        return count

    def lock(self, node: Node) -> None:
        """Keeps the node and its ancestors from eviction, until as many calls of `unlock`."""
        if node.parent is None and node is not self._root:
            raise AccountingError("a node that was evicted cannot be locked")
        self._queue.discard(node)
        node.own_locks += 1
        for above in node.path():
            if above.locks == 0:
                self.locked += len(above.pages)
            above.locks += 1

    def unlock(self, node: Node) -> None:
        if node.own_locks == 0:
            raise AccountingError("a node was unlocked more often than locked")
        node.own_locks -= 1
        for above in node.path():
            above.locks -= 1
            if above.locks == 0:
                self.locked -= len(above.pages)
        self._enqueue(node)

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], namespace: str = "", after: Node | None = None
    ) -> tuple[Node, int]:
        """Inserts `pages`, which hold the KV of `tokens` (those beyond the last whole page are left out).

        Returns the node that ends where the pages end, and for how many leading pages the tree already held
        others. It takes the rest.
        `after`: the tokens follow the prefix that ends with this node, of the same namespace; None: they
        begin a sequence. Raises ValueError when there are too few tokens for the pages.
        """
        if len(tokens) < len(pages) * self.page_size:
            raise ValueError(f"{len(pages)} pages of {self.page_size} for only {len(tokens)} tokens")
        key = self.encode(tokens, len(pages))
        start = self._root if after is None else after
        node, inside, found = self._descend(start, key, namespace)
        if inside < len(node.pages):
            node = node.split(inside, self._stride)
        self._touch(node, hits=0)
        fresh = list(pages[len(found) :])
        if fresh:
            rest = key[len(found) * self._stride :]
            if self._observer is not None:
                before = found or start.pages
                self._observer.stored(before[-1] if before else None, namespace, rest, fresh)
            node = self._append(node, namespace, rest, fresh)
            self.version += 1
        return node, len(found)

    def evict(self, count: int) -> list[int]:
        """Removes `count` pages, or all that are not locked if those are fewer; returns their ids."""
        evicted: list[int] = []
        while len(evicted) < count:
            leaf = self._queue.first()
            if leaf is None:
                break
            kept = max(0, len(leaf.pages) - (count - len(evicted)))
            evicted.extend(reversed(leaf.pages[kept:]))
            if kept:
                del leaf.pages[kept:]
                leaf.key = leaf.key[: kept * self._stride]
            else:
                self._remove(leaf)
        self.cached -= len(evicted)
        self.version += bool(evicted)
        if evicted and self._observer is not None:
            self._observer.removed(evicted)
        return evicted

    def observe(self, observer: TreeObserver | None) -> None:
        """Sets the observer. It is called for all pages present, parents first, and then for each change.
        None: removes the observer."""
        self._observer = observer
        if observer is None:
            return
        for node in self._root.subtree():
            if node.parent is not None:
                above = node.parent.pages
                observer.stored(above[-1] if above else None, node.child_key[0], node.key, node.pages)

    @property
    def evictable(self) -> int:
        """Pages that `evict` could remove now."""
        return self.cached - self.locked

    @property
    def locks(self) -> int:
        """Calls of `lock` whose `unlock` is still due."""
        return self._root.locks

    def pages(self) -> Iterator[int]:
        """All pages held, in no particular order."""
        for node in self._root.subtree():
            yield from node.pages

    def check(self) -> None:
        """Compares structure, locks, counts and candidates with each other, O(n). Raises AccountingError."""
        cached = locked = leaves = 0
        seen: set[int] = set()
        for node in self._root.subtree():
            inner = sum(child.locks for child in node.children.values())
            require(node.locks == node.own_locks + inner, "a node's locks are not its own and lower ones")
            require(
                len(node.key) == len(node.pages) * self._stride,
                "a node's tokens do not fill its pages",
            )
            for child_key, child in node.children.items():
                require(
                    child.parent is node and child.child_key == child_key, "a child hangs in the wrong place"
                )
                require(
                    child_key[1] == child.key[: self._stride],
                    "a child hangs under other tokens than its own",
                )
            if node is not self._root:
                require(bool(node.pages), "a node without pages")
                candidate = not node.children and node.locks == 0
                require(candidate == (node in self._queue), "the eviction queue is not the unlocked leaves")
                leaves += candidate
            cached += len(node.pages)
            locked += len(node.pages) if node.locks else 0
            seen.update(node.pages)
        require(
            len(self._queue) == leaves, f"{len(self._queue)} eviction candidates, {leaves} unlocked leaves"
        )
        require(len(seen) == cached, "a page is in the tree twice")
        require((cached, locked) == (self.cached, self.locked), "pages in the tree were counted wrongly")

    def _descend(self, node: Node, key: bytes, namespace: str) -> tuple[Node, int, list[int]]:
        """Follows `key` below `node`: the last node reached, how many of its pages match, all pages found."""
        inside = len(node.pages)
        found: list[int] = []
        offset = 0
        while offset < len(key):
            child = node.children.get((namespace, key[offset : offset + self._stride]))
            if child is None:
                break
            node = child
            inside = node.common_pages(key, offset, self._stride)
            found += node.pages[:inside]
            if inside < len(node.pages):
                break
            offset += len(node.key)
        return node, inside, found

    def _append(self, node: Node, namespace: str, key: bytes, pages: list[int]) -> Node:
        """Adds pages below a node just touched; extends the node instead if that makes no difference."""
        child = Node(node, (namespace, key[: self._stride]), key, pages)
        child.created = child.last_used = self._now
        self.cached += len(pages)
        alone = node is not self._root and not node.children and node.locks == 0
        if alone and self._policy(node) == self._policy(child):
            node.key += key
            node.pages += pages
            return node
        self._queue.discard(node)
        node.children[child.child_key] = child
        self._enqueue(child)
        return child

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        self._queue.discard(leaf)
        del leaf.parent.children[leaf.child_key]
        self._enqueue(leaf.parent)
        leaf.parent = None

    def _touch(self, node: Node, hits: int) -> None:
        self._now += 1
        for above in node.path():
            above.last_used = self._now
            above.hits += hits
        self._enqueue(node)

    def _enqueue(self, node: Node) -> None:
        if node is not self._root and not node.children and node.locks == 0:
            self._queue.put(node)
