"""The drafter that has a model of its own: its weights, its pages and its runner, beside the worker's."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from baton.checkpoint_limits import read_json
from baton.config import MTP, PrefillConfig, WorkerConfig
from baton.engine.cpu_threads import TunedRunner
from baton.engine.draft.base import Drafter
from baton.engine.draft.head_graphs import ROWS as HEAD_ROWS
from baton.engine.draft.heads import HeadDrafter
from baton.engine.draft.medusa import MedusaDrafter
from baton.engine.draft.model import ModelDrafter
from baton.engine.draft.paged_drafter import PagedDrafter
from baton.engine.plan import Runner
from baton.kvcache import KvCacheManager
from baton.kvcache.kv_pool import PagePool, PoolLayout, default_page_size
from baton.layers.cache_spec import State
from baton.model_path import resolve
from baton.models.config import ModelConfig, read_config
from baton.models.decoder import Decoder, LanguageModel
from baton.models.device_mixture import device_mixture
from baton.models.eagle3 import Eagle3Head, is_eagle3, load_eagle3
from baton.models.loader import cache_specs, fingerprint
from baton.models.medusa import is_medusa, load_medusa
from baton.models.mtp import MtpHead, check_mtp, load_mtp
from baton.rpc.address import new_incarnation
from baton.rpc.errors import failed_precondition
from baton.rpc.logs import get_logger
from baton.transport import SegmentError
from baton.v1 import common_pb2
from baton.worker.model import attention_of, device_of, kv_layout, layout_message, load, model_fingerprint
from baton.worker.pool import PublishedPool, make_pool
from baton.worker.runners import make_runner, unsuited

_log = get_logger()

KV_BYTES = 2**30
"""Most bytes of keys and values of drafts, if one whole context takes no more."""


def check_draft(config: WorkerConfig) -> None:
    """Before anything is loaded. Raises CheckpointError and BatonError."""
    if not config.draft_model:
        return
    if config.tp > 1 and device_of(config.device).type != "cpu":  # has not been tried
        text = (
            "--draft with a model works with --tp on CPUs only; leave one of them out, or take --draft suffix"
        )
        raise failed_precondition(text)
    if config.step_profile:
        raise failed_precondition("steps of --step-profile compute nothing: leave out --draft")
    target = read_config(resolve(config.model), implementation=config.model_impl)
    if config.draft_model == MTP:
        check_mtp(resolve(config.model), target, config.load_format)
        return
    path = resolve(config.draft_model)
    if not _is_head(_raw(path)):
        _read_draft(config, path, target)
    elif target.implementation != "baton":
        text = f"heads need a model of Baton's own families, not {target.architecture}"
        raise failed_precondition(f"--draft {config.draft_model}: {text}")


def _raw(path: Path) -> dict[str, Any]:
    """config.json; empty: of a GGUF file."""
    return {} if path.is_file() or not (path / "config.json").is_file() else read_json(path / "config.json")


def _is_head(raw: dict[str, Any]) -> bool:
    """Whether it reads a model's hidden states."""
    return is_eagle3(raw) or is_medusa(raw)


def _read_draft(config: WorkerConfig, path: Path, target: ModelConfig) -> ModelConfig:
    found = read_config(path, implementation=config.model_impl)
    if found.vocab_size != target.vocab_size:
        raise failed_precondition(
            f"--draft {config.draft_model}: its vocabulary has {found.vocab_size} tokens, the model's "
            f"{target.vocab_size}; give a model of the same vocabulary"
        )
    if any(isinstance(spec, State) for spec in cache_specs(found)):
        raise failed_precondition(f"--draft {config.draft_model}: models with recurrent layers do not draft")
    return found


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    drafter: Drafter
    published: PublishedPool | None = None
    """The pages, where others see them; None: no others do."""
    layout: common_pb2.Layout | None = None
    """Layout of these pages."""

    @property
    def cache(self) -> KvCacheManager | None:
        """The cache of its pages, if it has any."""
        return self.drafter.slots.cache if isinstance(self.drafter, PagedDrafter) else None


@dataclass(frozen=True, slots=True)
class _Pool:
    pool: PagePool
    published: PublishedPool | None

    @property
    def generations(self) -> MutableSequence[int] | None:
        return self.published.generations if self.published is not None else None

    def loaded(self, drafter: Drafter, name: str) -> LoadedDrafter:
        """`name`: a fingerprint of all that its keys and values depend on."""
        if self.published is None:
            return LoadedDrafter(drafter)
        return LoadedDrafter(drafter, self.published, layout_message(self.pool.layout, name, None))


def load_drafter(
    config: WorkerConfig, target: LanguageModel, name: str, device: torch.device, kinds: tuple[str, ...]
) -> LoadedDrafter | None:
    """None: the configuration names no model, or this node has nothing to compute by it. Takes its memory
    before the worker's pool gets what is left. `name`: the target's fingerprint; `kinds`: transports of its
    pages. Blocks. Raises CheckpointError and BatonError."""
    if not config.draft_model:
        return None
    if config.draft_model == MTP:
        assert isinstance(target, Decoder)
        head = load_mtp(resolve(config.model), target, config.load_format)
        return _head_drafter(config, head, target, f"mtp {name}", device, kinds)
    path = resolve(config.draft_model)
    raw = _raw(path)
    if is_medusa(raw):
        if isinstance(config, PrefillConfig):
            return None
        assert isinstance(target, Decoder)
        heads = load_medusa(path, target)
        return LoadedDrafter(MedusaDrafter(heads, config.max_rows, target.config.vocab_size, device))
    if is_eagle3(raw):
        assert isinstance(target, Decoder)
        drafter_fingerprint = fingerprint(path, target.dtype, variant=f"eagle3 {name}")
        eagle = load_eagle3(path, target, resolve(config.model), config.load_format)
        return _head_drafter(config, eagle, target, drafter_fingerprint, device, kinds)
    return _model_drafter(config, path, target, device, kinds)


def _model_drafter(
    config: WorkerConfig, path: Path, target: LanguageModel, device: torch.device, kinds: tuple[str, ...]
) -> LoadedDrafter:
    shape = _read_draft(config, path, target.config)
    context = min(config.context_length or shape.context_length, shape.context_length)
    draft_config = _freely(config)
    draft_config = replace(
        draft_config, model=config.draft_model, draft="off", context_length=context, kv_dtype="auto"
    )
    model = load(draft_config, path, target.dtype, device)
    layout = kv_layout(model, config.page_size or default_page_size(device), context)
    made = _pool(config, layout, context, device, kinds)
    (prefill, _), (decode, _) = attention_of(draft_config, model, device)
    # Graphs of what prefill nodes compute, chunks alone, have not been tried.
    graphs = not isinstance(config, PrefillConfig)
    runner: Runner[Any] = make_runner(draft_config, model, made.pool, prefill, decode, context, graphs=graphs)
    groups = len(layout.groups)
    drafter = ModelDrafter(
        TunedRunner(runner, groups=groups) if device.type == "cpu" else runner,
        pages=made.pool.num_pages,
        page_size=layout.page_size,
        groups=groups,
        context_length=context,
        token_budget=draft_config.token_budget,
        generations=made.generations,
        device=device,
    )
    return made.loaded(drafter, model_fingerprint(draft_config, path, model, device))


def _head_drafter(
    config: WorkerConfig,
    head: Eagle3Head | MtpHead,
    target: Decoder,
    name: str,
    device: torch.device,
    kinds: tuple[str, ...],
) -> LoadedDrafter:
    context = target.config.used_length
    specs = [spec.within(context) for spec in head.caches]
    layout = PoolLayout.of(specs, config.page_size or default_page_size(device), target.dtype)
    made = _pool(config, layout, context, device, kinds)
    (prefill, _), (decode, _) = attention_of(_freely(config), head, device)
    graphs = getattr(prefill, "graphs", False) and getattr(decode, "graphs", False)
    if not graphs or unsuited(target, prefill, decode) is not None:
        graphs = False
    for mixture in head.mixtures if graphs else ():
        mixture.kernels = device_mixture(mixture)
    kernels = graphs and head.use_kernels(context, HEAD_ROWS[-1])
    drafter = HeadDrafter(
        head,
        made.pool,
        (prefill, decode),
        max_slots=config.max_rows,
        vocab_size=target.config.vocab_size,
        context_length=context,
        token_budget=config.token_budget,
        graph_drafts=config.most_drafts if graphs else 0,
        kernels=kernels,
        generations=made.generations,
    )
    return made.loaded(drafter, name)


def _freely(config: WorkerConfig) -> WorkerConfig:
    """What a model's attention was chosen for does not bind those who guess, which one rank does."""
    return replace(config, prefill_attention="auto", decode_attention="auto", batch_invariant=False, tp=1)


def _pool(
    config: WorkerConfig, layout: PoolLayout, context: int, device: torch.device, kinds: tuple[str, ...]
) -> _Pool:
    one = layout.pages(-(-context // layout.page_size))
    pages = max(one, min(config.max_rows * one, KV_BYTES // layout.page_bytes))
    _log.info("drafts by a model", model=config.draft_model or config.model, pages=pages)
    kinds = tuple(kind for kind in kinds if kind != "nixl")
    try:
        return _Pool(*make_pool(layout, pages, device, kinds, new_incarnation()))
    except SegmentError as error:
        _log.warning("pages of drafts travel over grpc", error=str(error))
        return _Pool(*make_pool(layout, pages, device, ("grpc",), new_incarnation()))
