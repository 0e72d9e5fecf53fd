"""The thread that pulls: what goes wrong in a rehearsal is nobody's end."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.transport.pull_thread import REHEARSAL_SECONDS, PullThread


async def test_a_rehearsal_that_fails_ends_neither_pull_nor_thread():
    retired, rehearsed, order = [0], [], []

    def rehearse():
        rehearsed.append(time.monotonic())
        raise ValueError("not today")

    thread = PullThread("test", lambda: retired[0])
    waiting = asyncio.create_task(thread.run(lambda stop: order.append(1), 1, rehearse))
    await asyncio.sleep(50 * REHEARSAL_SECONDS)
    assert 2 <= len(rehearsed) <= 51 and not order
    retired[0] = 1
    await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(thread.run(lambda stop: order.append(2)), 5)
    assert order == [1, 2]
    await thread.settle()
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


async def test_the_loop_hears_of_an_end_later_than_the_work_tells_but_no_pull_waits_for_that(monkeypatch):
    monkeypatch.setattr("baton.transport.pull_thread.QUIET_SECONDS", 0.3)
    thread, told = PullThread("test"), []

    def work(stop):
        told.append(time.monotonic())

    await thread.run(work)
    assert time.monotonic() - told[0] >= 0.3
    first = asyncio.create_task(thread.run(work))
    while len(told) < 2:
        await asyncio.sleep(0.01)
    assert not first.done()
    second = asyncio.create_task(thread.run(work))
    await asyncio.wait_for(first, 5)
    while len(told) < 3:
        await asyncio.sleep(0.01)
    assert told[2] - told[1] < 0.2 and not second.done()
    await asyncio.wait_for(second, 5)
    thread.close()
