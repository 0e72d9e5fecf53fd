import asyncio

from baton.rpc.tasks import CoalescedCall


async def test_it_runs_once_behind_the_turn_that_asked():
    runs = []
    soon = CoalescedCall(lambda: runs.append(len(runs)))
    soon()
    soon()
    assert runs == []
    await asyncio.sleep(0)
    assert runs == [0]
    soon()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert runs == [0, 1]


async def test_what_asks_while_it_runs_is_asked_anew():
    runs = []

    def work() -> None:
        runs.append(1)
        if len(runs) < 3:
            soon()

    soon = CoalescedCall(work)
    soon()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(runs) == 3
