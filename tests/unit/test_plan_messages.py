"""When messages leave a simulated decode node: as a real one does (tests/unit/test_decode_stream.py)."""

from __future__ import annotations

import pytest

from baton.decode.types import Done, Output, Prompt, Tokens
from baton.plan.nodes import Messages
from baton.sim.world import Actor, World
from baton.v1 import decode_pb2

GATHER = 0.005


def token(request: int) -> Output:
    return Tokens(request, 0, 0, 7, None, None)


def prompt(request: int) -> Output:
    return Prompt(request, 0, 0, None)


def done(request: int) -> Output:
    return Done(request, 0, decode_pb2.RequestStats(prompt_tokens=1, output_tokens=1))


def left(*said: tuple[float, list[Output]]) -> list[tuple[float, list[int]]]:
    """When messages leave and of which requests, if this is said at these times, in milliseconds. Requests 1
    and 2 have had tokens before, and at 0 a message with both has left."""
    world, actor = World(0), Actor("decode")
    found: list[tuple[float, list[int]]] = []
    messages = Messages(
        world,
        actor,
        GATHER,
        lambda outputs: found.append((round(1e3 * world.now, 6), [output.request for output in outputs])),
    )
    for outputs in ([token(1)], [token(2)], [token(1), token(2)]):
        messages.put(outputs)
    assert found == [(0.0, [1]), (0.0, [2]), (0.0, [1, 2])]
    found.clear()
    for at, outputs in said:
        world.at(at / 1e3, actor, lambda outputs=outputs: messages.put(outputs))
    while world.step():
        pass
    return found


def test_tokens_gather():
    both = [token(1), token(2)]
    said = [(at, both) for at in (1.0, 2.0, 3.0, 4.0, 6.0)]
    assert left(*said) == [(5.0, [1, 2] * 4), (10.0, [1, 2])]


def test_steps_longer_than_that_wait_for_nothing():
    assert left((6.0, [token(1)]), (12.0, [token(1)])) == [(6.0, [1]), (12.0, [1])]


@pytest.mark.parametrize("event", [prompt, done])
def test_an_event_takes_its_own_request_s_tokens_along_and_no_others(event):
    said = (1.0, [token(1), token(2)]), (2.0, [token(1), token(2), event(2)])
    assert left(*said) == [(2.0, [2, 2, 2]), (5.0, [1, 1])]


def test_a_first_token_does_not_wait_even_after_its_event():
    said = (1.0, [prompt(3)]), (2.0, [token(1), token(3)]), (3.0, [token(3)])
    assert left(*said) == [(1.0, [3]), (2.0, [3]), (5.0, [1, 3])]


def test_what_does_not_wait_makes_nobody_else_wait():
    assert left((6.0, [prompt(3), token(3)]), (7.0, [token(1)])) == [(6.0, [3, 3]), (7.0, [1])]
