"""Chooses the runner for a device."""

from __future__ import annotations

import time

import torch

from baton.attention.base import AttentionBackend
from baton.attention.paged import PagedAttention
from baton.config import WorkerConfig
from baton.engine.model_runner import ModelRunner
from baton.kvcache.kv_pool import PagePool
from baton.models.body import why_not_fused
from baton.models.decoder import Decoder, LanguageModel
from baton.rpc.logs import get_logger

_log = get_logger()


def make_runner(
    config: WorkerConfig,
    model: LanguageModel,
    pool: PagePool,
    prefill: type[AttentionBackend],
    decode: type[AttentionBackend],
    context_length: int,
    draft_tokens: int = 0,
    tap: tuple[int, ...] = (),
    graphs: bool = True,
) -> ModelRunner:
    """With kernels, and CUDA `graphs`, where the model and device allow it. All ranks are given the same, so
    that they capture the same graphs. `draft_tokens`: of a row, at most. Raises ValueError if
    `config.batch_invariant` is set and the model has no fused body there."""
    problem = unsuited(model, prefill, decode)
    if problem is not None:
        if config.batch_invariant:
            raise ValueError(problem)
        if pool.device.type == "cuda":
            _log.warning("no CUDA graphs: slow", reason=problem)
        return ModelRunner(
            model,
            pool,
            max_slots=config.max_rows,
            context_length=context_length,
            prefill_attention=prefill,
            decode_attention=decode,
            draft_tokens=draft_tokens,
            tap=tap,
        )
    if not config.batch_invariant and (reason := why_not_fused(model)) is not None:
        _log.info("the layers run as modules, in CUDA graphs", reason=reason)
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 1.0:
            last = time.monotonic()
            _log.info("capturing CUDA graphs", done=done, total=total)

    for name, backend in (("any steps", decode), ("small steps with chunks", prefill)):
        if not getattr(backend, "graphs", False):
            _log.warning(f"no CUDA graphs of {name}", reason=f"{backend.name} plans on the host")
            break
    runner = ModelRunner(
        model,
        pool,
        max_slots=config.max_rows,
        token_budget=config.token_budget,
        context_length=context_length,
        prefill_attention=prefill,
        decode_attention=decode,
        kernels=True,
        graphs=graphs,
        batch_invariant=config.batch_invariant,
        draft_tokens=draft_tokens,
        progress=report,
        tap=tap,
    )
    for steps, captured in (("decode", runner.graphs), ("small, with chunks", runner.chunk_graphs)):
        if captured is not None:
            mib, seconds = round(captured.bytes / 2**20), round(captured.seconds, 2)
            _log.info("CUDA graphs captured", steps=steps, seconds=seconds, mib=mib)
    return runner


def unsuited(
    model: LanguageModel, prefill: type[AttentionBackend], decode: type[AttentionBackend]
) -> str | None:
    """Why this model cannot be computed with CUDA graphs; None: it can."""
    for backend in (prefill, decode):
        if not issubclass(backend, PagedAttention):
            return f"attention backend {backend.name!r} does not follow page tables on the device"
    if not isinstance(model, Decoder):
        return f"{model.config.architecture} is computed by the code of transformers"
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability(model.device) == (9, 0)):
        return "its kernels have been made for, and run on, Hopper GPUs alone"
    if why_not_fused(model) is not None and model.dtype == torch.float32:
        return None  # in Triton and torch alone
    try:
        import sgl_kernel  # noqa: F401
    except (ImportError, OSError) as error:
        return f"sgl_kernel cannot be loaded ({str(error).splitlines()[0]}); pip install 'baton-serve[gpu]'"
    return None
