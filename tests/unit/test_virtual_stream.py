"""When messages leave in virtual time: as over gRPC (tests/unit/test_decode_stream.py)."""

from __future__ import annotations

import pytest

from baton.sim.streams import VirtualDecodeStream
from baton.sim.world import Actor, World
from baton.v1 import decode_pb2

GATHER = 0.005


def tokens(*requests):
    deltas = [decode_pb2.TokenDelta(request=request, token_ids=[7]) for request in requests]
    return decode_pb2.StepEvents(tokens=deltas)


def with_event(message, request, kind):
    event = message.events.add(request=request)
    getattr(event, kind).SetInParent()
    return message


def left(*said):
    """When messages leave, with the number of tokens and events of each request in them, if these are sent at
    these times, in milliseconds. Requests 1 and 2 have had tokens before, and at 0 a message with both has
    left."""
    world, actor, found = World(0), Actor("decode"), []
    stream = VirtualDecodeStream(1, GATHER)

    def write(message):
        counts = {}
        for delta in message.tokens:
            counts[delta.request] = counts.get(delta.request, 0) + len(delta.token_ids)
        for event in message.events:
            counts[event.request] = counts.get(event.request, 0) + 1
        found.append((round(1e3 * world.now, 6), counts))

    stream.attach(world, actor, write)
    for number in (1, 2, 3):
        stream.begin(number, 0)
    for message in (tokens(1), tokens(2), tokens(1, 2)):
        stream.send(message)
    assert found == [(0.0, {1: 1}), (0.0, {2: 1}), (0.0, {1: 1, 2: 1})]
    found.clear()
    for at, message in said:
        world.at(at / 1e3, actor, lambda message=message: stream.send(message))
    while world.step():
        pass
    return found


def test_tokens_gather():
    said = [(at, tokens(1, 2)) for at in (1.0, 2.0, 3.0, 4.0, 6.0)]
    assert left(*said) == [(5.0, {1: 4, 2: 4}), (10.0, {1: 1, 2: 1})]


def test_steps_longer_than_that_wait_for_nothing():
    assert left((6.0, tokens(1)), (12.0, tokens(1))) == [(6.0, {1: 1}), (12.0, {1: 1})]


@pytest.mark.parametrize("kind", ["prompt", "finished"])
def test_an_event_takes_its_own_request_s_tokens_along_and_no_others(kind):
    said = (1.0, tokens(1, 2)), (2.0, with_event(tokens(1, 2), 2, kind))
    assert left(*said) == [(2.0, {2: 3}), (5.0, {1: 2})]


def test_a_first_token_does_not_wait_even_after_its_event():
    prompt = with_event(decode_pb2.StepEvents(), 3, "prompt")
    said = (1.0, prompt), (2.0, tokens(1, 3)), (3.0, tokens(3))
    assert left(*said) == [(1.0, {3: 1}), (2.0, {3: 1}), (5.0, {1: 1, 3: 1})]


def test_what_does_not_wait_makes_nobody_else_wait():
    said = (6.0, with_event(tokens(3), 3, "prompt")), (7.0, tokens(1))
    assert left(*said) == [(6.0, {3: 2}), (7.0, {1: 1})]
