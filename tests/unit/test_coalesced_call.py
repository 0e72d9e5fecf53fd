import asyncio

from baton.rpc.tasks import CoalescedCall


async def test_it_runs_once_behind_the_turn_that_asked():
    runs = []
    call = CoalescedCall(lambda: runs.append(len(runs)))
    call()
    call()
    assert runs == []
    await asyncio.sleep(0)
    assert runs == [0]
    call()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert runs == [0, 1]


async def test_what_asks_while_it_runs_is_asked_anew():
    runs = []

    def work() -> None:
        runs.append(1)
        if len(runs) < 3:
            call()

    call = CoalescedCall(work)
    call()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(runs) == 3
