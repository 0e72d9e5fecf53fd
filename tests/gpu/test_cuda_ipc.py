"""Pages of another process's pool, GPU to GPU: right bytes, whoever computes, dies or cancels meanwhile."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from owners import UNTOUCHED, Owner, gpus, local_pool, owning
from pool_owner import Load, page_content

from baton.transport import TransportError
from baton.transport import cuda_copy as cuda_copy_module
from baton.transport.cuda_copy import COPY_ENGINE, CopyStrategy, CudaPageCopier
from baton.transport.cuda_ipc import CudaIpcReceiver

PAGES = 40
MB = 2**20
SLACK = 512 * MB
STRATEGIES = [COPY_ENGINE, CopyStrategy(32), CopyStrategy(2)]


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-baton-") as name:
        yield Path(name)


async def open_fixed(endpoint, pool, strategy) -> CudaIpcReceiver:
    receiver = await CudaIpcReceiver.open(endpoint, pool)
    receiver.strategy = strategy
    return receiver


def check(pool, pairs, *, seed: int = 0) -> None:
    """Looks at the pool as it is now, on a stream that waits for no other."""
    found = pool.pool.clone()
    by_target = {target: source for source, target in pairs}
    for page in range(len(found)):
        if page in by_target:
            assert torch.equal(found[page], page_content(by_target[page], pool.page_bytes, seed)), page
        else:
            assert bool((found[page] == UNTOUCHED).all()), f"page {page} was touched"


def random_pairs(count: int, rng: random.Random, pages: int = PAGES) -> list[tuple[int, int]]:
    return list(zip(rng.sample(range(pages), count), rng.sample(range(pages), count), strict=True))


@pytest.mark.parametrize("gpu", gpus())
@pytest.mark.parametrize("page_bytes", [4096 * 3, MB + 512, 9 * MB])
async def test_pulled_bytes_are_the_owners(directory, gpu, page_bytes):
    rng = random.Random(page_bytes)
    with owning(directory, PAGES, page_bytes, gpu=gpu) as owner:
        for busy in (False, True):
            load = Load()
            if busy:
                owner.ask("busy")
                load.start()
            for strategy in STRATEGIES:
                pool = local_pool(PAGES, page_bytes)
                receiver = await open_fixed(owner.endpoint, pool, strategy)
                for count in (0, 1, 7, PAGES):
                    pool.pool.fill_(UNTOUCHED)
                    torch.cuda.synchronize()
                    pairs = random_pairs(count, rng)
                    await receiver.pull(pairs)
                    check(pool, pairs)
                pool.pool.fill_(UNTOUCHED)
                torch.cuda.synchronize()
                run = [(page, page - 3) for page in range(3, PAGES)]  # one copy, if by the engine
                await receiver.pull(run)
                check(pool, run)
                await receiver.close()
            if busy:
                owner.ask("idle")
                assert load.stop() > 0


async def test_pulls_at_once_and_the_event_loop_goes_on(directory):
    with owning(directory, PAGES, 9 * MB) as owner:
        pool = local_pool(PAGES, 9 * MB)
        receiver = await CudaIpcReceiver.open(owner.endpoint, pool)
        pairs = random_pairs(PAGES, random.Random(5))
        pulls = asyncio.gather(*(receiver.pull(pairs[start::4]) for start in range(4)))
        ticks = 0
        while not pulls.done():
            ticks += 1
            await asyncio.sleep(0)
        await pulls
        assert ticks > 5
        check(pool, pairs)
        await receiver.close()


@pytest.mark.parametrize("gpu", gpus())
async def test_a_pull_waits_for_the_owners_step(directory, gpu):
    """What the step writes is there, though it was announced before and asked for before."""
    with owning(directory, PAGES, MB, gpu=gpu) as owner:
        pool = local_pool(PAGES, MB)
        receiver = await CudaIpcReceiver.open(owner.endpoint, pool)
        assert receiver.sees_steps
        pairs = random_pairs(PAGES // 2, random.Random(6))
        for step in range(1, 6):
            waiting = asyncio.create_task(receiver.pull(pairs, step))
            await asyncio.sleep(0.01)
            await asyncio.to_thread(owner.ask, f"step {step} {step}")
            await asyncio.wait_for(waiting, 20)
            check(pool, pairs, seed=step)
        waiting = asyncio.create_task(receiver.pull(pairs, 99))
        await asyncio.sleep(0.01)
        await asyncio.wait_for(receiver.close(), 5)
        with pytest.raises(TransportError, match="closed before"):
            await waiting


@pytest.mark.parametrize("gpu", gpus())
async def test_a_waiting_pull_leaves_the_owners_gpu_alone(directory, gpu, monkeypatch):
    """Only from another one is a little copied meanwhile."""
    rehearsed = []
    monkeypatch.setattr(CudaPageCopier, "rehearse", lambda copier: rehearsed.append(copier))
    with owning(directory, PAGES, MB, gpu=gpu) as owner:
        pool = local_pool(PAGES, MB)
        receiver = await CudaIpcReceiver.open(owner.endpoint, pool)
        waiting = asyncio.create_task(receiver.pull([(3, 4)], 1))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(owner.ask, "step 1 1")
        await asyncio.wait_for(waiting, 20)
        check(pool, [(3, 4)], seed=1)
        assert bool(rehearsed) == (gpu == 1)
        await receiver.close()


async def test_recycled_pages_and_their_generations(directory):
    with owning(directory, PAGES, MB) as owner:
        pool = local_pool(PAGES, MB)
        receiver = await CudaIpcReceiver.open(owner.endpoint, pool)
        assert receiver.generations([0, PAGES - 1]) == [1, 1]
        await receiver.pull([(3, 4)])
        check(pool, [(3, 4)])
        owner.ask("refill 1")
        await receiver.pull([(3, 4)])
        check(pool, [(3, 4)], seed=1)
        assert receiver.generations([0, PAGES - 1]) == [2, 2]
        await receiver.close()


def free_memory() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(0)[0]


async def soon_free(least: int) -> int:
    for _ in range(100):
        if (free := free_memory()) >= least:
            break
        await asyncio.sleep(0.05)
    return free


@pytest.mark.parametrize("strategy", [COPY_ENGINE, CopyStrategy(32)], ids=str)
@pytest.mark.parametrize("gpu", gpus())
async def test_the_owner_is_killed(directory, strategy, gpu):
    """Between pulls and during one. What was pulled is right or an error; the memory comes back."""
    pages, page_bytes = 1000, 4 * MB
    pool = local_pool(pages, page_bytes)
    page_content(0, page_bytes)
    before = free_memory()
    everything = [(page, page) for page in range(pages)]
    for during in (False, True, True):
        owner = Owner(directory, pages, page_bytes, gpu=gpu)
        receiver = await open_fixed(owner.endpoint, pool, strategy)
        pool.pool.fill_(UNTOUCHED)
        torch.cuda.synchronize()
        if during:
            pulls = [asyncio.create_task(receiver.pull(everything)) for _ in range(20)]
            await asyncio.sleep(0.005)
            owner.kill()
            results = await asyncio.wait_for(asyncio.gather(*pulls, return_exceptions=True), 60)
            assert all(result is None or isinstance(result, TransportError) for result in results), results
            print("pulls that ended well:", results.count(None), "of", len(results))
            if results[-1] is None:
                check(pool, everything)
        else:
            await receiver.pull(everything[:10])
            owner.kill()
            check(pool, everything[:10])
            await asyncio.sleep(0.2)
            try:
                await receiver.pull(everything[10:20])
            except TransportError as error:
                print("a pull from a dead owner:", error)
            else:
                check(pool, everything[:20])
        assert receiver.generations([0]) == [1]
        with_mapping = free_memory()
        await receiver.close()
        if gpu == 0:
            free = await soon_free(before - SLACK)
            print(f"free: {before >> 20} before, {with_mapping >> 20} mapped, {free >> 20} closed, MiB")
            assert free >= before - SLACK > with_mapping
        # This process's GPU goes on, and the next owner's pool can be used.
        assert float(torch.ones(8, device="cuda:0").sum()) == 8.0
    with owning(directory, PAGES, page_bytes, gpu=gpu) as owner:
        receiver = await open_fixed(owner.endpoint, pool, strategy)
        pool.pool.fill_(UNTOUCHED)
        torch.cuda.synchronize()
        await receiver.pull([(5, 6)])
        check(pool, [(5, 6)])
        await receiver.close()


@pytest.mark.parametrize("strategy", [COPY_ENGINE, CopyStrategy(2)], ids=str)
async def test_a_cancelled_pull_writes_nothing_more(directory, strategy, monkeypatch):
    monkeypatch.setattr(cuda_copy_module, "PART_BYTES", 8 * MB)
    pages, page_bytes = 1000, 4 * MB
    with owning(directory, pages, page_bytes) as owner:
        pool = local_pool(pages, page_bytes)
        receiver = await open_fixed(owner.endpoint, pool, strategy)
        everything = [(page, page) for page in range(pages)]
        await receiver.pull(everything[:4])
        cut = 0
        for delay in (0, 0.0005, 0.001, 0.002):
            pool.pool.fill_(UNTOUCHED)
            torch.cuda.synchronize()
            task = asyncio.create_task(receiver.pull(everything))
            await asyncio.sleep(delay)
            task.cancel()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            cut += bool((pool.pool[pages - 1] == UNTOUCHED).all())
            pool.pool.fill_(UNTOUCHED)
            torch.cuda.synchronize()
            await asyncio.sleep(0.1)
            check(pool, [])
        assert cut, "no pull was cut short"
        await receiver.pull([(7, 8)])
        check(pool, [(7, 8)])
        await receiver.close()


def copies_begin(receiver):
    """An event: the receiver has begun to copy."""
    begun, copy = threading.Event(), receiver._copy

    def tell(*args):
        begun.set()
        copy(*args)

    receiver._copy = tell
    return begun


async def test_close_waits_and_is_final(directory):
    pages, page_bytes = 500, 4 * MB
    with owning(directory, pages, page_bytes) as owner:
        pool = local_pool(pages, page_bytes)
        receiver = await CudaIpcReceiver.open(owner.endpoint, pool)
        again = await CudaIpcReceiver.open(owner.endpoint, pool)  # as after a reconnect
        everything = [(page, page) for page in range(pages)]
        begun = copies_begin(receiver)
        pull = asyncio.create_task(receiver.pull(everything))
        assert await asyncio.to_thread(begun.wait, 10)  # what has not begun is not waited for
        await asyncio.gather(receiver.close(), receiver.close())
        assert pull.done()
        await pull
        check(pool, everything)
        with pytest.raises(TransportError, match="closed"):
            await receiver.pull([(0, 0)])
        with pytest.raises(TransportError, match="closed"):
            receiver.generations([0])
        await receiver.close()
        pool.pool.fill_(UNTOUCHED)
        torch.cuda.synchronize()
        await again.pull([(1, 2)])
        check(pool, [(1, 2)])
        await again.close()


async def test_page_ids_out_of_range(directory):
    with owning(directory, PAGES, MB) as owner:
        pool = local_pool(PAGES, MB)
        receiver = await CudaIpcReceiver.open(owner.endpoint, pool)
        for pair in ((PAGES, 0), (-1, 0), (0, PAGES), (0, -1)):
            with pytest.raises(TransportError, match="is not one of"):
                await receiver.pull([(0, 0), pair])
        with pytest.raises(TransportError, match="is not one of"):
            receiver.generations([PAGES])
        check(pool, [])
        await receiver.close()
