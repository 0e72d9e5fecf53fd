"""The outbox merges instead of growing, and ends when it is closed and drained."""

import asyncio

import pytest

from baton.rpc.outbox import Outbox, OutboxFull


async def test_merges_what_is_unsent_and_only_that():
    box = Outbox[list[int]](lambda a, b: a + b)
    box.put([1])
    box.put([2])
    assert len(box) == 1
    assert await anext(box) == [1, 2]
    box.put([3])
    assert await anext(box) == [3]


async def test_a_slow_reader_gets_everything_in_order():
    box = Outbox[list[int]](lambda a, b: a + b)
    got: list[int] = []

    async def read():
        async for items in box:
            assert len(box) == 0
            got.extend(items)
            await asyncio.sleep(0.001)

    reader = asyncio.create_task(read())
    for number in range(1000):
        box.put([number])
        assert len(box) <= 1
        if number % 50 == 0:
            await asyncio.sleep(0)
    box.close()
    await asyncio.wait_for(reader, 5)
    assert got == list(range(1000))


async def test_close_wakes_a_waiting_reader_and_refuses_more():
    box = Outbox[int](max)
    waiting = asyncio.create_task(anext(box, None))
    await asyncio.sleep(0)
    box.close()
    box.close()
    assert await asyncio.wait_for(waiting, 1) is None
    assert box.put(1) is False
    assert len(box) == 0


async def test_what_is_in_a_closed_box_is_still_read():
    box = Outbox[int](None)
    box.put(1)
    box.put(2)
    box.close()
    assert [item async for item in box] == [1, 2]


async def test_without_merge_it_is_bounded():
    box = Outbox[int](None, limit=3)
    for number in range(3):
        assert box.put(number)
    with pytest.raises(OutboxFull):
        box.put(3)


async def test_merged_items_are_bounded_by_their_bytes():
    box = Outbox[bytes](bytes.__add__, size_of=len, max_bytes=10)
    assert box.put(b"123456") and box.put(b"7890")
    with pytest.raises(OutboxFull):
        box.put(b"x")
    assert await anext(box) == b"1234567890"
    assert box.put(b"x" * 20), "one that is alone may be larger"
    assert await anext(box) == b"x" * 20
    assert box.put(b"1234567890")


async def test_a_queue_counts_the_bytes_that_have_left():
    box = Outbox[bytes](None, size_of=len, max_bytes=10)
    for _ in range(50):
        assert box.put(b"1234") and box.put(b"5678")
        with pytest.raises(OutboxFull):
            box.put(b"123")
        assert await anext(box) == b"1234" and await anext(box) == b"5678"


async def test_what_is_behind_an_item_is_taken_up_to_a_number_of_bytes():
    box = Outbox[bytes](None, size_of=len, max_bytes=10)
    for item in (b"12", b"345", b"67", b"890"):
        box.put(item)
    assert await anext(box) == b"12"
    assert box.take(6) == [b"345", b"67"]
    assert box.put(b"1234567"), "what was taken is counted no more"
    assert box.take(2) == []
    assert box.take(100) == [b"890", b"1234567"] and box.take(100) == []
