"""Qwen3-VL and Qwen3.5 against transformers: embeddings of images, positions, logits and tokens, in any
chunks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from random_checkpoints import Driver
from test_shards import FollowerDriver
from thread_ranks import ThreadGroup

from baton.engine.image_spans import ImageSpan, rotary_positions, with_placeholders, without_contents
from baton.engine.images import EmbeddingCache
from baton.engine.plan import StepPlan
from baton.engine.request import EngineRequest, FailedEvent, TokenEvent
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.worker.ranks.plan_codec import PlanDecoder, PlanEncoder
from baton.worker.ranks.runner import RankedRunner
from vision_models import IMAGE_TOKEN, processor, save_qwen3_5, save_qwen3_vl

SIZES = [(8, 8), (24, 40), (16, 8), (40, 16), (8, 32)]
"""Heights and widths in pixels."""


SAVE = {"qwen3-vl": save_qwen3_vl, "qwen3.5": save_qwen3_5}
"""Qwen3.5 has recurrent layers, too."""


@pytest.fixture(
    scope="module",
    params=["qwen3-vl", "qwen3-vl-moe", "qwen3.5", pytest.param("qwen3.5-moe", marks=pytest.mark.thorough)],
)
def saved(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return path, SAVE[request.param.removesuffix("-moe")](path, experts=request.param.endswith("-moe"))


def picture(size, seed):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def prompt_of(parts, seed=0):
    """Tokens and images of a prompt: numbers are lengths of text, pairs sizes of images."""
    generator = torch.Generator().manual_seed(seed)
    tokens, images = [], []
    for part in parts:
        if isinstance(part, int):
            tokens += torch.randint(0, IMAGE_TOKEN, (part,), generator=generator).tolist()
            continue
        pixels = part if isinstance(part, np.ndarray) else picture(part, seed + len(images))
        rows, columns = pixels.shape[0] // 8, pixels.shape[1] // 8
        digest = hashlib.sha256(pixels.tobytes() + bytes(pixels.shape[:2])).digest()
        images.append(ImageSpan(len(tokens), rows, columns, digest, pixels))
        tokens += [IMAGE_TOKEN] * (rows * columns)
    return tokens, tuple(images)


def inputs_of(tokens, images):
    """What transformers' model takes."""
    ids = torch.tensor([tokens])
    kinds = torch.zeros_like(ids)
    for image in images:
        kinds[0, image.start : image.end] = 1
    made = processor()([image.content for image in images], return_tensors="pt", do_resize=False)
    return {"input_ids": ids, "mm_token_type_ids": kinds, "attention_mask": torch.ones_like(ids), **made}


def reference_logits(model, track, images):
    with torch.inference_mode():
        return model(**inputs_of(track.tokens, images), use_cache=False).logits[0]


def run(driver, slot, tokens, images, chunks, count):
    """A sequence alone: its prompt in chunks, then decode steps, `count` tokens in all."""
    track = driver.add(slot, tokens, count)
    for index, size in enumerate(chunks):
        row = driver.chunk(track, size, sample=index == len(chunks) - 1)
        row.images = images
        driver.step([row], [] if index else [driver.init(track)])
    for _ in range(count - 1):
        row = driver.decode(track)
        row.images = images
        driver.step([row])
    driver.finish()
    return track


def check(model, track, images):
    logits = reference_logits(model, track, images)
    for at, found in track.logits.items():
        assert (found - logits[at - 1]).abs().max().item() < 1e-4


def test_embeddings_of_images_are_those_of_transformers(saved):
    path, model = saved
    driver = Driver(path)
    pictures = [picture(size, seed) for seed, size in enumerate(SIZES)]
    made = processor()(pictures, return_tensors="pt", do_resize=False)
    with torch.inference_mode():
        wanted = model.model.get_image_features(made["pixel_values"], made["image_grid_thw"])
    got = driver.model.vision.encode([torch.from_numpy(each) for each in pictures])
    assert len(got) == len(pictures)
    deep = getattr(wanted, "deepstack_features", ())  # Qwen3.5 has none
    for index, rows in enumerate(got):
        expected = torch.stack((wanted.pooler_output[index], *(features[index] for features in deep)))
        assert rows.shape == expected.shape
        assert (rows - expected).abs().max().item() < 5e-5


def test_positions_are_those_of_transformers_in_every_part_of_a_prompt(saved):
    _, model = saved
    tokens, images = prompt_of([3, (24, 40), 2, (40, 16), 1, (8, 8), 4])
    given = inputs_of(tokens, images)
    wanted = model.model.get_rope_index(
        given["input_ids"], given["mm_token_type_ids"], given["image_grid_thw"]
    )
    wanted, shift = wanted[0][:, 0].numpy(), wanted[1].item()
    for start in range(len(tokens)):
        for end in range(start + 1, len(tokens) + 1):
            assert (rotary_positions(images, start, end - start) == wanted[:, start:end]).all()
    behind = rotary_positions(images, len(tokens) + 5, 3)
    assert (behind == np.arange(3) + len(tokens) + 5 + shift).all()


@pytest.mark.parametrize(
    "parts",
    [
        [5, (24, 40), 7],
        [(16, 8), 9],
        [4, (24, 16), 1],
        [3, (8, 8), 1, (24, 40), 1, (40, 16), 2, (8, 32), 1, (16, 8), 1, (8, 8), 1, (32, 8), 1, (16, 16), 6],
    ],
    ids=["between", "first", "last", "eight"],
)
def test_tokens_and_logits_are_those_of_transformers(saved, parts):
    path, model = saved
    tokens, images = prompt_of(parts)
    track = run(Driver(path), 0, tokens, images, [len(tokens)], 64)
    check(model, track, images)
    made = model.generate(
        **inputs_of(tokens, images), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    assert track.tokens == made


def test_chunks_may_cut_images_anywhere(saved):
    path, model = saved
    tokens, images = prompt_of([3, (24, 40), 2, (16, 16), 3])
    driver = Driver(path, num_pages=512)
    for cut in range(1, len(tokens)):
        check(model, run(driver, 0, tokens, images, [cut, len(tokens) - cut], 2), images)
    check(model, run(driver, 0, tokens, images, [1] * len(tokens), 3), images)


def test_rows_with_and_without_images_share_steps(saved):
    path, model = saved
    driver = Driver(path)
    texts = [prompt_of([20], seed=5), prompt_of([3, (24, 40), 4], seed=6), prompt_of([2, (16, 8), 9], seed=7)]
    tracks = [driver.add(slot, tokens, 6) for slot, (tokens, _) in enumerate(texts)]
    for sizes in ([7, 6, 4], [13, 16, 9]):
        rows = []
        for track, (tokens, images), size in zip(tracks, texts, sizes, strict=True):
            rows.append(driver.chunk(track, size, sample=track.computed + size == len(tokens)))
            rows[-1].images = images
        driver.step(rows, [driver.init(track) for track in tracks] if sizes[0] == 7 else [])
    for _ in range(5):
        rows = [driver.decode(track) for track in tracks]
        for row, (_, images) in zip(rows, texts, strict=True):
            row.images = images
        driver.step(rows)
    driver.finish()
    for track, (_, images) in zip(tracks, texts, strict=True):
        if images:
            check(model, track, images)
        else:
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([track.tokens]), use_cache=False).logits[0]
            for at, found in track.logits.items():
                assert (found - logits[at - 1]).abs().max().item() < 1e-4


class Follower(FollowerDriver):
    """Gets what followers get of a plan: where images are, not what is in them."""

    def step(self, rows, inits=(), copies=()):
        self.encoder = getattr(self, "encoder", None) or PlanEncoder()
        self.decoder = getattr(self, "decoder", None) or PlanDecoder()
        plan = StepPlan(self.number + 1, tuple(rows), tuple(inits), tuple(copies))
        told = self.decoder.decode(self.encoder.encode(plan))
        super().step(told.rows, told.inits, told.copies)


def test_two_ranks_give_the_tokens_of_one(saved):
    path, _ = saved
    tokens, images = prompt_of([3, (24, 40), 2, (16, 16), 3])
    chunks, storage = [5, 9, len(tokens) - 14], memoryview(bytearray(2**23))
    want = run(Driver(path), 0, with_placeholders(tokens, images), images, chunks, 12).tokens

    def rank(shard, communicator):
        make, own = (Follower, without_contents(images)) if shard.rank else (Driver, images)
        driver = make(path, shard=shard, communicator=communicator, storage=storage)
        return run(driver, 0, with_placeholders(tokens, images), own, chunks, 12).tokens

    assert ThreadGroup(2).run(rank)[0] == want


def test_other_ranks_are_told_of_a_step_when_its_images_are_encoded(saved):
    """They wait for rank 0 within a step, and not for as long as large images may take."""
    path, _ = saved
    tokens, images = prompt_of([3, (24, 40), 2, (16, 16), 3])
    want = run(Driver(path), 0, tokens, images, [5, len(tokens) - 5], 3).tokens
    driver = Driver(path)
    encoder, told = driver.runner.images, []
    encoder.cache = EmbeddingCache(room=0)  # keeps one image
    channel = SimpleNamespace(send_plan=lambda plan, threads: told.append(encoder.counters.images))
    driver.runner = RankedRunner(driver.runner, [channel], lambda: 1)
    results, read = [], driver.runner.read
    driver.runner.read = lambda launched: results.append(read(launched)) or results[-1]
    assert run(driver, 0, tokens, images, [5, len(tokens) - 5], 3).tokens == want
    assert told == [1, 2, 2, 2] and encoder.counters.images == 2
    assert [each.encode_seconds > 0 for each in results] == [True, True, False, False]


def test_one_pixel_makes_other_logits(saved):
    path, _ = saved
    pixels = picture((24, 40), 3)
    other = pixels.copy()
    other[5, 7, 1] ^= 0x40
    driver = Driver(path)
    tracks = []
    for slot, each in enumerate((pixels, other)):
        tokens, images = prompt_of([5, each, 7], seed=1)
        tracks.append(run(driver, slot, tokens, images, [len(tokens)], 1))
    first, second = (track.logits[len(tracks[0].tokens) - 1] for track in tracks)
    assert (first - second).abs().max().item() > 1e-3


RETRACTING = {"qwen3_5": 16, "qwen3_5_moe": 16}
"""Pages of a group with which a request is retracted; states take some of them."""


class SeeingEngine:
    """A scheduler over the real runner, whose steps have few tokens: chunks cut images."""

    def __init__(self, path, pages):
        self.driver = Driver(path, page_size=4, num_pages=pages)
        groups = self.driver.pool.layout.groups
        self.cache = KvCacheManager(
            PageAllocator(pages * len(groups)), PrefixTree(4, groups=groups, images=True)
        )
        config = SchedulerConfig(
            context_length=256, token_budget=11, max_rows=8, watermark=0, output_margin=0
        )
        self.contents, self.fetched = {}, 0
        self.scheduler = Scheduler(self.cache, config, want_images=self.fetch)

    def fetch(self, request, images):
        self.fetched += 1
        self.scheduler.images.here(request, {image.digest: self.contents[image.digest] for image in images})

    def answers(self, *asked):
        """Output of each choice of each request."""
        found = {}
        for request in asked:
            self.contents |= {image.digest: image.content for image in request.images}
            request.images = without_contents(request.images)
            self.scheduler.submit(request)
        while self.scheduler.requests:
            step = self.scheduler.plan()
            if step is not None:
                runner = self.driver.runner
                self.scheduler.commit(step, runner.read(runner.launch(step.plan)))
            for event in self.scheduler.take_events():
                assert not isinstance(event, FailedEvent), event
                if isinstance(event, TokenEvent):
                    key = event.sequence.request.key, event.sequence.index
                    found.setdefault(key, []).append(event.token)
        self.cache.check(idle=True)
        return found


def asks(key, tokens, images, count=8, **options):
    params = SamplingParams(temperature=0.0, max_tokens=count)
    prompt = with_placeholders(tokens, images)
    return EngineRequest(key=key, prompt=prompt, params=params, images=images, **options)


def greedy(model, tokens, images, count=8):
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(**inputs_of(tokens, images), **options)[0, len(tokens) :].tolist()


def test_cached_forked_resumed_and_beside_an_image_of_one_other_pixel(saved):
    path, model = saved
    engine = SeeingEngine(path, 120)
    tokens, images = prompt_of([6, (24, 40), 2, (16, 16), 5])
    wanted = greedy(model, tokens, images)
    assert engine.answers(asks("a", tokens, images)) == {("a", 0): wanted}
    again = asks("b", tokens, images)
    assert engine.answers(again) == {("b", 0): wanted}
    assert again.cached_tokens == (len(tokens) - 1) // 4 * 4
    assert engine.fetched == 1  # all images' pages are cached
    forked = engine.answers(asks("c", tokens, images, n=2))
    assert forked == {("c", 0): wanted, ("c", 1): wanted}
    resumed = engine.answers(asks("d", tokens, images, delivered=(tuple(wanted[:3]),)))
    assert resumed == {("d", 0): wanted[3:]}
    other = images[0].content.copy()
    other[11, 30, 2] ^= 1
    digest = hashlib.sha256(other.tobytes()).digest()
    changed = (replace(images[0], content=other, digest=digest), images[1])
    near = asks("e", tokens, changed)
    assert engine.answers(near) == {("e", 0): greedy(model, tokens, changed)}
    assert near.cached_tokens == 4  # the text before it


def test_retracted_requests_see_their_images_again(saved):
    path, model = saved
    engine = SeeingEngine(path, RETRACTING.get(model.config.model_type, 13))
    parts = [4, (24, 40), 3], [4, (40, 24), 5], [2, (24, 24), 5]
    texts = [prompt_of(each, seed=9) for each in parts]
    asked = [asks(key, *text, count=24) for key, text in enumerate(texts)]
    found = engine.answers(*asked)
    assert sum(each.retractions for each in asked) > 0 and engine.fetched > 3
    assert found == {(key, 0): greedy(model, *text, count=24) for key, text in enumerate(texts)}


def test_states_in_the_middle_of_an_image_are_found_behind_the_same_image_only(tmp_path):
    """Prompts that go on differently behind an image: the last whole page that they share, and the state that
    the first keeps for the others, end within it. Another image at the same place shares the text alone."""
    model = save_qwen3_5(tmp_path)
    engine = SeeingEngine(tmp_path, 60)
    (image,) = prompt_of([6, (24, 40)])[1]
    other = 255 - image.content
    near = replace(image, content=other, digest=hashlib.sha256(other.tobytes()).digest())
    found = []
    for key, (images, ending) in enumerate(
        [((image,), n) for n in range(3)] + [((near,), n) for n in range(3)]
    ):
        tokens = [*prompt_of([6, (24, 40)])[0], 20 + ending, 30, 40]
        asked = asks(key, tokens, images)
        assert engine.answers(asked) == {(key, 0): greedy(model, tokens, images)}
        found.append(asked.cached_tokens)
    assert image.start < 20 < image.end
    assert found == [0, 20, 20, 4, 20, 20]


@pytest.mark.thorough
def test_experts_as_published_are_those_that_transformers_saves(tmp_path):
    """Published files have each expert's matrices the other way round."""
    from safetensors.torch import load_file, save_file

    model = save_qwen3_vl(tmp_path, experts=True)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in tensors.items()}
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens, images = prompt_of([3, (16, 8), 4])
    check(model, run(Driver(tmp_path), 0, tokens, images, [len(tokens)], 2), images)
