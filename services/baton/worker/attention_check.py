"""Compares a model by transformers' code, once it is loaded, with its own attention: code that nobody here
has read may attend in a way that the paged pool does not see."""

from __future__ import annotations

import torch

from baton.attention.base import AttentionBackend
from baton.engine.model_runner import ModelRunner
from baton.engine.plan import PlanRow
from baton.kvcache.kv_pool import PagePool, PoolLayout
from baton.models.config import ModelError
from baton.models.decoder import LanguageModel
from baton.models.transformers_backend import TransformersModel

CHUNK = 8
"""Tokens of a chunk: the second attends to keys and values in the pool."""
LIMITS = {torch.float32: 1e-3}
LIMIT_16_BITS = 0.1
"""Largest difference of a token's logits, as a part of the largest logit; the median over all tokens.
Rounding in 16 bits may send a token to other experts."""


@torch.inference_mode()
def paged_logits(
    model: LanguageModel,
    layout: PoolLayout,
    tokens: torch.Tensor,
    prefill: type[AttentionBackend],
    decode: type[AttentionBackend],
) -> torch.Tensor:
    """int [tokens], one sequence -> [tokens, vocab], computed in chunks of CHUNK over a paged pool."""
    pages = -(-len(tokens) // layout.page_size)
    pool = PagePool(layout, pages * len(layout.groups), model.device)
    tables = tuple(tuple(range(first, first + pages)) for first in range(0, pool.num_pages, pages))
    runner = ModelRunner(model, pool, max_slots=1, prefill_attention=prefill, decode_attention=decode)
    states = []
    for start in range(0, len(tokens), CHUNK):
        ids = tuple(tokens[start : start + CHUNK].tolist())
        states.append(runner.hidden_states(PlanRow(0, ids, start, tables)))
    return model.logits(torch.cat(states))


@torch.inference_mode()
def check_attention(
    model: TransformersModel,
    layout: PoolLayout,
    prefill: type[AttentionBackend],
    decode: type[AttentionBackend],
) -> None:
    """Raises ModelError if the logits of a sequence in two chunks over a paged pool are not those that
    transformers computes."""
    tokens = torch.arange(2 * CHUNK, device=model.device) % model.config.vocab_size
    logits = paged_logits(model, layout, tokens, prefill, decode)
    differences = relative(logits, model.reference_logits(tokens))
    if not differences.median().item() <= LIMITS.get(model.dtype, LIMIT_16_BITS):
        raise ModelError(
            f"{model.config.architecture} cannot be served: over the paged pool its logits differ from those "
            f"of transformers by {differences.median():.2%} of the largest"
        )


def relative(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[tokens, vocab] each -> [tokens]: the largest difference, as a part of the largest logit."""
    return (logits - expected).abs().amax(1) / expected.abs().amax(1)
