"""The KV cache: which page belongs to which sequence. `pages` keeps each page in exactly one state.
`prefix_tree` (made of `node`s) finds and evicts cached prefixes, in an order of `eviction`. Pages change
owners only in `cache`. All of this is pure: synchronous, no I/O, no clock, for one thread. `pool` holds
the tensors behind the page ids and is imported separately."""

from baton.kvcache.cache import Holding, KvCache
from baton.kvcache.node import Node
from baton.kvcache.pages import AccountingError, OutOfPages, PageAllocator, PageCounts
from baton.kvcache.prefix_tree import Insertion, Match, PrefixTree

__all__ = [
    "AccountingError",
    "Holding",
    "Insertion",
    "KvCache",
    "Match",
    "Node",
    "OutOfPages",
    "PageAllocator",
    "PageCounts",
    "PrefixTree",
]
