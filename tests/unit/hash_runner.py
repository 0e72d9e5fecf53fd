"""A runner whose "model" is a hash: the next token depends on every token whose KV it finds in the pages.

A stale, foreign or unwritten page changes the output, so equality with `reference` proves that the scheduler
and the hand-off kept every page right. With penalties the hash also depends on the prompt and the output that
the slot knows of; the log-probability of a prompt token is its position. Implements engine.plan.Runner.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

import numpy as np

from baton.engine.plan import Logprobs, Pooling, RowResult, StepPlan, StepResult

VOCAB = 1000
UNWRITTEN = -1


Penalized = tuple[tuple[int, ...], list[int]]
"""Prompt, and output so far."""


def next_token(seen: list[int], seed: int, penalized: Penalized | None = None) -> int:
    return zlib.crc32(repr((seen, seed, penalized)).encode()) % VOCAB


def reference(
    prompt: list[int],
    seed: int,
    count: int,
    stop: frozenset[int] = frozenset(),
    *,
    penalized: bool = False,
) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        state = (tuple(prompt), tokens[len(prompt) :]) if penalized else None
        tokens.append(next_token(tokens, seed, state))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def embedding(prompt: list[int], pooling: Pooling) -> int:
    """What `Request.pooled` holds: the last token's state, or the sum of all."""
    states = [next_token(prompt[: end + 1], 0) for end in range(len(prompt))]
    return states[-1] if pooling is Pooling.LAST else sum(states)


@dataclass
class HashLaunchedStep:
    number: int
    result: StepResult


class HashRunner:
    """`pool[page][offset]` holds the token whose KV was written there."""

    def __init__(self, num_pages: int, page_size: int, max_slots: int) -> None:
        self.max_slots = max_slots
        self.vocab_size = VOCAB
        self.page_size = page_size
        self.pool = [[UNWRITTEN] * page_size for _ in range(num_pages)]
        self.last = [UNWRITTEN] * max_slots
        self.right = [0] * max_slots
        """How many drafts of each slot's last row were right."""
        self.seeds = [UNWRITTEN] * max_slots
        self.penalized: list[Penalized | None] = [None] * max_slots
        self.steps: list[StepPlan] = []
        self.in_flight: deque[int] = deque()

    def launch(self, plan: StepPlan) -> HashLaunchedStep:
        self.steps.append(plan)
        for source, target in plan.copies:
            self.pool[target] = list(self.pool[source])
        for init in plan.inits:
            self.seeds[init.slot] = init.seed
            known = (init.prompt, list(init.output)) if init.params.penalized else None
            self.penalized[init.slot] = known
            if init.last_token is not None:
                self.last[init.slot] = init.last_token
        planned = [row.settled(self.right[row.slot]) for row in plan.rows]
        inputs = [row.tokens or (self.last[row.slot], *row.drafts) for row in planned]
        for row, tokens in zip(planned, inputs, strict=True):
            for position, token in enumerate(tokens, row.start):
                self.pool[row.tables[0][position // self.page_size]][position % self.page_size] = token
        rows = []
        for row in planned:
            end = row.start + row.count - len(row.drafts)
            seen = [self.pool[row.tables[0][p // self.page_size]][p % self.page_size] for p in range(end)]
            samples = []
            for slot in row.sample:
                known = self.penalized[slot]
                self.last[slot] = next_token(seen, self.seeds[slot], known)
                if known is not None:
                    known[1].append(self.last[slot])
                samples.append(self.last[slot])
                for draft in row.drafts:
                    if self.last[slot] != draft:
                        break
                    seen.append(self.pool[row.tables[0][end // self.page_size]][end % self.page_size])
                    end += 1
                    self.last[slot] = next_token(seen, self.seeds[slot], known)
                    if known is not None:
                        known[1].append(self.last[slot])
                    samples.append(self.last[slot])
                self.right[slot] = len(samples) - 1 if row.drafts else 0
            wanted = enumerate(row.prompt_logprobs or (), row.start + 1)
            logprobs = tuple(Logprobs(token, float(position)) for position, token in wanted)
            rows.append(RowResult(tuple(samples), logprobs))
            if row.pooling is not None:
                states = [next_token(seen[: p + 1], 0) for p in range(row.start, end)]
                state = states[-1] if row.pooling is Pooling.LAST else sum(states)
                rows[-1].pooled = np.array([state], np.float32)
        self.in_flight.append(plan.number)
        return HashLaunchedStep(plan.number, StepResult(plan.number, tuple(rows)))

    def done(self, launched_step: HashLaunchedStep) -> bool:
        return True

    def read(self, launched_step: HashLaunchedStep) -> StepResult:
        assert self.in_flight.popleft() == launched_step.number
        return launched_step.result
