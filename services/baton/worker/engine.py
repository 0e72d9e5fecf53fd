"""Builds an engine from a configuration: model, KV pool, page accounting, runner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baton.attention.base import AttentionBackend
from baton.attention.registry import NoBackend
from baton.config import WorkerConfig
from baton.engine.cpu_threads import TunedRunner
from baton.engine.draft.paged_drafter import PagedDrafter
from baton.engine.grammar_masks import MaskStats
from baton.engine.images import ImageEncoder
from baton.engine.model_runner import ModelRunner
from baton.engine.plan import Runner
from baton.engine.timed_runner import TimedRunner
from baton.engine.warmup import StepLimits, measure_step_cost
from baton.grammar.compiler import THREADS, GrammarCompiler
from baton.grammar.trials import Trials
from baton.handoff.pull_cost import PullMeter
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.kv_groups import longest
from baton.kvcache.kv_pool import PagePool, default_page_size
from baton.model_path import CheckpointError, model_name, resolve
from baton.models.config import ModelError
from baton.models.decoder import LanguageModel
from baton.models.pooling_config import read_pooling
from baton.models.vision import most_image_tokens, tower_fingerprint
from baton.rpc.channel import Dial
from baton.rpc.errors import failed_precondition, invalid
from baton.rpc.logs import get_logger
from baton.step_cost import StepCost, StepLoad, read_cost
from baton.transport import (
    PageStore,
    Receiver,
    SegmentError,
    TransportError,
    check_kinds,
    open_receiver,
    reap_orphans,
)
from baton.v1 import common_pb2, embed_pb2, node_pb2
from baton.worker.checks import checked
from baton.worker.draft_model import LoadedDrafter, load_drafter
from baton.worker.grammar_requests import make_compiler
from baton.worker.host_memory import HostMemory, parse_size
from baton.worker.images.choice import measure_encoding
from baton.worker.memory import num_pages, run_largest_steps
from baton.worker.model import (
    attention_of,
    dtype_of,
    kv_layout,
    kv_scales,
    layout_message,
    load,
    model_fingerprint,
    own_part,
    ranks_together,
    use_device,
)
from baton.worker.pool import PublishedPool, join_parts, make_pool, page_parts
from baton.worker.ranks.channel import CollectiveError
from baton.worker.ranks.followers import FollowerError
from baton.worker.ranks.leader import Ranks
from baton.worker.ranks.messages import MakePool
from baton.worker.ranks.rendezvous import JoinError
from baton.worker.ranks.runner import RanksLost
from baton.worker.runners import make_runner
from baton.worker.step_calls import StepThreadCalls
from baton.worker.step_cost_file import cost_key, keep, read_kept

_log = get_logger()


@dataclass(slots=True)
class Engine:
    """A worker's engine. `close` frees the pool's memory and ends the other ranks."""

    config: WorkerConfig
    """With default step sizes for the device filled in."""

    runner: Runner[Any]
    cache: KvCacheManager
    pool: PagePool
    published: PublishedPool
    ranks: Ranks
    kinds: tuple[str, ...]
    layout: common_pb2.Layout
    model_info: node_pb2.ModelInfo
    device: torch.device
    attention: str
    overlap: bool
    warm: Callable[[], None] | None
    """For StepLoop."""
    masks: MaskStats
    grammars: GrammarCompiler | None
    """None: tokens mean nothing here."""
    trials: Trials | None
    host_memory: HostMemory | None
    """None: there is no host tier."""
    drafter: LoadedDrafter | None
    """The one with a model of its own; None: there is none."""
    images: ImageEncoder | None
    """None: prompts with images are refused."""
    encoding: PullMeter
    """Times of its batches; empty without one."""
    tower: str
    """Fingerprint of the model's vision tower; empty: there is none."""
    in_steps: StepThreadCalls = field(default_factory=StepThreadCalls)
    failing: bool = False
    """The process ends, because an error has escaped the core."""

    @property
    def pages(self) -> PageStore:
        """The pool's bytes, for transports."""
        return self.published.pages

    @property
    def _published(self) -> list[PublishedPool]:
        others = [self.drafter.published] if self.drafter is not None else []
        return [self.published, *(each for each in others if each is not None)]

    @property
    def pools(self) -> list[PageStore]:
        """By FetchRequest.pool."""
        return [each.pages for each in self._published]

    def check_idle(self) -> None:
        """Raises AccountingError unless no page of the pool is held, and accounts are right."""
        self.cache.check(idle=True)
        if self.drafter is not None and self.drafter.cache is not None:
            self.drafter.cache.check()

    def endpoints(self, pool: int = 0) -> list[common_pb2.Endpoint]:
        """`pool`: as FetchRequest.pool. The `grpc` endpoint has no address: pages are served where Prefill
        is."""
        endpoints = self._published[pool].endpoints()
        for endpoint in endpoints:
            if endpoint.HasField("grpc"):
                endpoint.grpc.pool = pool
        return endpoints

    async def open_receiver(
        self,
        endpoints: Sequence[common_pb2.Endpoint],
        address: str,
        busy: Callable[[], bool],
        dial: Dial,
        pool: int = 0,
    ) -> Receiver:
        """`busy`: whether steps are running; called in other threads. `pool`: into which of the pools here.
        Raises TransportError."""
        published = self._published[pool]
        kinds = published.kinds if pool else self.kinds
        opened = await open_receiver(endpoints, published.pages, kinds, address, busy, dial)
        _log.info("pool of a peer opened", address=address, pool=pool, transport=opened.reason)
        return opened.receiver

    def abandon(self) -> None:
        """The process ends, whatever is running."""
        self.ranks.kill()
        for published in self._published:
            if published.segment is not None:
                published.segment.path.unlink(missing_ok=True)

    def close(self) -> None:
        if self.trials is not None:
            self.trials.close()
        if self.host_memory is not None:
            self.host_memory.close()  # before other ranks free what it copies
        self.ranks.close()
        for published in self._published:
            published.close()
        if self.host_memory is not None:
            self.host_memory.unpin()


def build_engine(config: WorkerConfig, incarnation: int, stopping: threading.Event | None = None) -> Engine:
    """Loads the model and makes the pool; blocks. Raises BatonError with one line that says what to do."""
    try:
        return _build(config, incarnation, stopping)
    except (
        CheckpointError,
        ModelError,
        NoBackend,
        SegmentError,
        TransportError,
        FollowerError,
        CollectiveError,
        RanksLost,
        JoinError,
    ) as error:
        raise failed_precondition(str(error)) from error
    except torch.OutOfMemoryError as error:
        text = f"not enough device memory: {error}; lower --kv-tokens, --token-budget or --max-rows"
        raise failed_precondition(text) from error


def _build(config: WorkerConfig, incarnation: int, stopping: threading.Event | None) -> Engine:
    config, device = checked(config)
    if device.type == "cpu" and config.threads:
        torch.set_num_threads(config.threads)
    trials = None if config.step_profile else Trials(width=THREADS)
    use_device(device)
    ranks = Ranks(config, stopping)
    try:
        return _build_ranked(config, device, incarnation, ranks, trials)
    except BaseException:
        if trials is not None:
            trials.close()
        ranks.close()
        raise


def _build_ranked(
    config: WorkerConfig,
    device: torch.device,
    incarnation: int,
    ranks: Ranks,
    trials: Trials | None,
) -> Engine:
    dtype = dtype_of(config.dtype, device)
    kinds = check_kinds(config.transports if config.nnodes == 1 else ("grpc",))
    if device.type == "cuda" and config.tp > 1 and "nixl" in kinds:
        _log.warning("nixl is not offered: it registers one pool alone, and each rank has its own")
        kinds = tuple(kind for kind in kinds if kind != "nixl")
    for orphan in reap_orphans():
        _log.info("removed the segment of a worker that is gone", path=str(orphan))
    path = resolve(config.model)
    model = load(config, path, dtype, device, ranks.shard, ranks.communicator)
    name = model_fingerprint(config, path, model, device)
    ranks.loaded(name)
    drafter = load_drafter(config, model, name, device, kinds)
    tap = drafter.drafter.tap if drafter is not None else ()
    shape = model.config
    size = config.page_size or default_page_size(device, model.caches, model.dtype.itemsize)
    context = min(config.context_length or shape.context_length, shape.context_length)
    layout = kv_layout(model, size, context)
    part_layout = own_part(layout, ranks.shard, device)[0]
    (prefill, why_prefill), (decode, why_decode) = attention_of(config, model, device)
    seen = context

    def computing(pool: PagePool, segment: str | None = None) -> Runner[Any]:
        make = partial(_computing, config, model, pool, (prefill, decode), seen, drafter)
        runner = ranks.lead(make, MakePool(pool.num_pages, size, seen, segment, tap, config.most_drafts))
        return runner if device.type != "cpu" else _tuned(runner, len(pool.layout.groups))

    measured = None if config.step_profile else computing
    together = ranks_together(config.device, ranks.shard)
    beside = None
    if drafter is not None and isinstance(drafter.drafter, PagedDrafter):
        beside = drafter.drafter  # of a prefill node, which this one is or may become
    more = beside, most_image_tokens(path, model.vision)
    pages = num_pages(config, part_layout, shape.context_length, device, measured, together, *more)
    context = longest(layout.groups, pages, context, size, 2 * config.token_budget)
    pool, published = make_pool(layout, pages, device, kinds, incarnation, ranks.shard)
    published.pages = ranks.pages(published.pages, layout)
    shared = str(published.segment.path) if published.segment is not None and device.type == "cpu" else None
    tree = PrefixTree(size, config.eviction, layout.groups, images=model.vision is not None)
    cache = KvCacheManager(PageAllocator(pages, published.generations), tree)
    runner = _timed(config, shape.vocab_size) if config.step_profile else computing(pool, shared)
    if device.type == "cuda" and config.tp > 1:
        join_parts(published, ranks.parts())
    if device.type == "cuda" and not config.step_profile:
        # After this nothing of consequence is allocated any more.
        limits = StepLimits(config.token_budget, context, size, pages, len(layout.groups))
        run_largest_steps(runner, limits, beside)
    # Measured while the pool is empty.
    size_of_tier = parse_size(config.host_memory, "host_memory")
    host_memory = HostMemory(page_parts(pool, published), cache, size_of_tier) if size_of_tier else None
    parts = config.tp if device.type == "cuda" else 1
    message = layout_message(layout, name, kv_scales(config, path, model), parts)
    if host_memory is not None and config.disk:
        meaning = message.SerializeToString(deterministic=True)
        host_memory.add_disk(Path(config.disk), parse_size(config.disk_size, "disk_size"), meaning)
    pooling, images = read_pooling(path), getattr(runner, "images", None)
    info = node_pb2.ModelInfo(
        name=model_name(config.model),
        architecture=shape.architecture,
        context_length=context,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        fingerprint=name,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=model.num_parameters,
        grammars=not config.step_profile,
        embedding_size=0 if isinstance(runner, TimedRunner) else shape.hidden_size,
        embeds_only=shape.embeds_only,
        default_pooling=embed_pb2.POOLING_MEAN if pooling.mode == "mean" else embed_pb2.POOLING_LAST,
        default_normalize=pooling.normalize,
        images=images is not None,
    )
    _log.info(
        "engine ready",
        device=str(device),
        dtype=info.dtype,
        pages=pages,
        page_size=size,
        kv_dtype=str(layout.dtype).removeprefix("torch."),
        kv_mib=round(pages * layout.page_bytes / 2**20, 1),
        prefill_attention=why_prefill,
        decode_attention=why_decode,
        transports=", ".join(str(one.WhichOneof("kind")) for one in published.endpoints()),
    )
    return Engine(
        config=config,
        runner=runner,
        cache=cache,
        pool=pool,
        published=published,
        ranks=ranks,
        kinds=kinds,
        layout=message,
        model_info=info,
        device=device,
        attention=f"prefill={prefill.name} decode={decode.name}",
        overlap=device.type != "cpu" if config.overlap is None else config.overlap,
        warm=runner.warm if isinstance(runner, ModelRunner) and runner.kernels else None,
        masks=getattr(runner, "mask_stats", MaskStats()),
        grammars=None if config.step_profile else make_compiler(path, info, trials),
        trials=trials,
        host_memory=host_memory,
        drafter=drafter,
        images=images,
        encoding=PullMeter() if images is None else measure_encoding(images.tower, device),
        tower="" if images is None else tower_fingerprint(path, model.dtype, device, config.load_format),
    )


def _timed(config: WorkerConfig, vocab_size: int) -> TimedRunner:
    try:
        cost = read_cost(config.step_profile)
    except ValueError as error:
        raise invalid("step_profile", f"--step-profile: {error}") from error
    _log.warning("steps compute nothing: tokens mean nothing", step_profile=config.step_profile)
    return TimedRunner(cost, max_slots=config.max_rows, vocab_size=vocab_size)


def _computing(
    config: WorkerConfig,
    model: LanguageModel,
    pool: PagePool,
    attention: tuple[type[AttentionBackend], type[AttentionBackend]],
    context: int,
    loaded: LoadedDrafter | None,
) -> Runner[Any]:
    """attention: for prompts, for decode rows."""
    tap = loaded.drafter.tap if loaded is not None else ()
    try:
        runner = make_runner(config, model, pool, *attention, context, config.most_drafts, tap)
        if loaded is not None:
            runner.drafter = loaded.drafter
        return runner
    except ValueError as error:
        raise failed_precondition(f"--batch-invariant does not work here: {error}") from error


def _tuned(runner: Runner[Any], groups: int) -> TunedRunner:
    tuned = TunedRunner(runner, groups=groups)
    by_tokens = {f"to_{tokens}": count for tokens, count in tuned.small_steps.items()}
    _log.info("threads measured", **by_tokens, others=tuned.threads)
    return tuned


def measure_steps(engine: Engine) -> StepCost:
    """Runs a few steps, unless `--step-cost` has what they cost; the pool must be empty. Blocks. Raises
    BatonError."""
    started = time.monotonic()
    path = Path(engine.config.step_cost) if engine.config.step_cost else None
    if path is not None and (kept := read_kept(path, cost_key(engine))) is not None:
        log_cost("step costs read", kept, path=str(path))
        return kept
    use_device(engine.device)
    try:
        cost = measure_step_cost(engine.runner, step_limits(engine))
    except torch.OutOfMemoryError as error:
        raise failed_precondition(f"not enough device memory: {error}; lower --kv-tokens") from error
    except RanksLost as error:
        raise failed_precondition(str(error)) from error
    log_cost("steps measured", cost, seconds=round(time.monotonic() - started, 2))
    if path is not None:
        keep(path, cost_key(engine), cost)
    return cost


def step_limits(engine: Engine) -> StepLimits:
    return StepLimits(
        token_budget=engine.config.token_budget,
        context_length=engine.model_info.context_length,
        page_size=engine.layout.page_size,
        pages=engine.pool.num_pages,
        groups=len(engine.pool.layout.groups),
    )


def log_cost(event: str, cost: StepCost, **more: object) -> None:
    step_ms = round(1000 * cost.seconds(StepLoad(decode_sequences=1)), 3)
    _log.info(event, step_ms=step_ms, prompt_token_us=round(1e6 * cost.token, 2), **more)
