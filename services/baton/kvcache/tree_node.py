"""A node of the prefix tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.kvcache.page_allocator import require

PageRow = tuple[int, ...]
"""The page of each group at one page index; NO_PAGE where a window group holds it no more."""


@dataclass(slots=True, eq=False, repr=False)
class TreeNode:
    """A run of page rows with common usage and locks, so that the tree behaves as if every row were a
    separate node. When a run is split, the node object keeps its end, and the upper part is new.
    """

    parent: TreeNode | None
    """None: the root, or a node that was evicted."""
    child_key: tuple[str, bytes]
    """The parent's key of it: namespace, and the first row's tokens."""
    key: bytes
    """Key of the node's rows: `page_keys.page_key`."""
    first: int
    """Page index of its first row."""
    rows: list[PageRow]
    ids: list[int]
    """For each row a number that no other row of the tree ever has, for observers."""
    children: dict[tuple[str, bytes], TreeNode] = field(default_factory=dict)
    own_locks: int = 0
    """Locks on exactly this end."""
    locks: int = 0
    """Locks on it and on its descendants."""
    created: int = 0
    """Times are values of one counter."""
    last_used: int = 0
    hits: int = 0
    withdrawn: bool = False
    """No search finds it."""
    demoted: bool = False
    """A lower tier was given it, and what is above it, since it was last used."""

    @property
    def end(self) -> int:
        """Page index behind its last row."""
        return self.first + len(self.rows)

    def split(self, rows: int, stride: int) -> TreeNode:
        """Splits the run after `rows` of its rows, of `stride` key bytes each; returns the new upper part."""
        parent = self.parent
        assert parent is not None, "the root has no rows to split"
        border = rows * stride
        upper = TreeNode(
            parent, self.child_key, self.key[:border], self.first, self.rows[:rows], self.ids[:rows]
        )
        upper.locks, upper.created = self.locks, self.created
        upper.last_used, upper.hits, upper.withdrawn = self.last_used, self.hits, self.withdrawn
        upper.demoted = self.demoted
        parent.children[self.child_key] = upper
        self.parent, self.key = upper, self.key[border:]
        self.first, self.rows, self.ids = self.first + rows, self.rows[rows:], self.ids[rows:]
        self.child_key = (self.child_key[0], self.key[:stride])
        upper.children[self.child_key] = self
        return upper

    def common_rows(self, key: bytes, offset: int, stride: int) -> int:
        """How many rows of the node hold the tokens of `key` from `offset` on; the first does."""
        if key.startswith(self.key, offset):
            return len(self.rows)
        # Bisection: a shorter prefix of a common prefix is common too.
        low, high = 1, min(len(self.rows), (len(key) - offset) // stride)
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(self.key[: middle * stride], offset):
                low = middle
            else:
                high = middle - 1
        return low

    def path(self) -> Iterator[TreeNode]:
        """It and all above it, the root last."""
        node: TreeNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[TreeNode]:
        """It and all below it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def whole(self) -> tuple[str, bytes, list[PageRow]]:
        """Namespace, tokens and rows from the first page on to its end."""
        nodes = [*self.path()][-2::-1]
        rows = [row for node in nodes for row in node.rows]
        return self.child_key[0], b"".join(node.key for node in nodes), rows

    def check(self, stride: int) -> None:
        """Compares locks, tokens and children with each other. Raises AccountingError."""
        inner = sum(child.locks for child in self.children.values())
        require(self.locks == self.own_locks + inner, "a node's locks are not its own and lower ones")
        filled = len(self.key) == len(self.rows) * stride and len(self.ids) == len(self.rows)
        require(filled, "a node's tokens do not fill its rows")
        for child_key, child in self.children.items():
            placed = child.parent is self and child.child_key == child_key and child.first == self.end
            require(placed, "a child hangs in the wrong place")
            matches = child_key[1] == child.key[:stride]
            require(matches, "a child hangs under other tokens than its own")
