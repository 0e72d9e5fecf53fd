"""Converts a step's samples to the results of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine.plan import Logprobs, PlanRow, RowResult, Sampled
from baton.engine.sampler import TokenLogprobs

_BAD_LOGITS = "the model's logits are not finite: its weights or its KV are damaged"


def row_results(
    rows: Sequence[PlanRow],
    tokens: Sequence[int],
    finite: Sequence[bool],
    logprobs: Mapping[int, Logprobs],
    prompts: Mapping[int, Sequence[TokenLogprobs]],
) -> tuple[RowResult, ...]:
    """`tokens`, `finite` (whether the logits were numbers) and the keys of `logprobs` count the rows' sampled
    slots, in order; `prompts` holds prompt log-probabilities by the row's place."""
    if not logprobs and not prompts and all(finite) and all(len(row.sample) == 1 for row in rows):
        return tuple(
            RowResult((Sampled(row.sample[0], token),)) for row, token in zip(rows, tokens, strict=True)
        )
    results: list[RowResult] = []
    first = 0
    for i, row in enumerate(rows):
        last = first + len(row.sample)
        prompt = tuple(
            entry for part in prompts.get(i, ()) for entry in part.read([row.prompt_top] * len(part.tokens))
        )
        sampled = tuple(
            Sampled(slot, tokens[j], logprobs.get(j)) for j, slot in enumerate(row.sample, start=first)
        )
        error = None if all(finite[first:last]) else _BAD_LOGITS
        results.append(RowResult(sampled, prompt, error))
        first = last
    return tuple(results)
