"""What a serving process leaves to the garbage collector is collected, however much was loaded before."""

import asyncio
import gc
from collections import deque

from baton.rpc.node import freeze_garbage_collector

LOADED = 200_000
CALLS = 20_000
RUNNING = 100
"""At a time: a call outlives the youngest generation; what its finalizer brings back goes to the oldest."""
LEFT = 4_500
"""At most so many wait for the collector: a full collection comes after 6 * 6 * 3,000 allocations, and a call
here makes some 40. Not counted as growth, far more would."""


class Call:
    """In a cycle with a generator that has not been read to its end."""

    def __init__(self):
        self.held = [[self] for _ in range(40)]
        self.responses = self.generate()

    async def generate(self):
        yield self
        yield self


async def test_calls_that_end_early_do_not_pile_up():
    loaded = [[] for _ in range(LOADED)]
    running, most = deque(maxlen=RUNNING), 0
    thresholds = gc.get_threshold()
    freeze_garbage_collector()
    try:
        for number in range(CALLS):
            call = Call()
            running.append(call)
            await anext(call.responses)
            await asyncio.sleep(0)  # finalizers close their generators on the event loop
            if number % 500 == 0:
                most = max(most, sum(isinstance(each, Call) for each in gc.get_objects()))
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    assert most < LEFT
    assert len(loaded) == LOADED


async def test_a_step_s_messages_are_no_reason_to_collect():
    """What a burst of them allocates is let go within moments, and looking through it takes as long as many
    messages do."""
    thresholds, collections = gc.get_threshold(), []
    freeze_garbage_collector()
    gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
    try:
        for _ in range(1_000):
            burst = [[number] for number in range(2_000)]
            del burst
        assert not collections
    finally:
        gc.callbacks.pop()
        gc.unfreeze()
        gc.set_threshold(*thresholds)
