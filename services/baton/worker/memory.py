"""How many pages a worker's KV pool gets."""

from __future__ import annotations

import psutil
import torch

from baton.config import WorkerConfig
from baton.kvcache.pool import KvLayout
from baton.rpc.errors import failed_precondition, invalid

AUTO_KV_TOKENS = 65536
AUTO_KV_BYTES = 2**30
"""Default limit of a pool on the host."""
LEAST_TOKENS = 1024
"""A pool on a GPU that holds less than this, or than one context, is not worth starting with."""
FREE_FRACTION = 0.95
"""A pool takes at most this fraction of a GPU's free memory: activations need some too."""
GIB = 2**30


def num_pages(config: WorkerConfig, layout: KvLayout, context_length: int, device: torch.device) -> int:
    """Pages of --kv-tokens. By default, on a GPU, what --memory-fraction leaves beside the loaded weights; on
    a CPU, enough for many contexts within 1 GiB. Raises BatonError."""
    size = layout.page_size
    if config.kv_tokens:
        if config.kv_tokens < size:
            raise invalid("kv_tokens", f"--kv-tokens must be at least one page ({size} tokens)")
        return config.kv_tokens // size
    context = min(config.context_length or context_length, context_length)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        return fitting(own, free, total, config.memory_fraction, layout, min(context, LEAST_TOKENS))
    fitting_host = AUTO_KV_BYTES // layout.page_bytes
    return max(min(AUTO_KV_TOKENS // size, fitting_host), -(-min(context, AUTO_KV_TOKENS) // size))


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Bytes of the device's memory; on a CPU what the system calls available is free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    return memory.available, memory.total


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
            f"the weights do not fit: by config.json they take {needed / GIB:.2f} GiB; {device} has "
            f"{free / GIB:.2f} of {total / GIB:.2f} GiB free{limit}; free memory{flag}, or take a smaller "
            "model or --dtype"
        )


def fitting(own: int, free: int, total: int, fraction: float, layout: KvLayout, least: int) -> int:
    """Pages, a spare one among them not counted, for a process that holds `own` bytes of a GPU, of whose
    `total` bytes `free` are free: others may use it too, so that a fraction counts what is this process's
    own. Raises BatonError."""
    room = min(int(total * fraction) - own, int(free * FREE_FRACTION))
    pages = room // layout.page_bytes - 1
    if pages * layout.page_size < least:
        token = layout.page_bytes / layout.page_size
        raise failed_precondition(
            f"the model does not fit: its weights take {own / GIB:.1f} of the GPU's {total / GIB:.1f} GiB, "
            f"of which this process may use {fraction:.0%} and {free / GIB:.1f} GiB are free, and {least} "
            f"tokens of KV take {least * token / GIB:.2f} GiB; free memory, raise --memory-fraction, or take "
            "a smaller model or dtype"
        )
    return pages
