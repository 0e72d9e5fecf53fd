"""Qwen3-VL and Qwen3.5 on a GPU against the CPU in float32: the tower, prompts whose chunks cut images,
cached ones, decode rows behind images in CUDA graphs."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from baton.config import WorkerConfig
from baton.engine.image_spans import ImageSpan, with_placeholders, without_contents
from baton.engine.plan import PlanRow
from baton.engine.request import EngineRequest, FailedEvent, TokenEvent
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.worker.engine import build_engine
from rig import CONTEXT, make, save_random, tables

VOCAB, IMAGE_TOKEN = 1000, 990
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_RECURRENT = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 48,
    "shared_expert_intermediate_size": 64,
}
"""Of Qwen3.5."""
_VISION = {
    "depth": 4,
    "hidden_size": 144,
    "intermediate_size": 256,
    "num_heads": 2,
    "out_hidden_size": 256,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
PARTS = (
    [20],
    [5, (24, 40), 7],
    [(16, 8), 9],
    [3, (64, 64), 4, (40, 24), 30],
    [100, (56, 48), 3],
    [70],
    [2, (8, 8), 1, (8, 64), 1, (64, 8), 90],
)
"""Numbers are lengths of text, pairs heights and widths of images in pixels."""
KINDS = ("eager:triton/triton", "graphs:triton/triton")
"""Of `rig.make`."""


FAMILIES = {
    "qwen3-vl": ("Qwen3VL", "qwen3_vl", {}),
    "qwen3-vl-moe": ("Qwen3VLMoe", "qwen3_vl_moe", _EXPERTS),
    "qwen3.5": ("Qwen3_5", "qwen3_5", _RECURRENT),
    "qwen3.5-moe": ("Qwen3_5Moe", "qwen3_5_moe", {**_RECURRENT, **_EXPERTS}),
}
"""How its architecture's name starts, its type, and what its text differs in."""


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    name, kind, text = FAMILIES[request.param]
    config = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": {**_TEXT, **text},
        "vision_config": _VISION,
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": IMAGE_TOKEN + 1,
        "vision_start_token_id": IMAGE_TOKEN + 2,
        "vision_end_token_id": IMAGE_TOKEN + 3,
        "torch_dtype": "float32",
    }
    return save_random(tmp_path_factory.mktemp(request.param), config)


def picture(size, seed):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def prompts():
    """Tokens and images of each."""
    generator, found = torch.Generator().manual_seed(3), []
    for key, parts in enumerate(PARTS):
        tokens, images = [], []
        for part in parts:
            if isinstance(part, int):
                tokens += torch.randint(0, IMAGE_TOKEN, (part,), generator=generator).tolist()
                continue
            pixels = picture(part, 100 * key + len(images))
            digest = hashlib.sha256(pixels.tobytes() + bytes(pixels.shape[:2])).digest()
            images.append(ImageSpan(len(tokens), part[0] // 8, part[1] // 8, digest, pixels))
            tokens += [IMAGE_TOKEN] * images[-1].tokens
        found.append((tokens, tuple(images)))
    return found


class Answers:
    """A scheduler over a runner, with and without overlap."""

    def __init__(self, runner, pages=400, page_size=16):
        self.runner = runner
        groups = runner._pool.layout.groups
        tree = PrefixTree(page_size, groups=groups, images=True)
        self.cache = KvCacheManager(PageAllocator(pages), tree)

    def of(self, asked, count=12, budget=64, overlap=True):
        contents = {image.digest: image.content for _, images in asked for image in images}

        def fetch(request, images):
            scheduler.images.here(request, {image.digest: contents[image.digest] for image in images})

        config = SchedulerConfig(context_length=CONTEXT, token_budget=budget, max_rows=16)
        scheduler = Scheduler(self.cache, config, want_images=fetch)
        found = [[] for _ in asked]
        for key, (tokens, images) in enumerate(asked):
            params = SamplingParams(temperature=0.0, max_tokens=count)
            prompt, spans = with_placeholders(tokens, images), without_contents(images)
            scheduler.submit(EngineRequest(key, prompt, params, images=spans))
        pending = None
        while scheduler.requests or pending is not None:
            step = scheduler.plan()
            launched = None if step is None else (step, self.runner.launch(step.plan))
            if not overlap:
                pending, launched = launched, None
            if pending is not None:
                scheduler.commit(pending[0], self.runner.read(pending[1]))
            pending = launched
            for event in scheduler.take_events():
                assert not isinstance(event, FailedEvent), event
                if isinstance(event, TokenEvent):
                    found[event.sequence.request.key].append(event.token)
        self.cache.check(idle=True)
        return found


def assert_close(got, want, most=1):
    """Near ties may be decided otherwise."""
    different = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
    assert len(different) <= most, different


def test_embeddings_are_those_of_the_cpu(path):
    images = [torch.from_numpy(picture(size, 1)) for size in ((24, 40), (8, 8), (64, 128))]
    want = make(path, "cpu", torch.float32)[0].images.tower.encode(images)
    for dtype, near in ((torch.float32, 1e-4), (torch.bfloat16, 6e-2)):
        got = make(path, "eager:triton/triton", dtype)[0].images.tower.encode(images)
        for one, other in zip(got, want, strict=True):
            error = (one.cpu().float() - other).square().mean().sqrt() / other.square().mean().sqrt()
            assert one.is_cuda and error.item() < near, (dtype, error)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_tokens_equal_those_of_the_cpu(path, kind):
    """Chunks of 64 tokens cut images; then the same prompts from the prefix tree, and longer ones."""
    asked = prompts()
    want = Answers(make(path, "cpu", torch.float32)[0]).of(asked)
    got = Answers(make(path, kind, torch.float32)[0])
    assert_close(got.of(asked), want)
    assert_close(got.of(asked, overlap=False), want)
    longer = [([*tokens, *out, 7], images) for (tokens, images), out in zip(asked, want, strict=True)]
    want = Answers(make(path, "cpu", torch.float32)[0]).of(longer, budget=256)
    assert_close(got.of(longer, budget=256), want)


def test_one_pixel_makes_another_answer(path):
    """An image of one other pixel is not the cached one: the logits differ."""
    tokens, images = prompts()[3]
    pixels = images[0].content.copy()
    pixels[5, 7, 1] ^= 0x40
    runner = make(path, "eager:triton/triton", torch.float32)[0]
    states = []
    for content in (images[0].content, pixels):
        digest = hashlib.sha256(content.tobytes()).digest()
        spans = (ImageSpan(images[0].start, 8, 8, digest, content), images[1])
        states.append(hidden(runner, tokens, spans)[-1])
    assert (states[0] - states[1]).abs().max().item() > 1e-4


def hidden(runner, tokens, images):
    row = PlanRow(0, with_placeholders(tokens, images), 0, tables(runner, 0, 64), images=images)
    return runner.hidden_states(row)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_as_a_node_builds_it(path, dtype):
    """Fused layers in 16 bits. Its tokens are nearly those with the largest logits on the CPU in float32."""
    asked = prompts()
    config = WorkerConfig(
        model=str(path), device="cuda", dtype=dtype, kv_tokens=8192, max_rows=16, token_budget=128
    )
    engine = build_engine(config, 1)
    assert engine.images is not None and engine.runner.graphs is not None
    got = Answers(engine.runner, engine.pool.num_pages, engine.pool.layout.page_size).of(asked)
    engine.close()
    runner, gaps = make(path, "cpu", torch.float32)[0], []
    for (tokens, images), out in zip(asked, got, strict=True):
        logits = runner._body.logits(hidden(runner, tokens + out, images))[len(tokens) - 1 : -1]
        gaps.append(logits.amax(1) - logits.gather(1, torch.tensor(out)[:, None]).squeeze(1))
    gap = torch.cat(gaps)
    shares = (gap > 0.5).float().mean().item(), (gap > 0).float().mean().item()
    most = (0.0, 0.02) if dtype == "float32" else (0.05, 0.25)
    assert shares[0] <= most[0] and shares[1] <= most[1], shares
