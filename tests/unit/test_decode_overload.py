"""Who is refused for want of time when a decode node has stalled: the core, with a clock of its own."""

from __future__ import annotations

from decode_node import STEP, Node


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
    assert 0.0 < node.core.overload.first_token.value < 1.0
    node.run(120)
    node.core.step_stats.stalled += 30.0  # before it came
    node.start(20)
    node.run(2)
    assert 0.0 < node.core.overload.first_token.value < 1.0


def test_a_stall_that_began_before_a_request_leaves_its_first_token_no_negative_time():
    node = Node()
    for number in range(60):
        node.start(number, max_tokens=2)
        due = node.pipeline.begin()
        if number < 2:
            node.core.step_stats.stalled += 0.3  # the whole of it is said behind the admission
        node.now += STEP
        node.pipeline.finish(due)
        node.run(3)
    assert 0.0 < node.core.overload.first_token.value < 1.0


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
