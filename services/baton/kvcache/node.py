"""The nodes of the prefix tree."""

from __future__ import annotations

from collections.abc import Iterator


class Node:
    """A run of pages that share their usage and their locks, so that the tree behaves as if every page were a
    node of its own. A node object goes on ending at the same page when its run is split: the upper part is
    new.
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

    def split(self, pages: int, stride: int) -> Node:
        """Cuts the run after so many of its pages, of `stride` key bytes each; returns the new upper part."""
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
