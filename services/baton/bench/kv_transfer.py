"""How fast KV pages are pulled from another process's pool, and how much that slows other work."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from baton.attention.fp8 import E4M3
from baton.bench.machine import visible_gpus
from baton.bench.pools import ONE_EACH, Pools, RankCounts, two_pools
from baton.kvcache import PageAllocator
from baton.kvcache.kv_pool import PoolLayout, default_page_size
from baton.model_path import resolve
from baton.models.config import read_config
from baton.models.loader import cache_specs
from baton.sizing.profile import MeasuredPullCost
from baton.transport import Receiver, open_receiver
from baton.transport.cuda_copy import COPY_ENGINE, CopyStrategy
from baton.worker.model import DTYPES

PAGE_DTYPES = {**DTYPES, "fp8_e4m3": E4M3}


LOAD_BYTES = {"cuda": 2**31, "cpu": 2**27}
LOAD_SECONDS = 1.0
LOAD_TOKENS = 2048
"""Length of the pulls that run beside the decode-like load."""
CHURN = 1000
"""Prompts that a pool has held before its pages are measured."""

Pairs = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class TransferMethod:
    """A transport, and for `cuda_ipc` perhaps a given copy strategy."""

    kind: str
    strategy: CopyStrategy | None = None
    pages: Literal["adjacent", "in use", "random"] = "in use"
    """"adjacent": one run of pages, copied at once, which shows the link's rate. "in use": pages that the
    allocators of two used pools return. "random": any pages."""

    @property
    def name(self) -> str:
        if self.pages == "adjacent":
            return f"{self.kind}, adjacent"
        name = f"{self.kind}, {self.strategy}" if self.strategy is not None else self.kind
        return f"{name}, random pages" if self.pages == "random" else name


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """The rate of a method for a prompt length."""

    method: str
    tokens: int
    pages: int
    bytes: int
    seconds: float
    """Median."""
    fastest_seconds: float
    slowest_seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class Slowdown:
    """How much continuous pulls slow a decode-like load on the receiver's device."""

    method: str
    seconds_alone: float
    """Time of one pass of the load."""
    seconds_meanwhile: float

    @property
    def factor(self) -> float:
        return self.seconds_meanwhile / self.seconds_alone


def methods_for(
    device: torch.device, quotas: Iterable[int], ranks: RankCounts = ONE_EACH
) -> list[TransferMethod]:
    """The reference, adjacent pages, comes first."""
    if device.type == "cpu":
        return [TransferMethod("shm", pages="adjacent"), TransferMethod("shm"), TransferMethod("grpc")]
    kernels = quotas if ranks == ONE_EACH else ()  # a kernel copies from one pool to one pool
    strategies = [COPY_ENGINE, *(CopyStrategy(quota) for quota in kernels)]
    forced = [TransferMethod("cuda_ipc", strategy, "random") for strategy in strategies]
    reference = TransferMethod("cuda_ipc", COPY_ENGINE, "adjacent")
    return [reference, TransferMethod("cuda_ipc"), *forced, TransferMethod("grpc")]


@contextlib.asynccontextmanager
async def receiver_of(pools: Pools, method: TransferMethod) -> AsyncIterator[Receiver]:
    """Raises TransportError."""
    opened = await open_receiver(pools.endpoints, pools.pages, [method.kind])
    if method.strategy is not None:
        from baton.transport.cuda_ipc import CudaIpcReceiver

        assert isinstance(opened.receiver, CudaIpcReceiver)
        opened.receiver.strategy = method.strategy
    try:
        yield opened.receiver
    finally:
        await opened.receiver.close()


def pairs_for(method: TransferMethod, count: int, pool_pages: int, seed: int) -> list[tuple[int, int]]:
    """`count` pages of both pools. Raises OutOfPages if half a pool is smaller."""
    if method.pages == "adjacent":
        return [(page, page) for page in range(count)]
    rng = random.Random(seed)
    if method.pages == "in use":
        return list(zip(*(pages_in_use(pool_pages, count, rng) for _ in range(2)), strict=True))
    return list(zip(*(rng.sample(range(pool_pages), count) for _ in range(2)), strict=True))


def pages_in_use(total: int, count: int, rng: random.Random) -> list[int]:
    """Pages of a prompt from an allocator that has held prompts of 1 to 128 pages, which grew and were freed
    in any order, at about half occupancy."""
    allocator = PageAllocator(total)
    held: list[list[int]] = []
    for _ in range(CHURN):
        size = rng.randint(1, min(128, max(1, total // 8)))
        while held and allocator.free - size < total // 2:
            allocator.give_back(held.pop(rng.randrange(len(held))))
        held.append(allocator.take(size))
        for sequence in rng.sample(held, min(8, len(held))):
            if allocator.free > total // 2:
                sequence.extend(allocator.take(1))
    return allocator.take(count)


async def measure(
    pools: Pools,
    method: TransferMethod,
    receiver: Receiver,
    tokens: int,
    repeats: int,
    done: Callable[[], None] = lambda: None,
) -> Rate:
    """Time from the call until a decode node's core would be notified. The first pull is not counted. `done`
    is called after each pull."""
    count = -(-tokens // pools.page_size)
    ends = []
    times = []
    for number in range(repeats + 1):
        pairs = pairs_for(method, count, pools.pages.num_pages, number)
        started = time.perf_counter()
        await receiver.pull(pairs, copied=lambda _: ends.append(time.perf_counter()))
        times.append(ends[-1] - started)
        done()
    times = times[1:]
    size = count * pools.pages.page_bytes
    return Rate(method.name, tokens, count, size, statistics.median(times), min(times), max(times))


async def measure_slowdown(
    pools: Pools, method: TransferMethod, receiver: Receiver, tokens: int, load: Load
) -> Slowdown:
    """The load alone, then during continuous pulls of `tokens`. Receivers with a thread of their own get two
    pulls at a time, so that none waits for this process."""
    pairs = pairs_for(method, -(-tokens // pools.page_size), pools.pages.num_pages, 0)
    alone = await asyncio.to_thread(load.run, LOAD_SECONDS)
    running = True

    async def pull_on() -> None:
        while running:
            await receiver.pull(pairs)

    pulling = asyncio.gather(*(pull_on() for _ in range(1 if method.kind == "grpc" else 2)))
    try:
        meanwhile = await asyncio.to_thread(load.run, LOAD_SECONDS)
    finally:
        running = False
        await pulling
    return Slowdown(method.name, alone, meanwhile)


class Load:
    """A matrix-vector product over a large matrix; like decode steps it reads memory at full rate."""

    def __init__(self, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        columns = 8192
        rows = LOAD_BYTES[device.type] // dtype.itemsize // columns
        self._matrix = torch.randn(rows, columns, device=device, dtype=dtype)
        self._vector = torch.randn(columns, device=device, dtype=dtype)
        self._device = device

    def run(self, seconds: float) -> float:
        """Median seconds of a pass; passes are repeated for `seconds`. Blocks."""
        times = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            times.append(self._one())
        return statistics.median(times)

    def _one(self) -> float:
        if self._device.type == "cpu":
            started = time.perf_counter()
            torch.mv(self._matrix, self._vector)
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # Keeps the device busy while the rest is enqueued; pulls may hold the interpreter meanwhile.
        torch.mv(self._matrix, self._vector)
        begin.record()
        torch.mv(self._matrix, self._vector)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


@dataclasses.dataclass(frozen=True, slots=True)
class KvBench:
    """What `baton bench kv` measures."""

    model: str
    layout: PoolLayout
    device: torch.device
    owner_gpu: str
    """The owner's GPU by its name in CUDA_VISIBLE_DEVICES, or those of its ranks; empty: on the CPU."""
    lengths: tuple[int, ...]
    repeats: int
    quotas: tuple[int, ...]
    decode_load: bool
    ranks: RankCounts = ONE_EACH

    async def run(self, on_progress: Callable[[str, int], None]) -> dict[str, Any]:
        """Results in bytes and seconds. `on_progress` is called after each measurement with its method and
        the number of measurements. Raises TransportError, SegmentError or BenchError."""
        methods = methods_for(self.device, self.quotas, self.ranks)
        load = Load(self.device) if self.decode_load else None
        total = len(methods) * (len(self.lengths) * (self.repeats + 1) + self.decode_load)
        pages = pool_pages(max(self.lengths), self.layout)
        rates: list[Rate] = []
        slowdowns: list[Slowdown] = []
        async with two_pools(self.layout, pages, self.device, self.owner_gpu, self.ranks) as pools:
            for method in methods:
                done = functools.partial(on_progress, method.name, total)
                async with receiver_of(pools, method) as receiver:
                    for length in self.lengths:
                        rates.append(await measure(pools, method, receiver, length, self.repeats, done))
                    if load is not None:
                        tokens = min(LOAD_TOKENS, max(self.lengths))
                        slowdowns.append(await measure_slowdown(pools, method, receiver, tokens, load))
                        done()
        return self._results(rates, slowdowns)

    def _results(self, rates: list[Rate], slowdowns: list[Slowdown]) -> dict[str, Any]:
        return {
            "gpu": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "",
            "two_gpus": bool(self.owner_gpu) and self.owner_gpu.split(",") != visible_gpus()[:1],
            "model": self.model,
            "ranks": f"{self.ranks[0]} to {self.ranks[1]}",
            "page_size": self.layout.page_size,
            "page_bytes": self.layout.page_bytes,
            "dtype": str(self.layout.dtype).removeprefix("torch."),
            "repeats": self.repeats,
            "rates": [
                {**dataclasses.asdict(rate), "gigabytes_per_second": rate.gigabytes_per_second}
                for rate in rates
            ],
            "decode_load": [{**dataclasses.asdict(one), "factor": one.factor} for one in slowdowns],
        }


def layout_of(model: str, dtype: str, page_size: int, device: torch.device) -> PoolLayout:
    """The layout that a worker would use if no layer had a window. Raises ModelError or CheckpointError."""
    config = read_config(resolve(model))
    default = torch.float32 if device.type == "cpu" else config.dtype
    specs = [spec.within(1) for spec in cache_specs(config)]
    return PoolLayout.of(specs, page_size or default_page_size(device), PAGE_DTYPES.get(dtype, default))


def pool_pages(tokens: int, layout: PoolLayout) -> int:
    """Room for a prompt of so many tokens while others hold half of the pool."""
    return 2 * -(-tokens // layout.page_size) + 1


def fitting(lengths: Sequence[int], layout: PoolLayout, device: torch.device) -> tuple[int, ...]:
    """The lengths for which two pools fit into free memory."""
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else shutil.disk_usage("/dev/shm").free
    return tuple(each for each in lengths if 2 * pool_pages(each, layout) * layout.page_bytes < free)


PAGES = (4, 128)
"""A short prompt and a long one; latency is the part that does not grow with the bytes."""
REPEATS = 9
SHARED_MEMORY = ("shm", "cuda_ipc")
"""Transports whose receivers read the owner's generations themselves."""


async def pull_cost(layout: PoolLayout, device: torch.device, transport: str) -> MeasuredPullCost:
    """transport: empty: the one that two workers of this host use. Raises TransportError, SegmentError or
    BenchError."""
    kind = transport or ("shm" if device.type == "cpu" else "cuda_ipc")
    gpus = visible_gpus() if device.type == "cuda" else []
    gpu = (gpus[1] if len(gpus) > 1 else gpus[0]) if gpus else ""
    method = TransferMethod(kind)
    async with (
        two_pools(layout, 2 * max(PAGES) + 1, device, gpu) as pools,
        receiver_of(pools, method) as receiver,
    ):
        short, long = [
            await measure(pools, method, receiver, count * layout.page_size, REPEATS) for count in PAGES
        ]
    return line(short, long, kind)


def line(short: Rate, long: Rate, kind: str) -> MeasuredPullCost:
    """The line through two measured pulls."""
    per_byte = max(0.0, (long.seconds - short.seconds) / (long.bytes - short.bytes))
    latency = max(0.0, short.seconds - per_byte * short.bytes)
    rate = 1.0 / per_byte if per_byte else float("inf")
    return MeasuredPullCost(latency, rate, kind in SHARED_MEMORY, kind)
