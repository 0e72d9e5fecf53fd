"""Which runner a device gets."""

from __future__ import annotations

import time

from baton.attention.base import AttentionBackend
from baton.attention.fa3 import Fa3Attention
from baton.engine.cuda_runner import CudaRunner
from baton.engine.model_runner import ModelRunner
from baton.kvcache.pool import KvPool
from baton.models.decoder import Model
from baton.rpc.logs import get_logger

_log = get_logger("baton.engine")


def make_runner(
    model: Model,
    pool: KvPool,
    prefill: type[AttentionBackend],
    decode: type[AttentionBackend],
    max_slots: int,
    context_length: int,
) -> ModelRunner | CudaRunner:
    """The one with fused kernels and CUDA graphs where both backends are FA3, else the plain one."""
    if prefill is not Fa3Attention or decode is not Fa3Attention:
        return ModelRunner(
            model,
            pool,
            max_slots=max_slots,
            prefill_attention=prefill,
            decode_attention=decode,
            device=pool.device,
        )
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 1.0:
            last = time.monotonic()
            _log.info("capturing CUDA graphs", done=done, total=total)

    runner = CudaRunner(model, pool, max_slots=max_slots, context_length=context_length, progress=report)
    if runner.graphs is not None:
        mib = round(runner.graphs.bytes / 2**20)
        _log.info("CUDA graphs captured", seconds=round(runner.graphs.seconds, 2), mib=mib)
    return runner
