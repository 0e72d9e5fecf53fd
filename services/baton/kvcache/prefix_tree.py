"""A page-aligned radix tree from token sequences to the pages that hold their KV.

After the radix tree of SGLang's RadixAttention (Zheng et al., 2023, arXiv:2312.07104), over whole pages.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.kvcache.page_allocator import AccountingError


class Node:
    """A run of pages with common usage and locks, so that the tree behaves as if every page were a separate
    node. When a run is split, the node object keeps its end, and the upper part is new.
    """

    __slots__ = (
        "children",
        "created",
        "hits",
        "key",
        "last_used",
        "locks",
        "own_locks",
        "pages",
        "parent",
        "slot",
    )

    def __init__(self, parent: Node | None, slot: tuple[str, bytes], key: bytes, pages: list[int]) -> None:
        self.parent = parent
        """None: the root, or a node that was evicted."""
        self.slot = slot
        """Where the parent keeps it: namespace, and the first page's tokens."""
        self.key = key
        """Tokens of its pages, 4 bytes each."""
        self.pages = pages
        self.children: dict[tuple[str, bytes], Node] = {}
        self.own_locks = 0
        """Locks on exactly this end."""
        self.locks = 0
        """Locks on it and on its descendants."""
        self.created = self.last_used = self.hits = 0
        """Times are values of one counter."""

    def split(self, pages: int, stride: int) -> Node:
        """Splits the run after `pages` of its pages, of `stride` key bytes each; returns the new upper
        part."""
        parent = self.parent
        assert parent is not None, "the root has no pages to split"
        border = pages * stride
        upper = Node(parent, self.slot, self.key[:border], self.pages[:pages])
        upper.locks, upper.created = self.locks, self.created
        upper.last_used, upper.hits = self.last_used, self.hits
        parent.children[self.slot] = upper
        self.parent, self.key, self.pages = upper, self.key[border:], self.pages[pages:]
        self.slot = (self.slot[0], self.key[:stride])
        upper.children[self.slot] = self
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


TOKEN_BYTES = array("I").itemsize


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


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: `pages`, ending with `node`. Stale after an `evict`: lock it before."""

    node: Node
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Insertion:
    """`node` ends where the inserted tokens end. `taken`: indexes of the pages that the tree now holds; for
    the others it held pages before."""

    node: Node
    taken: tuple[int, ...]


class TreeObserver(Protocol):
    """Called for each change, in the tree's thread; must return at once."""

    def stored(self, after: int | None, namespace: str, key: bytes, pages: Sequence[int]) -> None:
        """`pages` have come; they hold the tokens of `key`, of 4 bytes each, and follow page `after` (None:
        they begin a sequence). The sequence may be the tree's own: to be copied."""

    def removed(self, pages: Sequence[int]) -> None:
        """These have gone; likewise."""


Tokens = Sequence[int] | bytes
"""Token ids, or what `PrefixTree.encode` has made of them."""


class PrefixTree:
    """Keys are a namespace and token ids (0 <= id < 2**32), values whole pages of `page_size` tokens."""

    def __init__(self, page_size: int, policy: str = "lru") -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self._stride = page_size * TOKEN_BYTES
        self._policy = make_policy(policy)
        # Holds exactly the leaves without locks. Locks count upwards, so below a node without locks there are
        # none: every page outside locked nodes can be evicted, leaf after leaf.
        self._queue: EvictionQueue = EvictionQueue(self._policy)
        self._root = Node(None, ("", b""), b"", [])
        self._observer: TreeObserver | None = None
        self.version = 0
        """Counts changes of which pages are held."""
        self._now = 0
        self._cached = 0
        self._locked = 0

    def encode(self, tokens: Sequence[int]) -> bytes:
        """For who searches for the same tokens several times. Raises OverflowError as `match` does."""
        return self._encode(tokens, None)

    def match(self, tokens: Tokens, namespace: str = "", max_pages: int | None = None) -> Match:
        """Finds the longest cached prefix in whole pages, and counts as a use of it. Locks nothing.

        Raises OverflowError for a token id that is out of range.
        """
        node, inside, pages = self._descend(self._root, self._encode(tokens, max_pages), namespace)
        if inside < len(node.pages):
            node = node.split(inside, self._stride)
        self._touch(node, hits=1)
        return Match(node, tuple(pages))

    def match_length(self, tokens: Tokens, namespace: str = "", max_pages: int | None = None) -> int:
        """Pages that `match` would find; changes nothing."""
        return len(self._descend(self._root, self._encode(tokens, max_pages), namespace)[2])

    def unlocked_length(self, tokens: Tokens, pages: int, namespace: str, after: Node | None = None) -> int:
        """Number of unlocked pages in the tree among the first `pages` pages of tokens that follow `after`
        (None: the beginning). Changes nothing."""
        after = self._root if after is None else after
        node, inside, _ = self._descend(after, self._encode(tokens, pages), namespace)
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
                self._locked += len(above.pages)
            above.locks += 1

    def unlock(self, node: Node) -> None:
        if node.own_locks == 0:
            raise AccountingError("a node was unlocked more often than locked")
        node.own_locks -= 1
        for above in node.path():
            above.locks -= 1
            if above.locks == 0:
                self._locked -= len(above.pages)
        self._enqueue(node)

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], namespace: str = "", after: Node | None = None
    ) -> Insertion:
        """Enters `pages`, which hold the KV of `tokens` (those beyond the last whole page are left out).

        `after`: the tokens follow the prefix that ends with this node, of the same namespace; None: they
        begin a sequence. Raises ValueError when there are too few tokens for the pages.
        """
        if len(tokens) < len(pages) * self.page_size:
            raise ValueError(f"{len(pages)} pages of {self.page_size} for only {len(tokens)} tokens")
        key = self._encode(tokens, len(pages))
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
        return Insertion(node, tuple(range(len(found), len(pages))))

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
        self._cached -= len(evicted)
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
                observer.stored(above[-1] if above else None, node.slot[0], node.key, node.pages)

    @property
    def cached(self) -> int:
        """Pages held."""
        return self._cached

    @property
    def locked(self) -> int:
        """Pages that cannot be evicted now."""
        return self._locked

    @property
    def evictable(self) -> int:
        """Pages that `evict` could remove now."""
        return self._cached - self._locked

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
            _require(node.locks == node.own_locks + inner, "a node's locks are not its own and lower ones")
            _require(len(node.key) == len(node.pages) * self._stride, "a node's tokens do not fill its pages")
            for slot, child in node.children.items():
                _require(child.parent is node and child.slot == slot, "a child hangs in the wrong place")
                _require(
                    slot[1] == child.key[: self._stride], "a child hangs under other tokens than its own"
                )
            if node is not self._root:
                _require(bool(node.pages), "a node without pages")
                candidate = not node.children and node.locks == 0
                _require(candidate == (node in self._queue), "the eviction queue is not the unlocked leaves")
                leaves += candidate
            cached += len(node.pages)
            locked += len(node.pages) if node.locks else 0
            seen.update(node.pages)
        _require(
            len(self._queue) == leaves, f"{len(self._queue)} eviction candidates, {leaves} unlocked leaves"
        )
        _require(len(seen) == cached, "a page is in the tree twice")
        _require((cached, locked) == (self._cached, self._locked), "pages in the tree were counted wrongly")

    def _encode(self, tokens: Tokens, max_pages: int | None) -> bytes:
        encoded = isinstance(tokens, bytes)
        count = len(tokens) // (self._stride if encoded else self.page_size)
        if max_pages is not None:
            count = min(count, max(0, max_pages))
        if isinstance(tokens, bytes):
            return tokens[: count * self._stride]
        return array("I", tokens[: count * self.page_size]).tobytes()

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
        self._cached += len(pages)
        alone = node is not self._root and not node.children and node.locks == 0
        if alone and self._policy(node) == self._policy(child):
            node.key += key
            node.pages += pages
            return node
        self._queue.discard(node)
        node.children[child.slot] = child
        self._enqueue(child)
        return child

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        self._queue.discard(leaf)
        del leaf.parent.children[leaf.slot]
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


def _require(true: bool, message: str) -> None:
    if not true:
        raise AccountingError(f"prefix tree: {message}")
