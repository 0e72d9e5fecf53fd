"""The prefix tree as it would be if speed did not matter: a dict from whole prefixes to pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Prefix = tuple[str, tuple[int, ...]]
"""Namespace, and the tokens of one or more whole pages from the sequence's start."""


@dataclass
class Entry:
    page: int
    created: int
    last_used: int
    hits: int = 0


def rows(pages: Iterable[int]) -> list[tuple[int]]:
    """As the tree takes the pages of a single group."""
    return [(page,) for page in pages]


class TreeModel:
    def __init__(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.policy = policy
        self.entries: dict[Prefix, Entry] = {}
        self.locks: list[Prefix] = []
        self.now = 0

    def prefixes(self, tokens: Sequence[int], namespace: str) -> list[Prefix]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def find(self, tokens: Sequence[int], namespace: str, max_pages: int | None) -> list[Prefix]:
        prefixes = self.prefixes(tokens, namespace)
        return [prefix for prefix in prefixes[:max_pages] if prefix in self.entries]

    def match(self, tokens: Sequence[int], namespace: str, max_pages: int | None) -> list[int]:
        found = self.find(tokens, namespace, max_pages)
        self.now += 1
        for prefix in found:
            self.entries[prefix].last_used = self.now
            self.entries[prefix].hits += 1
        return [self.entries[prefix].page for prefix in found]

    def insert(self, tokens: Sequence[int], pages: Sequence[int], namespace: str) -> list[int]:
        """Indexes of the pages that were taken."""
        self.now += 1
        taken = []
        for index, prefix in enumerate(self.prefixes(tokens, namespace)[: len(pages)]):
            if prefix not in self.entries:
                self.entries[prefix] = Entry(pages[index], self.now, self.now)
                taken.append(index)
            self.entries[prefix].last_used = self.now
        return taken

    def withdraw(self, prefix: Prefix, name: str) -> Callable[[Prefix], Prefix]:
        """Everything that begins with the prefix's first page gets the namespace `name`. Returns what names
        prefixes anew."""
        namespace, first = prefix[0], prefix[1][: self.page_size]

        def renamed(each: Prefix) -> Prefix:
            found = each[0] == namespace and each[1][: self.page_size] == first
            return (name, each[1]) if found else each

        self.entries = {renamed(each): entry for each, entry in self.entries.items()}
        self.locks = list(map(renamed, self.locks))
        return renamed

    def is_locked(self, prefix: Prefix) -> bool:
        return any(
            prefix[0] == namespace and tokens[: len(prefix[1])] == prefix[1]
            for namespace, tokens in self.locks
        )

    def evict(self, count: int) -> list[int]:
        evicted: list[int] = []
        while len(evicted) < count:
            inner = {(namespace, tokens[: -self.page_size]) for namespace, tokens in self.entries}
            leaves = [p for p in self.entries if p not in inner and not self.is_locked(p)]
            if not leaves:
                break
            evicted.append(self.entries.pop(min(leaves, key=self.rank)).page)
        return evicted

    def rank(self, prefix: Prefix) -> tuple[int, ...]:
        entry = self.entries[prefix]
        order = {
            "lru": (entry.last_used,),
            "mru": (-entry.last_used,),
            "fifo": (entry.created,),
            "lfu": (entry.hits, entry.last_used),
        }[self.policy]
        return not prefix[0].startswith("\udc00"), *order  # what has been withdrawn goes first

    @property
    def evictable(self) -> int:
        return sum(not self.is_locked(prefix) for prefix in self.entries)
