"""Gated DeltaNet's heads divided among CPU ranks that share a pool: the tokens of one rank."""

from __future__ import annotations

import pytest
import torch
from random_checkpoints import Driver, random_prompts
from test_recurrent_families import save
from test_shards import FollowerDriver
from thread_ranks import ThreadGroup

from baton.config import DecodeConfig
from baton.layers.tensor_parallel import Shard
from baton.model_path import CheckpointError
from baton.models.loader import declared
from baton.rpc.errors import BatonError
from baton.worker.model import check_model

PROMPTS = random_prompts(5, 40, 33)


def run(driver):
    """Prompts in two chunks, then all decode together, beside a sequence that is forked from the second: the
    last page of each group is copied. One more computes the same from its beginning."""
    tracks = [driver.add(slot, prompt, 30) for slot, prompt in enumerate(PROMPTS)]
    for track, prompt in zip(tracks, PROMPTS, strict=True):
        driver.step([driver.chunk(track, len(prompt) // 2)])
        driver.step([driver.chunk(track, len(prompt) - len(prompt) // 2, sample=True)], [driver.init(track)])
    prompt, end = [*PROMPTS[1], 17], len(PROMPTS[1]) // 16
    copy = driver.add(6, prompt, 30, cached=tracks[1], prefix=end * 16)
    copy.computed = len(prompt) - 1
    pairs = [(a[end], b[end]) for a, b in zip(tracks[1].tables, copy.tables, strict=True)]
    rows = [driver.chunk(copy, 1, sample=True), *map(driver.decode, tracks)]
    driver.step(rows, [driver.init(copy)], pairs)
    anew = driver.add(7, prompt, 30)
    rows = [driver.chunk(anew, len(prompt), sample=True), *map(driver.decode, [copy, *tracks])]
    driver.step(rows, [driver.init(anew)])
    for _ in range(12):
        driver.step([driver.decode(track) for track in driver.tracks.values()])
    driver.finish()
    assert copy.tokens[: len(anew.tokens)] == anew.tokens
    return [track.tokens for track in driver.tracks.values()]


@pytest.mark.parametrize("variant", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_two_ranks_give_the_tokens_of_one(variant, tmp_path):
    save(variant, tmp_path)
    expected = run(Driver(tmp_path))
    storage = memoryview(bytearray(2**23))

    def rank(shard, communicator):
        make = FollowerDriver if shard.rank else Driver
        return run(make(tmp_path, shard=shard, communicator=communicator, storage=storage))

    assert ThreadGroup(2).run(rank)[0] == expected


def test_what_is_not_divided_is_refused(tmp_path):
    save("lfm2", tmp_path / "lfm2")
    save("qwen3.5", tmp_path / "qwen3.5")
    with pytest.raises(CheckpointError, match="is not divided among ranks; leave out --tp"):
        declared(tmp_path / "lfm2", shard=Shard(0, 2))
    with pytest.raises(CheckpointError, match="2 key heads of linear attention cannot be divided among 4"):
        declared(tmp_path / "qwen3.5", shard=Shard(0, 4))
    config = DecodeConfig(model=str(tmp_path / "qwen3.5"), tp=2)
    check_model(config, torch.device("cpu"))
    with pytest.raises(BatonError, match="CPU ranks of one host only"):
        check_model(config, torch.device("cuda"))
