"""Eviction policies of the prefix tree, and the queue of what they may evict."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count

from baton.kvcache.tree_node import TreeNode

Policy = Callable[[TreeNode], tuple[int, ...]]
"""Orders candidates: the smallest is evicted first."""

POLICIES: dict[str, Policy] = {
    "lru": lambda node: (node.last_used,),
    "lfu": lambda node: (node.hits, node.last_used),
    "fifo": lambda node: (node.created,),
    "mru": lambda node: (-node.last_used,),
}


def make_policy(policy: str | Policy) -> Policy:
    """`policy`: or its name. What has been withdrawn goes before others of its kind, whatever the policy.
    Raises ValueError for an unknown name."""
    if isinstance(policy, str) and policy not in POLICIES:
        raise ValueError(f"unknown eviction policy {policy!r}: use one of {', '.join(sorted(POLICIES))}")
    order = POLICIES[policy] if isinstance(policy, str) else policy
    return lambda node: (not node.withdrawn, *order(node))


class EvictionQueue:
    """Candidates in a policy's order. Operations take amortized O(log n).

    A heap whose outdated entries stay until they surface; it is rebuilt when they outnumber the valid ones.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, ...], int, TreeNode]] = []
        self._valid: dict[TreeNode, int] = {}
        self._serials = count()

    def put(self, candidate: TreeNode) -> None:
        """Adds a candidate, or moves it to where its usage now belongs."""
        serial = self._valid[candidate] = next(self._serials)
        heapq.heappush(self._heap, (self._policy(candidate), serial, candidate))
        if len(self._heap) > 2 * len(self._valid) + 64:
            self._heap = [entry for entry in self._heap if self._valid.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, candidate: TreeNode) -> None:
        self._valid.pop(candidate, None)

    def first(self) -> TreeNode | None:
        """The next to evict; stays in the queue."""
        while self._heap:
            _, serial, candidate = self._heap[0]
            if self._valid.get(candidate) == serial:
                return candidate
            heapq.heappop(self._heap)
        return None

    def in_order(self) -> Iterator[TreeNode]:
        """All, the next to evict first; they stay. Nothing may be put meanwhile."""
        waiting = [(entry, 0) for entry in self._heap[:1]]
        while waiting:
            entry, at = heapq.heappop(waiting)
            if self._valid.get(entry[2]) == entry[1]:
                yield entry[2]
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(self._heap):
                    heapq.heappush(waiting, (self._heap[below], below))

    def __contains__(self, candidate: TreeNode) -> bool:
        return candidate in self._valid

    def __len__(self) -> int:
        return len(self._valid)
