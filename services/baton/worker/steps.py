"""Measures the step cost of an engine before it serves."""

from __future__ import annotations

import time

import torch

from baton.engine.measure import Room, measure
from baton.rpc.errors import failed_precondition
from baton.rpc.logs import get_logger
from baton.stepcost import StepCost, StepLoad
from baton.worker.engine import Engine

_log = get_logger()


def measure_steps(engine: Engine) -> StepCost:
    """Runs a few steps; the pool must be empty. Blocks. Raises BatonError."""
    room = Room(
        token_budget=engine.config.token_budget,
        context_length=engine.model_info.context_length,
        page_size=engine.layout.page_size,
        pages=engine.pool.num_pages,
    )
    started = time.monotonic()
    try:
        cost = measure(engine.runner, room)
    except torch.OutOfMemoryError as error:
        raise failed_precondition(f"not enough device memory: {error}; lower --kv-tokens") from error
    _log.info(
        "steps measured",
        seconds=round(time.monotonic() - started, 2),
        step_ms=round(1000 * cost.seconds(StepLoad(decode_sequences=1)), 3),
        prompt_token_us=round(1e6 * cost.token, 2),
    )
    return cost
