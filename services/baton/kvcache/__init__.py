"""The KV cache: which page belongs to which sequence. `page_allocator` keeps each page in exactly one
state. `prefix_tree` finds and evicts cached prefixes. Pages change owners only in `cache`. `kv_events`
informs observers of what is cached. All of this is pure: synchronous, no I/O, no clock, for one thread.
`page_map` draws a pool. `pool` holds the tensors behind the page ids and is imported separately."""

from baton.kvcache.cache import Holding, KvCache
from baton.kvcache.page_allocator import AccountingError, OutOfPages, PageAllocator, PageCounts
from baton.kvcache.prefix_tree import Node, PrefixTree

__all__ = [
    "AccountingError",
    "Holding",
    "KvCache",
    "Node",
    "OutOfPages",
    "PageAllocator",
    "PageCounts",
    "PrefixTree",
]
