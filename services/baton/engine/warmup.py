"""Steps that an engine runs at its start: some are timed for the step cost, some need the most memory.

The timed steps differ in every field of StepLoad, so that a fit separates their costs. Each step's shortest
time counts; CostCalibration corrects the cost in operation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine.plan import PlanRow, Runner, SlotInit, StepPlan, step_load
from baton.engine.sampling_params import SamplingParams
from baton.grammar.base import Matcher, Words
from baton.step_cost import StepCost, StepLoad, fit

BUDGET_SECONDS = 0.2
"""Time of a round: a step that would not end in time is left out."""
ROUNDS = 6
"""Most rounds: if another program uses the processor, a later round may find it free."""
ENOUGH = 3
"""Enough once each step has been measured this often."""
REQUIRED = 2
"""This many steps are in the first two rounds whatever they take, and in later ones while any time is
left."""

MAX_LOGPROBS = 20
"""The contract's limit."""
DECODE_CONTEXT = 1024
"""Context of the decode rows of `largest_steps`, at most: the pool would not hold the longest context for
all."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a step on an engine."""

    token_budget: int
    context_length: int
    page_size: int
    pages: int
    groups: int = 1
    """KV groups. All of them use the same pages here: what they hold does not matter."""

    def row(
        self,
        slot: int,
        tokens: tuple[int, ...] | None,
        start: int,
        pages: tuple[int, ...],
        logprobs: tuple[int, ...] | None = None,
    ) -> PlanRow:
        """Samples a token. `logprobs`: of the prompt, as in PlanRow."""
        top = MAX_LOGPROBS if logprobs is not None else 0
        return PlanRow(slot, tokens, start, (pages,) * self.groups, (slot,), logprobs, top)


def measure_step_cost(
    runner: Runner[Any],
    limits: StepLimits,
    *,
    budget: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCost:
    """Writes to the pool's first pages, so the pool must be empty. Blocks for at most ROUNDS times
    `budget` seconds, unless single steps take longer. The first run of each step warms up and does not
    count."""
    times: dict[StepLoad, list[float]] = {}
    number = 0
    least, per_token = 0.0, math.inf  # shortest times of one row and of one prompt token
    sizes, began = _sizes(runner.max_slots, limits), clock()
    for turn in range(ROUNDS):
        if len(times) == len(sizes) and min(map(len, times.values())) >= ENOUGH:
            break
        started = clock()
        for index, rows in enumerate(sizes):
            load = step_load(rows)
            expected = min(
                times.get(load, [per_token * load.prefill_tokens if load.prefill_tokens else least])
            )
            required = index < REQUIRED and (turn <= 1 or clock() - began < ROUNDS * budget)
            if not required and clock() - started + expected > budget:
                continue
            number += 1
            inits = tuple(_init(row.slot) for row in rows)
            launched = clock()
            runner.read(runner.launch(StepPlan(number, rows, inits)))
            seconds = max(clock() - launched, 1e-9)
            times.setdefault(load, []).append(seconds)
            if load.prefill_tokens:
                per_token = min(per_token, seconds / load.prefill_tokens)
            elif load.decode_sequences == 1:
                least = seconds
    return fit([(load, min(found[1:])) for load, found in times.items() if len(found) > 1])


def largest_steps(max_slots: int, limits: StepLimits) -> list[StepPlan]:
    """Steps that together need as much device memory as any: full of prompt tokens, in one chunk and in
    many, with decode rows in all slots, and with both; all that sampling knows is asked for in every row,
    a grammar too. Then two steps of which a temperature and a grammar are all, so that their kernels are
    compiled. The last step leaves slots without a grammar.

    All read and write page 0 alone: nothing may be in the pool yet, and one page is enough.
    """
    simple = SamplingParams(temperature=1.0)
    whole = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={0: 1.0},
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS,
    )
    longest, budget = limits.context_length, limits.token_budget
    table = (0,) * -(-longest // limits.page_size)

    def decode(slot: int) -> PlanRow:
        return limits.row(slot, None, min(longest, DECODE_CONTEXT) - 1, table)

    def chunk(slot: int, count: int) -> PlanRow:
        count = min(count, longest)
        prompt_logprobs = (0,) * (count - 1)
        return limits.row(slot, (0,) * count, longest - count, table, prompt_logprobs)

    batches = [
        [chunk(0, budget)],
        [chunk(slot, max(1, budget // max_slots)) for slot in range(max_slots)],
        [decode(slot) for slot in range(max_slots)],
        [*map(decode, range(max_slots - 1)), chunk(max_slots - 1, budget - max_slots + 1)],
        [limits.row(0, (0,), 0, table)],
        [decode(slot) for slot in range(max_slots)],
        [decode(slot) for slot in range(max_slots)],
    ]
    kinds = [*[(whole, Unconstrained())] * 4, *[(simple, Unconstrained())] * 2, (whole, None)]
    return [
        StepPlan(
            number,
            tuple(rows),
            tuple(SlotInit(row.slot, params, 0, (0,), (0,), 0, grammar) for row in rows),
        )
        for number, (rows, (params, grammar)) in enumerate(zip(batches, kinds, strict=True), 1)
    ]


class Unconstrained:
    """A grammar that allows all tokens. Its masks take as much memory as any other's."""

    def matcher(self) -> Matcher:
        return _Anything()


class _Anything(Matcher):
    def accept(self, tokens: Sequence[int]) -> None:
        pass

    def fill(self, words: Words) -> None:
        words.fill(-1)


def _init(slot: int) -> SlotInit:
    return SlotInit(slot, SamplingParams(temperature=0.0), 0, (), (), last_token=0)


def _sizes(slots: int, limits: StepLimits) -> list[tuple[PlanRow, ...]]:
    """Decode rows, few and many, of short and long contexts; prompt chunks, short and long, at a prompt's
    beginning and deep in it. The first two separate a decode step's cost from a prompt token's."""
    longest = max(2, min(limits.context_length, limits.pages * limits.page_size) - 1)
    chunk = min(limits.token_budget, longest)
    short = min(chunk, 32)
    deep = min(longest - short, 1024)
    found = [
        _rows(1, 0, limits),
        _chunk(0, short, limits),
        _rows(max(1, slots // 4), 0, limits),
        _rows(slots, 0, limits),
        _rows(slots, deep, limits),
        _chunk(0, min(chunk, 256), limits),
        _chunk(deep, short, limits),
        _chunk(0, chunk, limits),
    ]
    return list({step_load(rows): rows for rows in found}.values())


def _pages(tokens: int, limits: StepLimits) -> Sequence[int]:
    return range(-(-tokens // limits.page_size))


def _rows(count: int, start: int, limits: StepLimits) -> tuple[PlanRow, ...]:
    pages = tuple(_pages(start + 1, limits))
    return tuple(limits.row(slot, None, start, pages) for slot in range(count))


def _chunk(start: int, count: int, limits: StepLimits) -> tuple[PlanRow, ...]:
    return (limits.row(0, (0,) * count, start, tuple(_pages(start + count, limits))),)
