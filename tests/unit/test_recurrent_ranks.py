"""Gated DeltaNet's heads divided among ranks that share a pool, or each have their part of its pages: the
tokens of one rank."""

from __future__ import annotations

from dataclasses import replace

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
from baton.worker.checks import check_tried
from baton.worker.model import check_model, kv_layout, layout_message

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
@pytest.mark.parametrize("own_pool", [False, True])
def test_two_ranks_give_the_tokens_of_one(variant, own_pool, tmp_path):
    save(variant, tmp_path)
    expected = run(Driver(tmp_path))
    storage = None if own_pool else memoryview(bytearray(2**23))

    def rank(shard, communicator):
        make = FollowerDriver if shard.rank else Driver
        options = {"shard": shard, "communicator": communicator, "storage": storage, "own_pool": own_pool}
        return run(make(tmp_path, **options))

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
    with pytest.raises(BatonError, match="--tp must divide this model's 2 KV heads"):
        check_model(replace(config, tp=4), torch.device("cuda"))
    with pytest.raises(BatonError, match="among ranks of one host only: leave out --nnodes"):
        check_model(replace(config, nnodes=2), torch.device("cpu"))
    check_tried(config, torch.device("cpu"))
    with pytest.raises(BatonError, match="CPU ranks of one host only"):
        check_tried(config, torch.device("cuda"))


def test_pages_in_other_parts_are_refused(tmp_path):
    """A GPU's share of each layer's states lies in its own part of a page; heads are in order everywhere."""
    save("qwen3.5", tmp_path)
    layout = kv_layout(declared(tmp_path, torch.float32), 16, 512)
    messages = [layout_message(layout, "model", None, parts) for parts in (1, 2, 4)]
    assert len({message.SerializeToString(deterministic=True) for message in messages}) == 3
    kinds = [[group.kind for group in message.groups] for message in messages]
    assert set(kinds[0]) == {"attention", "state"} and set(kinds[1]) == {"attention", "state in 2 parts"}
