"""The C library's heap, where a CPU's activations lie."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""
KEPT_BYTES = 2**28
"""So much free memory at the end of the heap stays."""
LARGEST_BYTES = 2**25
"""glibc takes no larger threshold; what is larger comes from the system and goes back."""


def keep_freed_memory() -> None:
    """Memory that a step frees stays for the next one. glibc gives it back to the system or not, as the heap
    happens to lie, and what it gets anew costs a fault for each 4 KiB: a fifth of the time of 1,600 tokens'
    prompts was seen. Heaps of threads have at most 64 MiB and are given back when they are empty, so threads
    that begin after this call share the first thread's. Does nothing with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST_BYTES)
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(ARENA_MAX, 1)
