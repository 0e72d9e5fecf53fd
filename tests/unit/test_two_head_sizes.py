"""Layers whose heads differ in number and size: groups with layouts of their own in pages of one size."""

from __future__ import annotations

import random

import pytest
import torch
from random_checkpoints import Driver, random_prompts

from baton.config import WorkerConfig
from baton.kvcache.kv_groups import divide_layers
from baton.kvcache.kv_pool import PoolLayout
from baton.layers.cache_spec import Full, Latent, SlidingWindow
from baton.models.body import why_not_fused
from baton.models.decoder import plain_layers
from baton.models.loader import load_model
from baton.rpc.errors import BatonError
from baton.worker.model import check_model
from two_head_sizes import NARROW, WIDE, WINDOW, DenseReference, register, save

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    register()
    return save(tmp_path_factory.mktemp("two_head_sizes"))


def test_logits_are_those_of_dense_attention_in_chunks_and_with_a_cached_prefix(path):
    reference, driver = DenseReference(path), Driver(path, load_format="dummy")
    shapes = [(each.num_layers, each.num_kv_heads, each.head_dim) for each in driver.pool.layout.layouts]
    assert set(shapes) == {(2, *NARROW), (1, *WIDE)} and len(driver.pool.layout.groups) == 4
    tracks = [driver.add(slot, prompt, 40) for slot, prompt in enumerate(random_prompts(3, 23, 40, 33))]
    driver.step([driver.chunk(track, 2) for track in tracks], [driver.init(track) for track in tracks])
    driver.step([driver.chunk(track, len(track.tokens) - 2, sample=True) for track in tracks])
    for _ in range(39):
        driver.step([driver.decode(track) for track in tracks])
    driver.finish()
    longest = tracks[2]
    again = driver.add(4, longest.tokens[:70], 8, cached=longest, prefix=64)
    driver.step([driver.chunk(again, 6, sample=True)], [driver.init(again)])
    driver.finish()
    assert again.tokens[:71] == longest.tokens[:71]
    for track in (*tracks, again):
        expected = reference.logits(track.tokens)
        for at, logits in track.logits.items():
            assert (logits - expected[at - 1]).abs().max() < 1e-4


def test_pages_of_all_groups_have_as_many_bytes_and_little_of_them_stays_empty():
    gemma4 = ([SlidingWindow(1024, heads=8, head_dim=256)] * 5 + [Full(heads=2, head_dim=512)]) * 10
    indexer = [spec for _ in range(61) for spec in (Latent(head_dim=576), Latent(head_dim=128))]
    draw = random.Random(4)
    shapes = [Full(heads=h, head_dim=d) for h in (1, 2, 4, 8) for d in (64, 128, 256)]
    mixed = [[*draw.choices(draw.sample(shapes, 2), k=draw.randint(8, 60))] for _ in range(60)]
    for specs in (gemma4, indexer, *mixed):
        groups, size = divide_layers(specs)
        assert sorted(layer for group in groups for layer in group.layers) == list(range(len(specs)))
        for group in groups:
            assert {specs[layer] for layer in group.layers} == {group.spec}
            assert size % group.spec.values == 0 and len(group.layers) * group.spec.values <= size
        layout = PoolLayout.of(specs, 16, torch.bfloat16)
        assert {each.page_bytes for each in layout.layouts} == {16 * 2 * size}
        used = sum(spec.values for spec in specs)
        wasted = 1 - used / (size * len(groups))
        assert wasted <= (0.12 if specs in (gemma4, indexer) else 1 / 3), (wasted, groups)


@pytest.mark.parametrize(("tp", "kv_dtype"), [(2, "auto"), (1, "fp8_e4m3")])
def test_ranks_and_fp8_which_take_one_number_of_kv_heads_are_refused(path, tp, kv_dtype):
    config = WorkerConfig(model=str(path), device="cpu", load_format="dummy", tp=tp, kv_dtype=kv_dtype)
    with pytest.raises(BatonError, match="layers with different numbers of KV heads: leave out --tp and"):
        check_model(config, CPU)


def test_fused_kernels_which_take_one_size_of_heads_refuse_it(path):
    model = load_model(path, torch.bfloat16, load_format="dummy")
    assert plain_layers(model) is None and "fused kernels do not know" in (why_not_fused(model) or "")


def test_windows_beyond_the_context_are_none():
    assert SlidingWindow(WINDOW, heads=2, head_dim=8).within(WINDOW) == Full(heads=2, head_dim=8)
    assert SlidingWindow(WINDOW).within(WINDOW + 1) == SlidingWindow(WINDOW)
