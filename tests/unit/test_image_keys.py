"""Images in the prefix tree: pages of one are never those of another, and those of the same are found."""

from __future__ import annotations

import hashlib
import itertools
import random

import numpy as np
import pytest
from test_scheduler import Engine, check_outputs, request

from baton.engine.image_spans import ImageSpan, with_placeholders
from baton.engine.plan import PlanRow
from baton.engine.scheduler import Scheduler
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.kv_events import PromptDigests, TreeEvents, TreeLog
from baton.kvcache.page_keys import page_key, placeholder

SIZE = 4
PIXELS = np.zeros((1, 1, 3), np.uint8)


def digest(name):
    return hashlib.sha256(str(name).encode()).digest()


def near(name):
    """A digest that differs from `digest(name)` in its last bit alone."""
    whole = digest(name)
    return whole[:-1] + bytes([whole[-1] ^ 1])


def with_images(key, parts, **options):
    """Parts are token ids or (digest, tokens of the image)."""
    tokens, images = [], []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        name, count = part
        images.append(ImageSpan(len(tokens), 1, count, name))
        tokens += [0] * count
    made = request(key, with_placeholders(tokens, images), **options)
    made.images = tuple(images)
    return made


class SeeingEngine(Engine):
    """Contents of images come two turns after they were asked for."""

    def __init__(self, pages=64, **options):
        super().__init__(pages=pages, **options)
        self.allocator = PageAllocator(pages)
        tree = PrefixTree(SIZE, images=True)
        self.cache = KvCacheManager(self.allocator, tree)
        self.scheduler = Scheduler(self.cache, self.scheduler.config, want_images=self.want)
        self.wanted, self.turns = [], 0

    def want(self, asked, images):
        assert images and not any(image.content is not None for image in images)
        self.wanted.append((self.turns + 2, asked, images))

    def turn(self):
        self.turns += 1
        while self.wanted and self.wanted[0][0] <= self.turns:
            _, asked, images = self.wanted.pop(0)
            self.scheduler.images.here(asked, {image.digest: PIXELS for image in images})
        return super().turn()

    def check_in_use(self, plan):
        """What is computed of an image is computed of its contents."""
        super().check_in_use(plan)
        for row in plan.rows:
            for image in row.images:
                if image.start < row.start + row.count and row.start < image.end:
                    assert image.content is PIXELS

    def ask(self, asked):
        self.scheduler.submit(asked)
        self.run()
        check_outputs(self, [asked])
        return asked.cached_tokens


@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_an_image_is_found_again_and_its_neighbour_is_not(before, count):
    """Wherever page borders cut it. What lies before the images is shared."""
    engine, text = SeeingEngine(), list(range(before))
    engine.ask(with_images("a", [*text, (digest(1), count), 7, 8, 9, 10, 11]))
    whole = (before + count + 5 - 1) // SIZE * SIZE
    assert engine.ask(with_images("b", [*text, (digest(1), count), 7, 8, 9, 10, 11])) == whole
    assert engine.ask(with_images("c", [*text, (near(1), count), 7, 8, 9, 10, 11])) == before // SIZE * SIZE


def test_images_change_places_and_names_within_a_page():
    engine = SeeingEngine()
    one, two = digest(1), digest(2)
    first = [(one, 1), (two, 1), 5, 6, 7, 8, 9]
    engine.ask(with_images("a", first))
    for key, parts in enumerate(
        [
            [(two, 1), (one, 1), 5, 6, 7, 8, 9],
            [(one, 1), (one, 1), 5, 6, 7, 8, 9],
            [(two, 1), (two, 1), 5, 6, 7, 8, 9],
            [(one, 2), 5, 6, 7, 8, 9],
            [(one, 1), 2**31, 6, 7, 8, 9, 10],
            [2**31, 2**31, 5, 6, 7, 8, 9],
            [0, 0, 5, 6, 7, 8, 9],
        ]
    ):
        assert engine.ask(with_images(key, parts)) == 0
    assert engine.ask(with_images("again", first)) == 4


def test_all_bytes_of_a_digest_count():
    engine = SeeingEngine()
    engine.ask(with_images("one", [(digest(1), 9), 5]))
    for at in range(32):
        other = bytearray(digest(1))
        other[at] ^= 1
        assert engine.ask(with_images(at, [(bytes(other), 9), 5])) == 0


def test_images_of_one_token_are_known_by_their_places():
    engine = SeeingEngine()
    one, two = (digest(1), 1), (digest(2), 1)
    for index, four in enumerate(itertools.product((one, two), repeat=4)):
        assert engine.ask(with_images(index, [*four, 5])) == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_random_mixes_in_tiny_caches(overlap):
    """Answers are those of fresh runs: the hash of all tokens, of which placeholders name their images."""
    rng = random.Random(3)
    engine = SeeingEngine(pages=30, budget=24, overlap=overlap, watermark=0, output_margin=0)
    names = [digest(1), near(1), digest(2), near(2)]
    asked = []
    for number in range(150):
        parts = [1, 2, (rng.choice(names), 9)]
        for _ in range(rng.randrange(3)):
            parts += [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
            parts.append((rng.choice(names), rng.choice([1, 3, 9])))
        parts.append(1)
        penalty = {"repetition_penalty": 1.5} if number % 7 == 0 else {}
        made = with_images(number, parts, max_tokens=rng.randrange(1, 12), n=rng.choice([1, 1, 2]), **penalty)
        asked.append(made)
        engine.scheduler.submit(made)
        if number % 3 == 0:
            engine.turn()
    engine.run()
    plain = [each for each in asked if not each.params.penalized]
    check_outputs(engine, plain)
    assert sum(each.cached_tokens > 0 for each in asked) > 20
    assert not any(image.content is not None for each in asked for image in each.images)
    for each in asked:  # penalties know the text alone
        if each.params.penalized:
            assert len(engine.tokens[(each.key, 0)]) == each.params.max_tokens


def test_a_slot_with_penalties_is_told_of_text_alone():
    engine = SeeingEngine()
    made = with_images("a", [1, (digest(1), 5), 2, 3], repetition_penalty=1.5)
    engine.scheduler.submit(made)
    engine.run()
    assert {init.prompt for plan in engine.runner.steps for init in plan.inits} == {(1, 2, 3)}


def test_views_tell_images_apart_and_text_is_named_as_without_images():
    tree, events, log = PrefixTree(SIZE, images=True), TreeEvents(), TreeLog(SIZE)
    tree.observe(events)
    one = [1, 2, 3, 4, *(placeholder(digest(1), i) for i in range(6)), 5, 6, 7]
    tree.insert(one, [(0,), (1,), (2,)])
    while (event := events.take()) is not None:
        log.apply(event)
    held = set(log.since(None).stored)
    assert held == {PromptDigests(one, "", SIZE)[page] for page in range(3)}
    other = [1, 2, 3, 4, *(placeholder(near(1), i) for i in range(6)), 5, 6, 7]
    assert [PromptDigests(other, "", SIZE)[page] in held for page in range(3)] == [True, False, False]
    plain, text = PrefixTree(SIZE), TreeLog(SIZE)
    events = TreeEvents()
    plain.observe(events)
    plain.insert([1, 2, 3, 4], [(0,)])
    text.apply(events.take())
    assert set(text.since(None).stored) < held


def test_without_seals_placeholders_are_refused():
    with pytest.raises(OverflowError):
        page_key([1, 2, 3, placeholder(digest(1), 0)], SIZE, False)
    for sealed in (False, True):
        with pytest.raises(OverflowError):
            page_key([1, 2, 3, -1], SIZE, sealed)


def test_rows_know_the_images():
    engine = SeeingEngine()
    made = with_images("a", [1, (digest(1), 5), 2, 3])
    engine.scheduler.submit(made)
    engine.run()
    rows: list[PlanRow] = [row for plan in engine.runner.steps for row in plan.rows]
    assert len(rows) == 8 and all(row.images == made.images for row in rows)
