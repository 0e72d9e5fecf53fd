"""The KV cache: which page belongs to which sequence. `kv_groups` says which layers keep which pages.
`page_allocator` keeps each page in exactly one state. `prefix_tree` finds and evicts cached prefixes,
`window_pages` evicts those of window groups. Pages change owners only in `kv_cache_manager`; `block_table` is
what one sequence has. `kv_events` informs observers of what is cached. All of this is pure: synchronous, no
I/O, no clock, for one thread. `page_map` draws a pool. `kv_pool` holds the tensors behind the page ids and is
imported separately."""

from baton.kvcache.block_table import BlockTable
from baton.kvcache.kv_cache_manager import KvCacheManager
from baton.kvcache.kv_groups import FULL, NO_PAGE, KvGroup
from baton.kvcache.page_allocator import AccountingError, OutOfPages, PageAllocator, PageCounts
from baton.kvcache.prefix_tree import PrefixTree
from baton.kvcache.tree_node import TreeNode

__all__ = [
    "FULL",
    "NO_PAGE",
    "AccountingError",
    "BlockTable",
    "KvCacheManager",
    "KvGroup",
    "OutOfPages",
    "PageAllocator",
    "PageCounts",
    "PrefixTree",
    "TreeNode",
]
