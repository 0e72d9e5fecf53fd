"""Whoever is told what a prefix tree holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.kvcache.tree_node import TreeNode

WITHDRAWN = "\udc00"
"""A lone surrogate, which begins namespaces that no message can name."""


def is_withdrawn(namespace: str) -> bool:
    """Whether what observers are told of this namespace is damaged, and found by nobody."""
    return namespace.startswith(WITHDRAWN)


class TreeObserver(Protocol):
    """Called for each change, in the tree's thread; must return at once."""

    def stored(self, after: int | None, namespace: str, key: bytes, rows: Sequence[int]) -> None:
        """The rows of these ids have come; they hold the tokens of `key`, and follow row
        `after` (None: they begin a sequence). The sequence may be the tree's own: to be copied."""

    def removed(self, rows: Sequence[int]) -> None:
        """These rows have gone. Called like `stored`."""

    def all_reported(self) -> None:
        """All rows that were present have been told; what follows is new."""


def report(observer: TreeObserver, top: TreeNode) -> None:
    """Tells of all rows below `top`, and of its own, parents first."""
    for node in top.subtree():
        if node.parent is not None:
            above = node.parent.ids
            observer.stored(above[-1] if above else None, node.child_key[0], node.key, node.ids)
