"""A decode node tells a caller that asks when its request has been admitted: once, and without a launch that
waits for it."""

from decode_node import Node

from baton.v1 import decode_pb2
from baton.worker.decode.stream import add_output
from baton.worker.decode.types import Admitted, FailedOutput, TokensOutput


def admitted(node):
    return [output.request for output in node.outputs if isinstance(output, Admitted)]


def test_it_comes_when_the_request_has_a_row_and_before_its_first_token():
    node = Node(max_rows=1)
    node.start(1, max_tokens=20, announce=True)
    node.start(2, announce=True)
    node.start(3)
    node.run(1)
    assert admitted(node) == [1]
    kinds = [type(output) for output in node.outputs if output.request == 1]
    assert kinds.index(Admitted) < kinds.index(TokensOutput)
    node.run(40)
    assert admitted(node) == [1, 2]


def test_a_retracted_request_is_not_announced_again():
    node = Node(max_rows=4)
    for number in 1, 2, 3, 4:
        node.start(number, max_tokens=450, announce=True)
    node.run(900)
    assert any(output.stats.retractions for output in node.outputs if hasattr(output, "stats"))
    assert sorted(admitted(node)) == [1, 2, 3, 4]


def test_what_is_refused_is_never_announced():
    node = Node(max_rows=1)
    node.start(1)
    node.run(1)
    node.start(2, seconds=0.1, announce=True)
    node.run(40)
    assert [output.request for output in node.outputs if isinstance(output, FailedOutput)] == [2]
    assert admitted(node) == []


def test_no_launch_waits_for_it():
    node = Node()
    node.start(1, announce=True)
    assert node.pipeline._take_calls() == node.now
    node.core.plan(node.now)
    assert node.core._admitted and not node.core.pressing


def test_its_message():
    message = decode_pb2.StepEvents()
    add_output(message, Admitted(3, 1), 0)
    (event,) = message.events
    assert (event.request, event.attempt, event.WhichOneof("kind")) == (3, 1, "admitted")
