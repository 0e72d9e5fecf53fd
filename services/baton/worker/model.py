"""A rank's model by its configuration: device, dtype, loading, attention backends, layout of its pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from baton import cgroups
from baton.attention.base import AttentionBackend
from baton.attention.fp8 import E4M3
from baton.attention.registry import resolve as resolve_attention
from baton.config import WorkerConfig
from baton.gguf_file import close_opened
from baton.kvcache.kv_pool import KvLayout, PoolLayout, StateLayout, default_page_size
from baton.layers.attention import AttentionOptions
from baton.layers.cache_spec import CacheSpec, State
from baton.layers.tensor_parallel import ONE_RANK, Communicator, IndexRange, Shard
from baton.model_path import resolve
from baton.models.config import read_config
from baton.models.decoder import LanguageModel
from baton.models.kv_scales import digest, read_kv_scales
from baton.models.loader import (
    cache_specs,
    declared,
    fingerprint,
    indivisible,
    load_model,
    weight_bytes,
)
from baton.models.transformers_backend import TransformersModel
from baton.models.weight_plan import weight_plan
from baton.rpc.errors import failed_precondition, invalid
from baton.rpc.logs import get_logger
from baton.v1 import common_pb2
from baton.worker.attention_check import check_attention
from baton.worker.memory import check_weights, free_and_total

_log = get_logger()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = ("auto", "fp8_e4m3")
PROGRESS_SECONDS = 1.0


class Attending(Protocol):
    """A model, or a drafter's head."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def attention_options(self) -> Sequence[AttentionOptions]: ...

    @property
    def caches(self) -> Sequence[CacheSpec]: ...


def attention_of(
    config: WorkerConfig, model: Attending, device: torch.device
) -> tuple[tuple[type[AttentionBackend], str], tuple[type[AttentionBackend], str]]:
    """For prompts and for decode rows, each with the reason for its choice. Raises NoBackend."""
    features = frozenset[str]().union(*(options.features for options in model.attention_options))
    if any(isinstance(spec, State) for spec in model.caches):
        features |= {"states"}
    head_dims = frozenset(spec.head_dim for spec in model.caches if not isinstance(spec, State))
    needs = (device, model.dtype, head_dims, features, config.batch_invariant)
    prefill = resolve_attention(config.prefill_attention, *needs)
    return prefill, resolve_attention(config.decode_attention, *needs)


def sized(config: WorkerConfig, device: torch.device) -> WorkerConfig:
    """The configuration with --max-rows, --token-budget and the threads of several ranks chosen, where
    they are 0."""
    rows, budget = (64, 512) if device.type == "cpu" else (256, 2048)
    rows = config.max_rows or min(rows, config.token_budget or rows)
    threads, usable = config.threads, min(torch.get_num_threads(), cgroups.cores())
    if not threads and (config.tp > 1 or usable < torch.get_num_threads()):
        threads = max(1, usable * config.nnodes // config.tp)
    budget = config.token_budget or max(budget, rows)
    return replace(config, max_rows=rows, token_budget=budget, threads=threads)


def check_model(config: WorkerConfig, device: torch.device) -> None:
    """Before anything is loaded and other ranks are started. Raises NoBackend for attention that was asked
    for and does not work, CheckpointError for a model that cannot be divided, BatonError for one whose pages
    cannot be in FP8, or whose context is shorter than asked for."""
    path, context = resolve(config.model), config.context_length or None
    if context is not None and context > (most := read_config(path, None, config.model_impl).context_length):
        raise invalid(
            "context_length", f"--context-length must be at most {most}, the model's own, not {context}"
        )
    named = config.batch_invariant or {config.prefill_attention, config.decode_attention} != {"auto"}
    if named and read_config(path, context, config.model_impl).implementation == "baton":
        attention_of(config, declared(path, dtype_of(config.dtype, device), context), device)
    if config.tp == 1 and config.kv_dtype == "auto":
        return
    specs = cache_specs(read_config(path, implementation=config.model_impl))
    if any(isinstance(spec, State) for spec in specs):
        if config.kv_dtype != "auto":
            raise failed_precondition("models with recurrent layers: leave out --kv-dtype")
        if config.nnodes > 1:
            raise failed_precondition(
                "models with recurrent layers are divided among ranks of one host only: leave out --nnodes"
            )
        # A GPU's part of a page has its share of the KV heads and of the states.
        if device.type != "cpu" and (heads := max(spec.heads for spec in specs)) % config.tp:
            raise failed_precondition(
                f"on GPUs --tp must divide this model's {heads} KV heads, as it has recurrent layers"
            )
    if (problem := indivisible(specs, config.tp, config.kv_dtype)) is not None:
        raise failed_precondition(problem)
    if config.tp == 1:
        return
    weight_bytes(
        path,
        dtype_of(config.dtype, device),
        implementation=config.model_impl,
        quantization=config.quantization,
        quantize_head=config.quantize_head,
        device=device,
        load_format=config.load_format,
        shard=Shard(0, config.tp, config.nnodes, config.ep),
    )


def has_states(config: WorkerConfig) -> bool:
    """Whether the model has recurrent layers."""
    specs = cache_specs(read_config(resolve(config.model), implementation=config.model_impl))
    return any(isinstance(spec, State) for spec in specs)


def load(
    config: WorkerConfig,
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    shard: Shard = ONE_RANK,
    communicator: Communicator | None = None,
) -> LanguageModel:
    """A rank's shard. Raises CheckpointError, and BatonError if there is no memory for it."""
    context = config.context_length or None
    size = weight_bytes(
        path,
        dtype,
        context,
        config.model_impl,
        quantization=config.quantization,
        quantize_head=config.quantize_head,
        device=device,
        load_format=config.load_format,
        shard=shard,
    )
    together = ranks_together(config.device, shard) if shard.first_of_host else 1
    check_weights(size * together, *free_and_total(device), config.memory_fraction, device)
    started = time.monotonic()
    model = load_model(
        path,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        progress=_progress_log(),
        context_length=context,
        implementation=config.model_impl,
        quantization=config.quantization,
        quantize_head=config.quantize_head,
        shard=shard,
        communicator=communicator,
    )
    if isinstance(model, TransformersModel):
        (prefill, _), (decode, _) = attention_of(config, model, device)
        page_size = config.page_size or default_page_size(device)  # none of these has states
        check_attention(model, kv_layout(model, page_size, model.config.used_length), prefill, decode)
    seconds = time.monotonic() - started
    _log.info(
        "model loaded",
        model=config.model,
        gib=round(size / 2**30, 2),
        seconds=round(seconds, 2),
        gb_per_second=round(size / 1e9 / max(seconds, 1e-9), 2),
    )
    if (scales := kv_scales(config, path, model)) is not None:
        _log.info("KV pool in FP8", scales="1" if bool((scales == 1).all()) else "the checkpoint's")
        first, count = shard.kv_heads(model.caches[0].heads)
        model.set_kv_scales(scales[:, :, first : first + count].contiguous().to(model.device))
    return model


def kv_scales(config: WorkerConfig, path: Path, model: LanguageModel) -> torch.Tensor | None:
    """float32 [layers, 2, kv heads], of all ranks; None: the pool is in the model's dtype. Raises
    ModelError."""
    if config.kv_dtype == "auto":
        return None
    return read_kv_scales(path, len(model.attention_options), model.caches[0].heads, config.load_format)


def quantized(config: WorkerConfig, path: Path, device: torch.device, dtype: torch.dtype) -> str:
    """What quantization adds to a fingerprint, as keys and values differ: how weights are quantized while
    loading, and how they are kept in memory. A CPU and a GPU compute differently with what they keep, and a
    CPU keeps less. Empty where the checkpoint's weights are computed with as they are."""
    plan = weight_plan(path, device, config.quantization, False, config.load_format, dtype)
    if plan.method is None:
        return " fp8" if plan.fp8 else ""
    how = "" if config.quantization == "auto" else f" {config.quantization}"
    return f"{how} {plan.method.name} on {device.type}"


def model_fingerprint(config: WorkerConfig, path: Path, model: LanguageModel, device: torch.device) -> str:
    """Fingerprint of the checkpoint, which is closed, and of all that changes its keys and values. Raises
    ModelError."""
    variant = model.config.variant + quantized(config, path, device, model.dtype)
    if config.tp > 1 and config.load_format == "dummy":
        variant += f" tp {config.tp}" + " ep" * config.ep  # each rank's weights are random
    found = fingerprint(path, model.dtype, config.load_format, variant)
    close_opened()
    return found


def _progress_log() -> Callable[[int, int], None]:
    """Logs the progress of a long load about once a second."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            _log.info("loading weights", percent=round(100 * done / max(1, total)), mib=round(done / 2**20))

    return report


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise invalid("device", f"device {name!r} is not known; use auto, cpu, cuda or cuda:INDEX") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        text = f"device {name!r}: torch {torch.__version__} sees no CUDA device; use --device cpu"
        raise failed_precondition(text)
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        there = f"GPUs here are cuda:0 to cuda:{last}" if last else "only GPU here is cuda:0"
        text = f"device {name!r} is not there: the {there}"
        raise failed_precondition(text)
    return device


def use_device(device: torch.device) -> None:
    """Makes a GPU that is named by its index this thread's: kernels are launched on the current one."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def rank_device(name: str, shard: Shard) -> torch.device:
    """The device of one of several ranks: on GPUs each has its own, but where one GPU is named all share
    it. Raises BatonError."""
    device = device_of(name)
    if device.type == "cuda" and device.index is None and shard.size > 1:
        return torch.device("cuda", shard.rank)
    return device


def share_gpu(name: str, shard: Shard) -> bool:
    """Whether several ranks compute on one GPU."""
    device = device_of(name)
    return shard.size > 1 and device.type == "cuda" and device.index is not None


def ranks_together(name: str, shard: Shard) -> int:
    """How many ranks a rank's device has, itself included."""
    if device_of(name).type == "cpu":
        return shard.per_host
    return shard.size if share_gpu(name, shard) else 1


def dtype_of(name: str, device: torch.device) -> torch.dtype | None:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    if name not in DTYPES:
        raise invalid("dtype", f"dtype {name!r} is not known; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def kv_layout(model: LanguageModel, page_size: int, context: int) -> PoolLayout:
    dtype = model.dtype if model.attention_options[0].kv_scales is None else E4M3
    return PoolLayout.of([spec.within(context) for spec in model.caches], page_size, dtype)


def own_part(layout: PoolLayout, shard: Shard, device: torch.device) -> tuple[PoolLayout, IndexRange | None]:
    """The part of the pages of all heads that the pool of this rank keeps, which on CPUs all ranks of a
    host share; and the heads of the rank in it, None: all."""
    if shard.size == 1:
        return layout, None
    head_range = shard.kv_heads(layout.num_kv_heads)
    held = shard.host_kv_heads(layout.num_kv_heads) if device.type == "cpu" else head_range
    return layout.with_heads(held[1]), (head_range[0] - held[0], head_range[1])


LAYOUT_VERSION = 2


def layout_message(
    layout: PoolLayout, model_fingerprint: str, scales: torch.Tensor | None, parts: int = 1
) -> common_pb2.Layout:
    """`parts`: in which a page lies, one behind the other, with a share of each layer's states each."""
    layouts: list[KvLayout | StateLayout] = [*layout.layouts, *layout.states]
    in_parts = f" in {parts} parts" if parts > 1 else ""
    groups = [
        common_pb2.KvGroup(
            kind=group.spec.kind + (in_parts if isinstance(group.spec, State) else ""),
            layers=len(group.layers),
            bytes_per_token=of_group.bytes_per_token_per_layer,
            dtype=str(of_group.dtype).removeprefix("torch."),
            window=group.spec.window or 0,
            scales="" if scales is None else digest(scales[list(group.layers)]),
        )
        for group, of_group in zip(layout.groups, layouts, strict=True)
    ]
    return common_pb2.Layout(
        model_fingerprint=model_fingerprint,
        page_size=layout.page_size,
        groups=groups,
        version=LAYOUT_VERSION,
    )
