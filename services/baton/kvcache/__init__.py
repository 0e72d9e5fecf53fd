"""The KV cache: which page belongs to which sequence. `groups` says which layers keep which pages.
`page_allocator` keeps each page in exactly one state. `prefix_tree` finds and evicts cached prefixes,
`window_pages` evicts those of window groups. Pages change owners only in `cache`; `holding` is what one
sequence has. `kv_events` informs observers of what is cached. All of this is pure: synchronous, no I/O, no
clock, for one thread. `page_map` draws a pool. `pool` holds the tensors behind the page ids and is imported
separately."""

from baton.kvcache.cache import KvCache
from baton.kvcache.groups import FULL, GONE, KvGroup
from baton.kvcache.holding import Holding
from baton.kvcache.page_allocator import AccountingError, OutOfPages, PageAllocator, PageCounts
from baton.kvcache.prefix_tree import PrefixTree
from baton.kvcache.tree_node import Node

__all__ = [
    "FULL",
    "GONE",
    "AccountingError",
    "Holding",
    "KvCache",
    "KvGroup",
    "Node",
    "OutOfPages",
    "PageAllocator",
    "PageCounts",
    "PrefixTree",
]
