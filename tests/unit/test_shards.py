"""Models divided among ranks give the tokens of one rank: all families, with pages of every KV group."""

from __future__ import annotations

import pytest
from random_checkpoints import (
    VARIANTS,
    Driver,
    check_greedy,
    largest_difference,
    random_prompts,
    save_checkpoint,
)
from thread_ranks import ThreadGroup


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Saved on demand: variant -> (path, transformers model)."""
    made = {}

    def get(variant):
        if variant not in made:
            path = tmp_path_factory.mktemp(variant)
            made[variant] = path, save_checkpoint(variant, path)
        return made[variant]

    return get


def run(driver, prompts, outputs):
    """Prompts in two chunks one after the other, then all decode together."""
    tracks = [driver.add(slot, prompt, outputs) for slot, prompt in enumerate(prompts)]
    for track, prompt in zip(tracks, prompts, strict=True):
        half = len(prompt) // 2
        if half:
            driver.step([driver.chunk(track, half)])
        driver.step([driver.chunk(track, len(prompt) - half, sample=True)], [driver.init(track)])
    for _ in range(outputs - 1):
        driver.step([driver.decode(track) for track in tracks])
    driver.finish()
    if len(driver.pool.layout.groups) == 1:
        fork(driver, tracks[1], prompts[1])
    return tracks


def fork(driver, track, prompt):
    """A copy of a sequence's last page, which it goes on writing, as a second choice has it."""
    full = len(prompt) // 16 * 16
    copy = driver.add(7, prompt, 16, cached=track, prefix=full)
    copy.computed = len(prompt) - 1
    pairs = [(track.pages[full // 16], copy.pages[full // 16])]
    driver.step([driver.chunk(copy, 1, sample=True)], [driver.init(copy)], pairs)
    for _ in range(3):
        driver.step([driver.decode(copy)])
    driver.finish()
    assert copy.tokens == track.tokens[: len(copy.tokens)]


class FollowerDriver(Driver):
    """Makes the same steps; its runner has no results."""

    def _record(self, logits):
        assert logits.shape[1] == 0
        return logits.new_zeros(len(logits), 1)

    def step(self, rows, inits=(), copies=()):
        from baton.engine.plan import StepPlan

        self.number += 1
        self.runner.launch(StepPlan(self.number, tuple(rows), tuple(inits), tuple(copies)))


def of_ranks(path, size, prompts, outputs):
    """Rank 0's driver and tracks. All ranks share a pool."""
    storage = memoryview(bytearray(2**23))

    def rank(shard, communicator):
        make = FollowerDriver if shard.rank else Driver
        driver = make(path, shard=shard, communicator=communicator, storage=storage)
        return driver, run(driver, prompts, outputs)

    return ThreadGroup(size).run(rank)[0]


def divisible(variant, size):
    overrides = VARIANTS[variant][1]
    return overrides.get("num_attention_heads", 4) % size == 0


CASES = [(variant, size) for variant in VARIANTS for size in (2, 4) if divisible(variant, size)]


@pytest.mark.parametrize(("variant", "size"), [*CASES, ("smollm", 3)])
def test_logits_and_greedy_tokens_equal_transformers(checkpoints, variant, size):
    path, model = checkpoints(variant)
    prompts = random_prompts(5, 33, 70, 1)
    _, tracks = of_ranks(path, size, prompts, 8)
    for track, prompt in zip(tracks, prompts, strict=True):
        assert largest_difference(model, track) < 1e-4
        check_greedy(model, prompt, track.tokens[len(prompt) :])
