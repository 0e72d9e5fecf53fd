"""How Python's garbage collector is set up in a process that serves."""

from __future__ import annotations

import gc

THRESHOLDS = (3_000, 5, 5)
"""Of `gc.set_threshold`. CPython 3.12 collects the youngest generation once there are 700 objects more: a
step's messages to some sixty streams are as many, and collections fell into the middle of them. With these it
is what stays that counts. Not higher: what is in a cycle stays for longer, and by mistake a request's prompt
may be in one. A full collection comes about as often as by default."""


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
    gc.set_threshold(*THRESHOLDS)
