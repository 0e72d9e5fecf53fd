"""A pull's end is reported once, whatever happens: its destination pages are pinned until then."""

from __future__ import annotations

import asyncio

import pytest

from baton.handoff.messages import StartPull
from baton.transport.base import TransportError
from baton.worker.peers import PullTask

EFFECT = StartPull("p0", 7, ((1, 2), (3, 4)), step=5)


class Core:
    """Stands in for a core, and for the call that reaches it."""

    def __init__(self):
        self.fetches = self
        self.ended = []

    def call(self, function):
        function(self, 1.0)

    def pull_ended(self, number, error, generations, now):
        self.ended.append((number, error, generations))


class Peer:
    """A receiver that fails with `error` once it has copied, or before."""

    def __init__(self, core, error=None, copies=True):
        self.core, self.error, self.copies = core, error, copies

    async def pull(self, pairs, step, copied):
        assert (pairs, step) == (EFFECT.pairs, EFFECT.step)
        if self.copies:
            copied(0.25)
            assert self.core.ended, "it is to be told before a task can be woken"
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error

    def generations(self, pages):
        return [10 * page for page in pages]


async def test_the_core_hears_of_it_before_the_call_returns():
    core = Core()
    pull = PullTask(EFFECT, core.call, lambda core: core)
    await pull.run(Peer(core))
    assert core.ended == [(7, None, [10, 30])]
    assert pull.seconds == 0.25


@pytest.mark.parametrize(
    ("error", "text"),
    [(TransportError("gone"), "gone"), (ValueError("bad"), "ValueError: bad")],
)
async def test_a_failure(error, text):
    core = Core()
    pull = PullTask(EFFECT, core.call, lambda core: core)
    await pull.run(Peer(core, error, copies=False))
    assert core.ended == [(7, text, None)] and pull.seconds is None


async def test_a_node_that_is_not_connected():
    core = Core()
    await PullTask(EFFECT, core.call, lambda core: core).run(None)
    assert core.ended == [(7, "p0 is not connected", None)]


@pytest.mark.parametrize("copies", [False, True])
async def test_an_interruption(copies):
    core = Core()
    with pytest.raises(asyncio.CancelledError):
        await PullTask(EFFECT, core.call, lambda core: core).run(Peer(core, asyncio.CancelledError(), copies))
    assert core.ended == [(7, None, [10, 30]) if copies else (7, "the pull was interrupted", None)]


async def test_generations_that_cannot_be_read():
    """The receiver was closed meanwhile."""
    core = Core()
    peer = Peer(core)

    def closed(pages):
        raise TransportError("the receiver is closed")

    peer.generations = closed
    await PullTask(EFFECT, core.call, lambda core: core).run(peer)
    assert core.ended == [(7, "the receiver is closed", None)]


@pytest.mark.parametrize("begun", [True, False])
async def test_one_that_is_stopped(begun):
    """Before its task has begun, too: a task that is cancelled then never runs."""
    core, waiting = Core(), asyncio.Event()

    class Waiting(Peer):
        async def pull(self, pairs, step, copied):
            await waiting.wait()

    pull = PullTask(EFFECT, core.call, lambda core: core)
    task = pull.task = asyncio.create_task(pull.run(Waiting(core)))
    if begun:
        await asyncio.sleep(0.01)
    pull.stop()
    await asyncio.wait([task], timeout=5)
    assert task.done() and task.cancelled() is begun
    assert core.ended == [(7, "the pull was interrupted", None)]
