"""Which GPU a worker takes, and how many pages its pool gets, also where several processes share the GPU."""

from __future__ import annotations

import pytest
import torch
from random_checkpoints import save_checkpoint

from baton.attention.registry import BACKENDS
from baton.engine import images
from baton.engine.model_runner import ModelRunner
from baton.engine.plan import SlotInit
from baton.engine.sampler_state import SlotStates
from baton.engine.sampling_params import SamplingParams
from baton.engine.warmup import StepLimits, largest_steps
from baton.kvcache.kv_pool import PagePool, PoolLayout
from baton.layers.cache_spec import Full
from baton.models.loader import load_model
from baton.models.vision import most_image_tokens
from baton.pictures.settings import FILE, read_settings
from baton.rpc.errors import BatonError
from baton.worker.images.contents import ROOM_BYTES
from baton.worker.memory import fitting, run_largest_steps, working_bytes
from baton.worker.model import device_of
from vision_models import save_qwen3_vl

GIB = 2**30
LAYOUT = PoolLayout.of([Full(heads=8, head_dim=128)] * 32, 64, torch.bfloat16)
"""Pages of 8 MiB: 128 to a GiB."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_checkpoint("qwen3", path)
    return path


def pages(reserved: float, free: float, fraction: float, total: float = 100, working: float = 0) -> int:
    return fitting(
        int(reserved * GIB), int(working * GIB), int(free * GIB), int(total * GIB), fraction, LAYOUT, 1024
    )


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("cuda").index is None and device_of("cuda:1").index == 1
    with pytest.raises(BatonError, match="the GPUs here are cuda:0 to cuda:1"):
        device_of("cuda:2")


def test_the_fraction_counts_what_is_the_processs_own():
    assert pages(reserved=20, free=80, fraction=0.9) == 70 * 128 - 1
    # The second of two that share: the first has taken its half.
    assert pages(reserved=20, free=35, fraction=0.45) == 25 * 128 - 1


def test_never_more_than_most_of_what_is_free():
    assert pages(reserved=0, free=10, fraction=0.9) == int(9.5 * 128) - 1


def test_what_computing_takes_is_left_free():
    assert pages(reserved=20, free=80, fraction=0.9, working=3) == 67 * 128 - 1
    assert pages(reserved=0, free=10, fraction=0.9, working=3) == int(6.5 * 128) - 1
    with pytest.raises(BatonError, match=r"computing takes 71\.00 GiB.*lower --token-budget"):
        pages(reserved=20, free=80, fraction=0.9, working=71)


def test_penalties_allocate_nothing_after_the_start():
    states = SlotStates(2, 50, torch.device("cpu"))
    before = states.counts.data_ptr(), states.prompt.data_ptr()
    states.init(SlotInit(1, SamplingParams(presence_penalty=1.0), 0, prompt=(3,), output=(4, 4)))
    assert before == (states.counts.data_ptr(), states.prompt.data_ptr())
    assert states.counts[1, 4] == 2 and states.prompt[1, 3] and not states.counts[0].any()


@pytest.mark.parametrize(
    ("slots", "limits"),
    [(8, StepLimits(64, 200, 16, 1)), (1, StepLimits(16, 32, 16, 1)), (16, StepLimits(16, 256, 128, 1))],
)
def test_the_largest_steps_are_as_large_as_any_and_can_be_computed(slots, limits, checkpoint):
    steps = largest_steps(slots, limits)
    assert max(step.num_tokens for step in steps) == min(limits.token_budget, slots * limits.context_length)
    assert max(len(step.rows) for step in steps) == max(len(step.inits) for step in steps) == slots
    assert any(all(row.tokens is None for row in step.rows) and len(step.rows) == slots for step in steps)
    constrained = [all(init.grammar is not None for init in step.inits) for step in steps]
    assert constrained == [True] * 6 + [False] and len(steps[-1].inits) == slots, "no slot keeps a grammar"
    for step in steps:
        assert step.num_tokens <= limits.token_budget
        for row in step.rows:
            assert row.start + row.count <= min(limits.context_length, len(row.tables[0]) * limits.page_size)
    model = load_model(checkpoint, torch.float32, "cpu")
    layout = PoolLayout.of(model.caches, limits.page_size, torch.float32)
    runner = ModelRunner(
        model,
        PagePool(layout, 1),
        max_slots=slots,
        prefill_attention=BACKENDS["torch"],
        decode_attention=BACKENDS["torch"],
    )
    run_largest_steps(runner, limits)
    assert runner.mask_stats.masks == sum(len(step.rows) for step in steps[:-1])


@pytest.mark.parametrize(("context", "decode"), [(200, 199), (4096, 1023)])
def test_the_largest_steps_have_prompts_and_decode_rows_in_all_slots(context, decode):
    steps = largest_steps(8, StepLimits(64, context, 16, 1))
    decodes = [(slot, None, decode) for slot in range(8)]
    assert [
        [(row.slot, row.tokens and len(row.tokens), row.start) for row in step.rows] for step in steps
    ] == [
        [(0, 64, context - 64)],
        [(slot, 8, context - 8) for slot in range(8)],
        decodes,
        [*decodes[:7], (7, 57, context - 57)],
        [(0, 1, 0)],
        decodes,
        decodes,
    ]
    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6, 7]
    everything = [step.inits[0].params.logprobs is not None for step in steps]
    assert everything == [True] * 4 + [False] * 2 + [True]
    for step in steps:
        assert [(init.slot, init.prompt, init.output, init.last_token) for init in step.inits] == [
            (row.slot, (0,), (0,), 0) for row in step.rows
        ]
        for row in step.rows:
            assert row.tables == ((0,) * -(-context // 16),) and row.sample == (row.slot,)
            count = len(row.tokens or ())
            wanted = ((0,) * (count - 1), 20) if count > 1 else (None, 0)
            assert (row.prompt_logprobs, row.prompt_top) == wanted


def test_what_a_vision_tower_takes_is_left_free(tmp_path, monkeypatch):
    """Its activations for the largest image, alone and in a batch, and all embeddings that may be here."""
    save_qwen3_vl(tmp_path)
    model = load_model(tmp_path, torch.float32, "cpu")
    side = model.vision.merge * model.vision.patch
    assert most_image_tokens(tmp_path, model.vision) == read_settings(tmp_path).most_pixels // side**2
    (tmp_path / FILE).unlink()
    assert most_image_tokens(tmp_path, model.vision) == 2**24 // side**2
    encoded: list[int] = []
    encode = model.vision.encode

    def seen(images):
        found = encode(images)
        encoded.append(sum(rows.shape[1] for rows in found))
        return found

    monkeypatch.setattr(model.vision, "encode", seen)
    monkeypatch.setattr(images, "BATCH_TOKENS", 12)
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * GIB)
    # A GPU on which each of the image's tokens takes 1 MiB, and a step nothing.
    monkeypatch.setattr(
        torch.cuda, "max_memory_reserved", lambda _: 5 * GIB + max(encoded, default=0) * 2**20
    )
    limits = StepLimits(16, 64, 16, 1)
    layout = PoolLayout.of(model.caches, limits.page_size, torch.float32)

    def runner(pool):
        backend = BACKENDS["torch"]
        return ModelRunner(model, pool, max_slots=2, prefill_attention=backend, decode_attention=backend)

    taken = working_bytes(runner, layout, limits, torch.device("cpu"), image_tokens=48)
    assert max(encoded) >= 48 and min(encoded) >= 12
    pool = 2 * layout.page_bytes
    assert taken == max(encoded) * 2**20 - pool + images.CACHED_BYTES + ROOM_BYTES


def test_too_little_is_an_error_that_says_what_to_do():
    for reserved, free, fraction in ((50, 50, 0.5), (0, 0.05, 0.9), (60, 40, 0.45)):
        with pytest.raises(BatonError, match=r"does not fit: .*raise --memory-fraction"):
            pages(reserved, free, fraction)
