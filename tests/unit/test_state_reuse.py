"""How much of what requests share is computed again where a prefix must end with a snapshot of its states."""

from __future__ import annotations

import pytest
from test_scheduler_groups import Engine

from baton.sim.model import STATE

LENGTHS = (1, 63, 64, 65, 100, 528, 5120, 5121)
SIZES = (16, 128)


def make(size, budget=512):
    pages = 60_000 // size
    return Engine((None, STATE), pages, size=size, budget=budget, context_length=20_000)


def ask(engine, key, prompt, outputs=1):
    """Computes the request alone, and returns its tokens and how many were found."""
    request = engine.submit(key, prompt, outputs)
    engine.run()
    engine.expect(key, prompt, outputs)
    return [*prompt, *engine.tokens[key, 0]], request.cached_tokens or 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_request_that_goes_on_behind_another(length, size):
    """Behind its prompt of so many tokens, or behind its prompt and answer."""
    for answer in (0, min(40, length - 1)):
        engine = make(size)
        first, _ = ask(engine, 1, range(length - answer), max(1, answer))
        again = [*first[:length], *range(900, 930)]
        _, found = ask(engine, 2, again)
        assert length - found <= max(64, size), (answer, found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_three_requests_that_share_a_beginning(length, size):
    """The second computes it again from the deepest snapshot on, and leaves one for the third."""
    engine = make(size, budget=8192)
    found = []
    for key in range(3):
        _, cached = ask(engine, key, [*range(length), *range(6000 + 500 * key, 6300 + 500 * key)])
        found.append(length - cached)
    assert found == [length, length, length % size]
