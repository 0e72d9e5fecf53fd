"""Follows a sequence that grows in the prefix tree, and says what followed its tokens in earlier
sequences."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from baton.kvcache.page_keys import without_seal
from baton.kvcache.tree_node import TreeNode

if TYPE_CHECKING:
    from baton.kvcache.prefix_tree import PrefixTree

CHILDREN = 16
"""Continuations that are looked at, where several follow; the newest."""
SEARCH_TOKENS = 64
"""After the position in the tree was lost, so many tokens must come before it is searched for again."""


class TreeWalk:
    """The position of one sequence in the tree. Changes and holds nothing there: what it stands on may be
    evicted, split or withdrawn, and is then looked for anew. It sees its own namespace only. Each call looks
    at a few pages, but for the first, and the first after the position was lost, which compare the whole
    sequence."""

    def __init__(self, tree: PrefixTree, namespace: str) -> None:
        self._tree, self._namespace = tree, namespace
        self._node: TreeNode | None = None
        self._at = 0
        """Tokens that lead there; it lies in `_node`, or at its end."""
        self._search = tree.page_size
        """Tokens that the sequence must have to be searched for."""
        self._barren: tuple[TreeNode, int] | None = None
        """A node none of whose children, so many, goes on as the sequence does."""
        self._diverged = False
        """Nothing in the tree goes on as the sequence does."""

    def onward(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most so many tokens that followed `tokens`, which begin with those of the last call."""
        if self._diverged or not self._stand(tokens) or not self._advance(tokens):
            return []
        found: list[int] = []
        node, at = self._node, self._at
        while node is not None and len(found) < most:
            if at == node.end * self._tree.page_size:
                newest = islice(reversed(node.children.values()), CHILDREN)
                node = max(newest, key=lambda child: child.last_used, default=None)
                continue
            page = self._page(node, at)[at % self._tree.page_size :]
            if not page:
                break
            found += page[: most - len(found)]
            at += len(page)
        return found

    def _stand(self, tokens: Sequence[int]) -> bool:
        """Whether it is where it was left, or stands anew."""
        size, node = self._tree.page_size, self._node
        while node is not None and self._at < node.first * size:  # the node was split
            node = node.parent
        if node is None or node.parent is None or node.withdrawn or self._at > node.end * size:
            self._node = None
            if len(tokens) < self._search:
                return False
            self._search = len(tokens) + SEARCH_TOKENS
            node, rows = self._tree.find(tokens, self._namespace)
            self._at = rows * size
        self._node = node if node.parent is not None else None
        return self._node is not None

    def _advance(self, tokens: Sequence[int]) -> bool:
        """Whether the tree has all tokens."""
        size = self._tree.page_size
        assert self._node is not None
        while self._at < len(tokens):
            if self._at == self._node.end * size:
                child = self._child(self._node, tokens)
                if child is None:
                    return False
                self._node = child
            page = self._page(self._node, self._at)
            inside = self._at % size
            rest = tokens[self._at : self._at - inside + size]
            if page[inside : inside + len(rest)] != list(rest):
                # Within a node's first page another child of its parent may go on as the sequence does.
                self._diverged = self._at >= (self._node.first + 1) * size
                self._at, parent = self._node.first * size, self._node.parent
                if self._diverged or parent is None or parent.parent is None:
                    self._diverged = True
                    return False
                self._node = parent
                if self._child(parent, tokens) is None:
                    return False
                continue
            self._at += len(rest)
        return True

    def _child(self, node: TreeNode, tokens: Sequence[int]) -> TreeNode | None:
        """The child whose first page goes on as `tokens` do from `node`'s end on."""
        if self._barren == (node, len(node.children)):
            return None
        size = self._tree.page_size
        rest = array("I", tokens[node.end * size : (node.end + 1) * size]).tobytes()
        for child in islice(reversed(node.children.values()), CHILDREN):
            if child.key.startswith(rest) and self._page(child, child.first * size):
                return child
        self._barren = node, len(node.children)
        return None

    def _page(self, node: TreeNode, at: int) -> list[int]:
        """The tokens of the page in `node` that holds position `at`; none where it has parts of images."""
        tree = self._tree
        first = (at // tree.page_size - node.first) * tree.row_bytes
        key = without_seal(node.key[first : first + tree.row_bytes], tree.page_size)
        return memoryview(key).cast("I").tolist() if len(key) == 4 * tree.page_size else []
