"""Images in requests to real workers: handed off, cached, lent, resumed, retracted; against transformers."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
from gateway_rig import until

from baton.rpc.channel import open_channel
from baton.rpc.errors import BatonError
from baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from image_nodes import running
from vision_models import save_qwen3_vl

OUTPUT = 64
EIGHT = (3, (8, 8), 1, (24, 40), 1, (40, 16), 2, (8, 32), 1, (16, 8), 1, (8, 8), 1, (32, 8), 1, (16, 16), 6)
LOCAL = {"local_prefill_tokens": 1000}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3vl")
    return path, save_qwen3_vl(path)


def several(cluster):
    twice = np.random.default_rng(5).integers(0, 256, (24, 16, 3), np.uint8)
    return [
        cluster.prompt(5, (24, 40), 7, seed=1),
        cluster.prompt((16, 8), 9, seed=2),
        cluster.prompt(4, (24, 16), 1, seed=3),
        cluster.prompt(2, twice, 3, twice, 4, seed=4),
        cluster.prompt(*EIGHT, seed=5),
        cluster.prompt(23, seed=6),
    ]


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_tokens_are_those_of_transformers_by_every_route(saved, transport):
    path, model = saved
    async with running(path, transports=(transport,), decode=2) as cluster:
        prompts = several(cluster)
        wanted = [prompt.greedy(model, OUTPUT) for prompt in prompts]
        first, second = cluster.decode
        split = await cluster.ask(first, *prompts, count=OUTPUT)
        assert split == [[each] for each in wanted]
        assert cluster.stats.pulled_pages and cluster.stats.transport == transport
        fetched = len(cluster.pictures.fetched)
        assert fetched == len(set(cluster.pictures.fetched))
        assert not first.engine.images.counters.images and first._images.contents.used == 0
        again = await cluster.ask(first, *prompts, count=OUTPUT)
        assert again == split and len(cluster.pictures.fetched) == fetched  # cached
        local = await cluster.ask(second, *prompts, count=OUTPUT, **LOCAL)
        assert local == split and second.engine.images.counters.images == len(set(cluster.pictures.fetched))
        forked = await cluster.ask(first, prompts[0], prompts[4], count=20, n=3)
        assert forked == [[wanted[0][:20]] * 3, [wanted[4][:20]] * 3]
        gc.collect()
        await until(lambda: not any(node._images.contents.used for node in cluster.nodes))


async def test_a_request_goes_on_at_another_node_after_any_token(saved):
    path, model = saved
    async with running(path, decode=2) as cluster:
        prompt = cluster.prompt(5, (24, 40), 2, (16, 16), 3, seed=8)
        wanted = prompt.greedy(model, 12)
        for cut in (1, 5, 11):
            for fields in ({}, LOCAL):
                node = cluster.decode[cut % 2]
                resumed = {"token_ids": [*prompt.tokens, *wanted[:cut]], "delivered": cut}
                found = await cluster.ask(node, prompt, count=12, **resumed, **fields, namespace=str(cut))
                assert found == [[wanted[cut:]]]


async def test_what_is_lent_is_compared_by_digests(saved):
    """A decode node's pages return to a prefill node for the next turn, those of images too."""
    path, model = saved
    async with running(path, prefill=1, decode=1) as cluster:
        (lender,), (borrower,) = cluster.decode, cluster.prefill
        borrower_core = borrower.core_or_none
        prompt = cluster.prompt(3, (24, 40), 2, (24, 24), 30, seed=11)
        near = cluster.prompt(*_but_one_pixel(prompt), seed=11)
        near.tokens = prompt.tokens
        assert await cluster.ask(lender, prompt, count=4, **LOCAL) == [[prompt.greedy(model, 4)]]
        source = common_pb2.PromptSource(address=lender._address, incarnation=lender.incarnation, tokens=56)
        borrower_core.sharing.borrower._pays = lambda begin, end: True
        for number, (asked, lent) in enumerate(((near, 0), (prompt, 14))):
            found = await _by_prefill(cluster, borrower, asked, number, sources=[source])
            assert found == asked.greedy(model, 1)
            assert borrower_core.sharing.borrower.counters.pulled_pages == lent


async def test_images_are_fetched_again_for_requests_that_lost_their_pages(saved):
    path, model = saved
    options = {"kv_tokens": 256 + 4, "context_length": 128, "output_margin": 0, "watermark": 0.0}
    async with running(path, prefill=0, decode_options=options) as cluster:
        (node,) = cluster.decode
        node.engine.images.cache._room = 1  # the last one's embeddings alone are kept
        sizes = ((40, 40), (24, 56), (56, 24), (40, 32), (48, 40), (32, 48))
        prompts = [cluster.prompt(4, size, 9, seed=20 + seed) for seed, size in enumerate(sizes)]
        wanted = [[prompt.greedy(model, 50)] for prompt in prompts]
        assert await cluster.ask(node, *prompts, count=50) == wanted
        assert node.core_or_none.scheduler.retractions
        assert len(cluster.pictures.fetched) > len(prompts)
        assert node.engine.images.counters.images > len(prompts)


async def test_one_fetch_serves_all_who_ask_at_a_time(saved):
    path, model = saved
    async with running(path, prefill=0) as cluster:
        (node,) = cluster.decode
        cluster.pictures.slow = 0.5
        pixels = np.random.default_rng(30).integers(0, 256, (24, 40, 3), np.uint8)
        prompts = [cluster.prompt(length, pixels, 5, seed=length) for length in range(2, 10)]
        text = cluster.prompt(12, seed=1)
        late = asyncio.create_task(cluster.ask(node, *prompts, count=6))
        await until(lambda: cluster.pictures.fetched)
        assert await cluster.ask(node, text, count=6) == [[text.greedy(model, 6)]]
        assert not late.done()  # nobody waits for other people's images
        assert await late == [[prompt.greedy(model, 6)] for prompt in prompts]
        assert len(cluster.pictures.fetched) == node.engine.images.counters.images == 1


async def test_there_is_room_for_some_pixels_at_a_time(saved):
    path, model = saved
    async with running(path, prefill=0) as cluster:
        (node,) = cluster.decode
        node._images.contents._room = 3 * 40 * 40
        prompts = [cluster.prompt(4, (40, 32), 5, seed=seed) for seed in range(40, 44)]
        wanted = [[prompt.greedy(model, 4)] for prompt in prompts]
        assert await cluster.ask(node, *prompts, count=4) == wanted
        large = cluster.prompt(2, (40, 40), (24, 24), 3, seed=50)
        (refused,) = await cluster.ask(node, large)
        assert isinstance(refused, BatonError) and refused.reason == "TOO_MANY_IMAGES"


async def test_pictures_that_do_not_come_fail_their_request_alone(saved):
    path, model = saved
    async with running(path) as cluster:
        (node,) = cluster.decode
        prompt, other = cluster.prompt(3, (24, 40), 4, seed=60), cluster.prompt(15, seed=61)
        digest = prompt.images[0].digest
        kept = cluster.pictures.kept.pop(digest)
        wanted = [[other.greedy(model, 6)]]
        gone, *rest = await cluster.ask(node, prompt, other, count=6)
        assert (gone.code.name, gone.reason) == ("FAILED_PRECONDITION", "PICTURE_GONE") and rest == wanted
        cluster.pictures.kept[digest] = np.zeros((40, 24, 3), np.uint8)
        (wrong,) = await cluster.ask(node, prompt, count=6)
        assert wrong.reason == "WRONG_PICTURE"
        lost, *rest = await cluster.ask(node, prompt, pictures="127.0.0.1:1", count=6)
        assert (lost.code.name, lost.reason) == ("UNAVAILABLE", "PICTURES_LOST")
        cluster.pictures.kept[digest], cluster.pictures.failures = kept, 2
        assert await cluster.ask(node, prompt, count=6) == [[prompt.greedy(model, 6)]]


async def test_what_cannot_be_is_refused_by_one_line(saved):
    path, _ = saved
    Image, digest = common_pb2.PromptImage, bytes(32)
    one = Image(start=3, rows=2, columns=2, digest=digest)
    wrong = {
        "images[0].digest": {"images": [Image(start=3, rows=2, columns=2, digest=b"short")]},
        "images[0].rows": {"images": [Image(start=3, columns=2, digest=digest)]},
        "images[1].start": {"images": [one, Image(start=6, rows=1, columns=1, digest=digest)]},
        "images[0].start": {"images": [Image(start=3, rows=2**31, columns=2**31, digest=digest)]},
        "images": {"images": [one] * 257},
        "pictures": {"images": [one], "pictures": ""},
        "encoders": {"images": [one], "encoders": ["a:1"] * 17},
        "sampling.prompt_logprobs": {
            "images": [one],
            "sampling": common_pb2.SamplingParams(max_tokens=1, prompt_logprobs=1),
        },
    }
    async with running(path, prefill=0) as cluster:
        text = cluster.prompt(10)
        for field, fields in wrong.items():
            pictures = {"pictures": cluster.pictures_address} | fields
            (error,) = await cluster.ask(cluster.decode[0], text, **pictures)
            assert error.field == field and "\n" not in error.message, error
        resumed = {"images": [Image(start=6, rows=2, columns=2, digest=digest)], "delivered": 1}
        (error,) = await cluster.ask(cluster.decode[0], text, pictures="a:1", **resumed)
        assert error.field == "images[0].start"
        assert not cluster.pictures.fetched
    async with running("demo", prefill=0) as cluster:
        (error,) = await cluster.ask(cluster.decode[0], text, images=[one], pictures="a:1")
        assert error.reason == "NO_IMAGES"


def _but_one_pixel(prompt):
    pixels = prompt.pixels[0].copy()
    pixels[3, 5, 1] ^= 1
    return 3, pixels, 2, prompt.pixels[1], 30


async def _by_prefill(cluster, node, prompt, number, **fields):
    """The first token."""
    channel = open_channel(node._address)
    call = prefill_pb2_grpc.PrefillStub(channel).Run()
    await call.write(prefill_pb2.PrefillRequest(hello=prefill_pb2.PrefillHello(incarnation=77)))
    given = cluster.start(prompt, 1, 4)
    start = prefill_pb2.PrefillStart(
        attempt=common_pb2.Attempt(gateway=77, request=number),
        token_ids=given.token_ids,
        images=given.images,
        pictures=given.pictures,
        sampling=given.sampling,
        keep_pages=False,
        **fields,
    )
    await call.write(prefill_pb2.PrefillRequest(start=start))
    tokens = []
    while True:
        for event in (await asyncio.wait_for(call.read(), 30)).events:
            kind = event.WhichOneof("kind")
            assert kind != "failed", event
            tokens += [each.token_id for each in event.first.tokens]
            if kind == "finished":
                await channel.close()
                return tokens
