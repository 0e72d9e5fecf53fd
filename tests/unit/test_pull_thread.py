"""The thread that pulls: what goes wrong in a rehearsal is nobody's end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from baton.transport.base import TransportError
from baton.transport.pull_thread import REHEARSAL_SECONDS, PullThread


async def test_a_rehearsal_that_fails_ends_neither_pull_nor_thread():
    retired, rehearsed, order = [0], [], []

    def rehearse():
        rehearsed.append(time.monotonic())
        raise ValueError("not today")

    thread, began = PullThread("test", lambda: retired[0]), time.monotonic()
    waiting = asyncio.create_task(thread.run(lambda stop: order.append(1), 1, rehearse))
    await asyncio.sleep(50 * REHEARSAL_SECONDS)
    assert 2 <= len(rehearsed) <= 1 + (time.monotonic() - began) / REHEARSAL_SECONDS and not order
    retired[0] = 1
    await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(thread.run(lambda stop: order.append(2)), 5)
    assert order == [1, 2]
    await thread.drain()
    thread.close()


async def test_what_the_work_raises_is_raised_and_the_thread_goes_on():
    def fail(stop):
        raise KeyError("page")

    thread = PullThread("test")
    with pytest.raises(KeyError, match="page"):
        await asyncio.wait_for(thread.run(fail), 5)
    done = []
    await asyncio.wait_for(thread.run(lambda stop: done.append(1)), 5)
    assert done
    thread.close()


async def test_the_loop_hears_of_an_end_after_others_have_but_no_pull_waits_for_that(monkeypatch):
    quiet = 2.0
    monkeypatch.setattr("baton.transport.pull_thread.QUIET_SECONDS", quiet)
    thread, ended = PullThread("test"), (threading.Event(), threading.Event())
    first = asyncio.create_task(thread.run(lambda stop: ended[0].set()))
    assert await asyncio.to_thread(ended[0].wait, 5)
    began = time.monotonic()
    second = asyncio.create_task(thread.run(lambda stop: ended[1].set()))
    await asyncio.wait_for(first, 5)
    assert await asyncio.to_thread(ended[1].wait, 5)
    assert time.monotonic() - began < 0.75 * quiet
    await asyncio.wait_for(second, 5)
    assert time.monotonic() - began >= quiet
    thread.close()


async def test_a_pull_that_is_cancelled_ends_without_the_quiet(monkeypatch):
    monkeypatch.setattr("baton.transport.pull_thread.QUIET_SECONDS", 60.0)
    thread, running = PullThread("test"), threading.Event()

    def work(stop):
        running.set()
        assert stop.wait(10)

    pull = asyncio.create_task(thread.run(work))
    assert await asyncio.to_thread(running.wait, 5)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(pull), 5)
    thread.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_pull_that_is_given_up_does_not_look_at_a_peer_whose_memory_is_unmapped():
    """The peer has been killed: what still waits for its step is given up, then its memory is unmapped."""
    for _ in range(20):
        unmapped = threading.Event()

        def retired(unmapped=unmapped):
            assert not unmapped.is_set()
            return 0

        thread = PullThread("test", retired)
        waiting = [asyncio.create_task(thread.run(lambda stop: None, step)) for step in (1, 2)]
        await asyncio.sleep(2e-3)
        await asyncio.wait_for(thread.drain(), 5)
        await asyncio.wait_for(thread.run(lambda stop, unmapped=unmapped: unmapped.set()), 5)
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, TransportError) for error in ended)
        thread.close()


@pytest.mark.parametrize("broken", ["its owner's steps", "its rest"])
async def test_what_goes_wrong_in_the_thread_itself_fails_its_pulls_at_once_and_it_goes_on(
    broken, monkeypatch
):
    failing = True

    def retired():
        if failing and broken == "its owner's steps":
            raise MemoryError("not today")
        return 1

    def rest(self):
        if failing and broken == "its rest":
            raise MemoryError("not today")

    monkeypatch.setattr(PullThread, "_rest", rest)
    thread = PullThread("test", retired)
    pulls = [asyncio.create_task(thread.run(lambda stop: None, 1)) for _ in range(2)]
    ended = await asyncio.wait_for(asyncio.gather(*pulls, return_exceptions=True), 5)
    assert all(isinstance(error, Exception) and "not today" in str(error) for error in ended), ended
    failing, done = False, []
    await asyncio.wait_for(thread.run(lambda stop: done.append(1), 1), 5)
    assert done
    thread.close()
