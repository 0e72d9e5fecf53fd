"""The drafter that has a model of its own: its weights, its pages and its runner, beside the worker's."""

from __future__ import annotations

from dataclasses import replace

import torch

from baton.config import DecodeConfig, WorkerConfig
from baton.engine.cpu_threads import TunedRunner
from baton.engine.draft.base import Drafter
from baton.engine.draft.model import ModelDrafter
from baton.kvcache.kv_pool import PagePool, default_page_size
from baton.layers.cache_spec import State
from baton.model_path import resolve
from baton.models.config import ModelConfig, read_config
from baton.models.decoder import LanguageModel
from baton.models.loader import cache_specs
from baton.rpc.errors import failed_precondition
from baton.rpc.logs import get_logger
from baton.worker.model import attention_of, kv_layout, load
from baton.worker.runners import make_runner

_log = get_logger()

KV_BYTES = 2**30
"""Of keys and values of drafts, at most, if one whole context takes no more."""


def check_draft(config: WorkerConfig) -> None:
    """Before anything is loaded. Raises CheckpointError and BatonError."""
    if not config.draft_model:
        return
    if config.tp > 1:
        raise failed_precondition("--draft with a model does not work with --tp; leave one of them out")
    if config.step_profile:
        raise failed_precondition("steps of --step-profile compute nothing: leave out --draft")
    _read_draft(config, read_config(resolve(config.model), implementation=config.model_impl))


def _read_draft(config: WorkerConfig, target: ModelConfig) -> ModelConfig:
    found = read_config(resolve(config.draft_model), implementation=config.model_impl)
    if found.vocab_size != target.vocab_size:
        raise failed_precondition(
            f"--draft {config.draft_model}: its vocabulary has {found.vocab_size} tokens, the model's "
            f"{target.vocab_size}; give a model of the same vocabulary"
        )
    if any(isinstance(spec, State) for spec in cache_specs(found)):
        raise failed_precondition(f"--draft {config.draft_model}: models with recurrent layers do not draft")
    return found


def load_drafter(config: WorkerConfig, target: LanguageModel, device: torch.device) -> Drafter | None:
    """None: the configuration names no model. Takes its memory before the worker's pool gets what is left.
    Blocks. Raises CheckpointError and BatonError."""
    if not isinstance(config, DecodeConfig) or not config.draft_model:
        return None
    shape = _read_draft(config, target.config)
    context = min(config.context_length or shape.context_length, shape.context_length)
    own = replace(config, model=config.draft_model, draft="off", context_length=context, kv_dtype="auto")
    model = load(own, resolve(own.model), target.dtype, device)
    size = config.page_size or default_page_size(device)
    layout = kv_layout(model, size, context)
    one, groups = layout.pages(-(-context // size)), len(layout.groups)
    pages = max(one, min(own.max_rows * one, KV_BYTES // layout.page_bytes))
    pool = PagePool(layout, pages, device, spare=1)
    (prefill, _), (decode, _) = attention_of(own, model, device)
    made = make_runner(own, model, pool, prefill, decode, context)
    runner = made if device.type != "cpu" else TunedRunner(made, groups=groups)
    _log.info("draft model ready", model=own.model, pages=pages, page_size=size)
    return ModelDrafter(
        runner,
        pages=pages,
        page_size=size,
        groups=groups,
        context_length=context,
        token_budget=own.token_budget,
    )
