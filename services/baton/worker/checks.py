"""What a worker refuses before it loads anything."""

from __future__ import annotations

from dataclasses import replace

import torch

from baton.attention.registry import INVARIANT
from baton.config import WorkerConfig
from baton.engine.waiting_queue import POLICIES
from baton.kvcache.eviction import make_policy
from baton.rpc.errors import failed_precondition, invalid
from baton.transport import check_kinds
from baton.worker.draft_model import check_draft
from baton.worker.host_memory import parse_size
from baton.worker.model import KV_DTYPES, check_model, device_of, has_states, sized
from baton.worker.ranks.hosts import check_hosts
from baton.worker.ranks.leader import on_gpus


def checked(config: WorkerConfig) -> tuple[WorkerConfig, torch.device]:
    """The configuration with the sizes that suit the device, and rank 0's device. Raises BatonError,
    CheckpointError or NoBackend for what would otherwise fail only after the model has been loaded."""
    device = device_of(config.device)
    config = sized(config, device)
    _check(config)
    if config.batch_invariant:
        config = _invariant(config, device)
    if config.tp > 1 and device.type != "cpu":
        device = on_gpus(config, device)
    check_model(config, device)
    check_tried(config, device)
    check_draft(config)
    return config, device


def check_tried(config: WorkerConfig, device: torch.device) -> None:
    """Raises BatonError for what is built and has never run: its tokens might be wrong."""
    if config.tp > 1 and device.type != "cpu" and has_states(config):
        text = "models with recurrent layers are divided among CPU ranks of one host only: leave out --tp"
        raise failed_precondition(text)


def _check(config: WorkerConfig) -> None:
    """Raises BatonError."""
    if config.policy not in POLICIES:
        raise invalid("policy", f"--policy {config.policy!r} is not known; use {', '.join(POLICIES)}")
    try:
        make_policy(config.eviction)
    except ValueError as error:
        raise invalid("eviction", f"--eviction: {error}") from error
    try:
        check_kinds(config.transports)
    except ValueError as error:
        raise invalid("transports", f"--transports: {error}") from error
    if config.tp < 1:
        raise invalid("tp", "--tp must be at least 1")
    if config.ep and config.tp == 1:
        text = "--ep divides experts among the ranks of --tp: give it 2 or more, or leave out --ep"
        raise invalid("ep", text)
    if config.tp > 1 and config.step_profile:
        raise invalid("tp", "steps of --step-profile compute nothing: leave out --tp")
    if config.step_cost and config.step_profile:
        raise invalid(
            "step_cost", "steps of --step-profile take the time that it says: leave out --step-cost"
        )
    if config.tp > 1 and config.batch_invariant:
        raise invalid("batch_invariant", "--batch-invariant does not work with --tp; leave one of them out")
    if config.disk and not (
        parse_size(config.host_memory, "host_memory") and parse_size(config.disk_size, "disk_size")
    ):
        text = "--disk needs --host-memory, through which its pages go, and a --disk-size: give it both"
        raise invalid("disk", text)
    if parse_size(config.host_memory, "host_memory") and config.nnodes > 1:
        # Rank 0 copies whole pages, of which other hosts have parts.
        raise invalid("host_memory", "--host-memory works on one host only; leave it or --nnodes out")
    check_hosts(config)
    if config.kv_dtype not in KV_DTYPES:
        raise invalid("kv_dtype", f"--kv-dtype {config.kv_dtype!r} is not known; use {', '.join(KV_DTYPES)}")
    if not 0.0 < config.memory_fraction <= 1.0:
        raise invalid("memory_fraction", "--memory-fraction must be above 0 and at most 1")
    if config.max_rows < 1 or config.token_budget < config.max_rows:
        rows = f"--max-rows ({config.max_rows})"
        text = f"--token-budget ({config.token_budget}) must be at least {rows}, and that 1"
        raise invalid("token_budget", text)


def _invariant(config: WorkerConfig, device: torch.device) -> WorkerConfig:
    """With one attention backend for all rows. Raises BatonError."""
    if device.type != "cuda":
        raise failed_precondition(f"--batch-invariant needs an NVIDIA GPU, not {device.type}; leave it out")
    named = {config.prefill_attention, config.decode_attention} - {"auto"}
    for name in named - {*INVARIANT}:
        raise invalid("batch_invariant", f"--batch-invariant excludes attention {name!r}; leave that out")
    if len(named) > 1:
        text = "--batch-invariant needs the same attention backend for prompts and for decode rows; name one"
        raise invalid("batch_invariant", text)
    name = named.pop() if named else "auto"
    return replace(config, prefill_attention=name, decode_attention=name)
