"""Log-probabilities of a prompt's own tokens, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from baton.engine.plan import PlanRow
from baton.engine.sampler import TokenLogprobs, token_logprobs
from baton.engine.upload import to_device, to_host

_ROWS = 64
"""Logits are computed for this many positions at a time, to bound their memory."""


def prompt_logprobs(
    project: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, row: PlanRow
) -> list[TokenLogprobs]:
    """Enqueues the row's log-probabilities. `hidden`: its states, [tokens, hidden]; `project` computes
    logits from them."""
    assert row.prompt_logprobs is not None
    targets = to_device(np.array(row.prompt_logprobs, np.int64), hidden.device)
    parts = zip(torch.split(hidden[: len(targets)], _ROWS), torch.split(targets, _ROWS), strict=True)
    return [
        logprobs_to_host(token_logprobs(project(states).float(), wanted, row.prompt_top))
        for states, wanted in parts
    ]


def logprobs_to_host(logprobs: TokenLogprobs) -> TokenLogprobs:
    """The same in pinned memory, once all that is enqueued now has run."""
    return TokenLogprobs(
        to_host(logprobs.tokens),
        to_host(logprobs.chosen),
        to_host(logprobs.top_tokens),
        to_host(logprobs.top),
    )
