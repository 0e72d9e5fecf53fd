"""A worker's memory: how many pages its KV pool gets, and what the C library's heap keeps."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import psutil
import torch

from baton import cgroups
from baton.config import WorkerConfig
from baton.engine.draft.paged_drafter import PagedDrafter
from baton.engine.images import CACHED_BYTES, ImageEncoder
from baton.engine.plan import Runner
from baton.engine.warmup import StepLimits, largest_steps
from baton.kvcache.kv_pool import PagePool, PoolLayout
from baton.rpc.errors import failed_precondition, invalid
from baton.worker.images.contents import ROOM_BYTES

AUTO_KV_TOKENS = 65536
AUTO_KV_BYTES = 2**30
"""Default limit of a pool on the host."""
LEAST_TOKENS = 1024
"""A pool on a GPU that holds less than this, or than one context, is not worth starting with."""
FREE_FRACTION = 0.95
"""A process takes at most this part of what is free on a GPU: the driver needs some too."""
GIB = 2**30


def num_pages(
    config: WorkerConfig,
    layout: PoolLayout,
    context_length: int,
    device: torch.device,
    make_runner: Callable[[PagePool], Runner[Any]] | None,
    together: int = 1,
    drafter: PagedDrafter | None = None,
    image_tokens: int = 0,
) -> int:
    """Pages of --kv-tokens: for so many tokens in all KV groups (see PoolLayout.pages). By default, on a GPU,
    what --memory-fraction leaves beside the loaded weights and the working memory, which is measured with a
    runner (None: there is none), and `drafter` beside its steps; on a CPU, enough for many contexts within
    1 GiB. `image_tokens`: the most that one image has. Raises BatonError."""
    size, groups = layout.page_size, len(layout.groups)
    if config.kv_tokens:
        if config.kv_tokens < size:
            raise invalid("kv_tokens", f"--kv-tokens must be at least one page ({size} tokens)")
        return layout.pages(config.kv_tokens // size)
    context = min(config.context_length or context_length, context_length)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        working = 0
        if make_runner is not None:
            limits = StepLimits(config.token_budget, context, size, pages=1, groups=groups)
            most = min(image_tokens, context)
            working = working_bytes(make_runner, layout, limits, device, drafter, most)
        least = min(context, LEAST_TOKENS)
        # Ranks that share a GPU have loaded as much each, and get as much of what is free.
        free, total = free // together, total // together
        return fitting(reserved, working, free, total, config.memory_fraction, layout, least)
    least, most = -(-min(context, AUTO_KV_TOKENS) // size), AUTO_KV_BYTES // layout.page_bytes
    usual = min(layout.pages(AUTO_KV_TOKENS // size), most // groups * groups)
    return max(usual, layout.pages(least))


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Bytes of the device's memory; on a CPU what the system calls available is free, or what the process's
    control groups leave of their limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    whole = memory.available, memory.total
    return min(whole, cgroups.memory() or whole)


def check_pool(needed: int) -> None:
    """Raises BatonError if the process's control groups leave no room for a host's KV pool of `needed` bytes:
    in the midst of its allocation the kernel would kill the process."""
    limits = cgroups.memory()
    if limits is not None and needed > limits[0]:
        raise failed_precondition(
            f"the KV pool does not fit: it takes {needed / GIB:.2f} GiB; {limits[0] / GIB:.2f} of the "
            f"{limits[1] / GIB:.2f} GiB that this container may take are free: lower --kv-tokens"
        )


def check_weights(needed: int, free: int, total: int, fraction: float, device: torch.device) -> None:
    """Raises BatonError if weights of `needed` bytes do not fit into a host's free memory, or a GPU's within
    the `fraction` of all of it that this process may use."""
    room, limit, flag = free, "", ""
    if device.type == "cuda":
        room = min(free, int(total * fraction))
        limit = f", and --memory-fraction {fraction:g} allows {total * fraction / GIB:.2f}"
        flag = ", raise --memory-fraction"
    if needed > room:
        raise failed_precondition(
            f"the weights do not fit: they take {needed / GIB:.2f} GiB; {device} has "
            f"{free / GIB:.2f} of {total / GIB:.2f} GiB free{limit}; free memory{flag}, or take a smaller "
            "model or --dtype"
        )


def run_largest_steps(runner: Runner[Any], limits: StepLimits, drafter: PagedDrafter | None = None) -> None:
    """Makes the runner allocate all that steps may need, and a `drafter` that computes prompts behind them.
    Nothing may be in the pool yet. Blocks."""
    for plan in largest_steps(runner.max_slots, limits):
        runner.read(runner.launch(plan))
    if drafter is not None:
        drafter.fill_most(min(limits.token_budget, limits.context_length - 1))


def working_bytes(
    make_runner: Callable[[PagePool], Runner[Any]],
    layout: PoolLayout,
    limits: StepLimits,
    device: torch.device,
    drafter: PagedDrafter | None = None,
    image_tokens: int = 0,
) -> int:
    """What a runner, and a drafter, take of a GPU beside weights and KV pool: activations, sampling, CUDA
    graphs; where the model sees, those of an image of so many tokens, and all embeddings that may be here at
    a time. Measured with one over a pool of a single page, which is given up again. Blocks."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    pool = PagePool(layout, 1, device, spare=1)
    runner = make_runner(pool)
    run_largest_steps(runner, limits, drafter)
    images: ImageEncoder | None = getattr(runner, "images", None)
    if images is not None:
        images.run_largest(image_tokens)
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_reserved(device) - before - pool.raw.nbytes
    embeddings = 0 if images is None else CACHED_BYTES + ROOM_BYTES
    del runner, pool, images
    gc.collect()
    torch.cuda.empty_cache()
    return max(0, taken) + embeddings


def fitting(
    reserved: int, working: int, free: int, total: int, fraction: float, layout: PoolLayout, least: int
) -> int:
    """Pages, a spare one among them not counted, for a process that holds `reserved` bytes of a GPU and
    computes in `working` bytes more; of the GPU's `total` bytes `free` are free. Others may use it too, so
    that the fraction counts what is this process's own. Raises BatonError."""
    room = min(int(total * fraction) - reserved, int(free * FREE_FRACTION)) - working
    pages = room // layout.page_bytes - 1
    groups = len(layout.groups)
    if pages * layout.page_size < least * groups:
        token = groups * layout.page_bytes / layout.page_size
        raise failed_precondition(
            f"the model does not fit: its weights take {reserved / GIB:.1f} of the GPU's {total / GIB:.1f} "
            f"GiB, of which this process may use {fraction:.0%} and {free / GIB:.1f} GiB are free, computing "
            f"takes {working / GIB:.2f} GiB, and {least} tokens of KV take {least * token / GIB:.2f} GiB; "
            "free memory, raise --memory-fraction, lower --token-budget or --max-rows, or take a smaller "
            "model or dtype"
        )
    return pages


TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""
KEPT_BYTES = 2**28
"""So much free memory at the end of the heap stays."""
LARGEST_BYTES = 2**25
"""glibc takes no larger threshold; what is larger comes from the system and goes back."""


def keep_freed_memory() -> None:
    """Memory that a step frees stays for the next one. glibc gives it back to the system or not, as the heap
    happens to lie, and what it gets anew costs a fault for each 4 KiB: a fifth of the time of 1,600 tokens'
    prompts was seen. Heaps of threads have at most 64 MiB and are given back when they are empty, so threads
    that begin after this call share the first thread's. Does nothing with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST_BYTES)
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(ARENA_MAX, 1)
