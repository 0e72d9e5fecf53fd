"""Who is refused for want of time when a decode node has stalled: the core, with a clock of its own."""

from __future__ import annotations

from hash_runner import HashRunner

from baton.decode.core import DecodeCore
from baton.decode.entry import DecodePolicy, Key
from baton.decode.outputs import Failed
from baton.engine.request import Request
from baton.engine.sampling import SamplingParams
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.engine.turns import Turns
from baton.kvcache import KvCache, PageAllocator, PrefixTree

STEP = 0.02


class Node:
    """A decode core without prefill nodes; each step takes STEP seconds, or what `stall` says."""

    def __init__(self):
        self.now, self.stall, self.outputs = 0.0, 0.0, []
        config = SchedulerConfig(context_length=512, token_budget=64, max_rows=4)
        cache = KvCache(PageAllocator(400), PrefixTree(4))
        self.core = DecodeCore(
            lambda **hooks: Scheduler(cache, config, **hooks),
            DecodePolicy(None, 64, 10.0, 10.0),
            lambda step, outputs, effects: self.outputs.extend(output for _, output in outputs),
            lambda: None,
        )
        self.turns = Turns(self.core, HashRunner(400, 4, 4), False, lambda: self.now)

    def start(self, number, max_tokens=100, seconds=60.0):
        params = SamplingParams(max_tokens=max_tokens, seed=number)
        prompt = tuple(range(number, number + 8))
        request = Request(Key("caller", number), prompt, params, deadline=self.now + seconds)
        self.core.start(Key("caller", number), 1, 0, request, (), self.now)

    def run(self, steps):
        for _ in range(steps):
            due = self.turns.begin()
            if due is None:
                return
            self.now += STEP + self.stall
            self.stall = 0.0
            self.turns.finish(due)

    @property
    def refused(self):
        return [o for o in self.outputs if isinstance(o, Failed) and o.reason == "WOULD_MISS_DEADLINE"]


def test_one_stalled_step_refuses_nobody_who_has_time():
    node = Node()
    for number in range(8):
        node.start(number)
    node.run(50)
    node.stall = 12.0
    node.run(1)
    for number in range(8, 16):
        node.start(number)
    node.run(20)
    assert not node.refused
    assert node.core.overload.wait < 20.0


def test_first_tokens_that_waited_through_a_stall_are_no_measure():
    node = Node()
    for number in range(4):
        node.start(number, max_tokens=20)
    node.run(40)
    for number in range(10, 14):
        node.start(number)
    node.stall = 12.0
    node.run(2)
    assert node.core.overload.first_token.value < 1.0


def test_a_node_that_has_become_slow_still_refuses():
    node = Node()
    for number in range(4):
        node.start(number, max_tokens=300, seconds=1e4)
    node.run(20)
    for _ in range(100):
        node.stall = 1.0
        node.run(1)
    node.start(9, seconds=60.0)
    node.run(5)
    assert node.refused
