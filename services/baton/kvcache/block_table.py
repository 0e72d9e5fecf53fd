"""The pages that one sequence has of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.kvcache.kv_groups import NO_PAGE
from baton.kvcache.tree_node import TreeNode


@dataclass(slots=True, eq=False)
class BlockTable:
    """The page tables of one sequence. Made by `KvCacheManager.hold`, given up by its `release`.

    Each page of a page table is one of
      matched  among the first `shared` pages: the tree's, locked by this block table;
      owned    taken by `extend`, in `owned`: only this sequence writes it, the block table gives it back;
      cached   was owned until `commit` gave it to the tree; locked by this block table, final.
    Quarantined pages stay in the table and belong to none of these. The first `dropped` entries of a table
    are NO_PAGE: no later position of the sequence sees these pages. In a group of states so do those that
    CacheSpec.takes leaves out.
    """

    tables: list[list[int]]
    """The page table of each group: page ids in the order of the tokens, equally many. Changed by
    KvCacheManager only."""
    namespace: str
    node: TreeNode
    """Where the tree's part of the page tables ends; locked."""
    dropped: list[int]
    """How many first pages each group has given up; may be more than the table has."""
    owned: set[int] = field(default_factory=set)
    pins: int = 0
    """Leases and pulls that have not ended yet."""
    release_step: int | None = None
    """Set by the release: the step after which the pages are freed."""
    shared: int = field(init=False)
    """Leading page indexes that were found in the tree."""
    committed: int = field(init=False)
    """Leading page indexes whose tokens are in the tree, with these or with other page ids."""
    _frozen: tuple[tuple[int, ...], ...] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.shared = self.committed = len(self)

    def __len__(self) -> int:
        """Page indexes."""
        return len(self.tables[0])

    def page_tables(self) -> tuple[tuple[int, ...], ...]:
        """`tables` as they are now, for plans: the same tuples until they change, so that two plans are
        compared fast."""
        if self._frozen is None:
            self._frozen = tuple(map(tuple, self.tables))
        return self._frozen

    def changed(self) -> None:
        """`tables` have."""
        self._frozen = None

    @property
    def held(self) -> int:
        """Pages in all tables."""
        return sum(len(table) - table.count(NO_PAGE) for table in self.tables)

    @property
    def released(self) -> bool:
        return self.release_step is not None
