"""How Python's garbage collector is set up in a process that serves."""

from __future__ import annotations

import gc


def settle() -> None:
    """Called once what stays has been loaded: the collector need not look at it again.

    The collection after the freeze makes CPython forget how much that was. It puts off a full collection
    until a quarter as many objects as the last one left have newly survived, and does not count those that a
    finalizer brought back to life for a while, as it does with asynchronous generators that were not read to
    their end. With 200,000 objects loaded, calls that end early would pile up for thousands of calls.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
