"""Encode nodes: embeddings that prefill nodes pull, batches of all requests, and nodes that fail."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc.aio
import numpy as np
import pytest
import torch
from gateway_rig import until

from baton.handoff.pull_cost import PullMeter
from baton.rpc.channel import open_channel
from baton.rpc.errors import from_rpc_error
from baton.tracing.recorder import EventKind
from baton.v1 import common_pb2, encode_pb2, encode_pb2_grpc
from image_nodes import running
from vision_models import save_qwen3_vl

EIGHT = (3, (8, 8), 1, (24, 40), 1, (40, 16), 2, (8, 32), 1, (16, 8), 1, (8, 8), 1, (32, 8), 1, (16, 16), 6)
KINDS = (EventKind.RECEIVED, EventKind.ENCODE_BEGUN, EventKind.ENCODE_ENDED)
LOCAL = {"local_prefill_tokens": 1000}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3vl")
    return path, save_qwen3_vl(path)


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_tokens_are_those_of_transformers_and_images_are_divided(saved, transport):
    path, model = saved
    async with running(path, encode=2, transports=(transport,)) as cluster:
        prompts = [cluster.prompt(*EIGHT, seed=1), cluster.prompt(5, (24, 40), 7, seed=2)]
        wanted = [[prompt.greedy(model, 64)] for prompt in prompts]
        assert await cluster.ask(cluster.decode[0], *prompts, count=64) == wanted
        counts = [node.batches.counters.images for node in cluster.encode]
        assert min(counts) > 0 and sum(counts) == len(set(cluster.pictures.fetched)) == 9
        assert not any(node.engine.images.counters.images for node in cluster.nodes)
        load = cluster.encode[0].load()
        assert not load.leases and load.pages.cached and not load.pages.owned
        # Known to the prefill node, then to the encode nodes: nothing is encoded again.
        for node, fields in ((cluster.decode[0], {"namespace": "a"}), (cluster.decode[0], LOCAL)):
            assert await cluster.ask(node, *prompts, count=64, **fields) == wanted
        assert [node.batches.counters.images for node in cluster.encode] == counts
        assert len(cluster.pictures.fetched) == 9


async def test_images_of_all_who_ask_share_batches(saved):
    path, model = saved
    async with running(path, encode=1, prefill=0) as cluster:
        (encoder,), (node,) = cluster.encode, cluster.decode
        same = np.random.default_rng(3).integers(0, 256, (24, 24, 3), np.uint8)
        cluster.pictures.slow = 0.3
        prompts = [cluster.prompt(length, same, 4, (8, 16), 3, seed=length) for length in range(2, 8)]
        wanted = [[prompt.greedy(model, 4)] for prompt in prompts]
        assert await cluster.ask(node, *prompts, count=4) == wanted
        assert encoder.batches.counters.images == 7 and encoder.batches.counters.batches < 7


async def test_recorders_show_images_of_a_request_at_two_nodes(saved):
    path, model = saved
    async with running(path, encode=2) as cluster:
        prompt = cluster.prompt(*EIGHT, seed=21)
        assert await cluster.ask(cluster.decode[0], prompt, count=4) == [[prompt.greedy(model, 4)]]
        (asked,) = cluster.prefill[0].recorder.requests()
        tokens = [image.rows * image.columns for image in prompt.images]
        encoded = []
        for node in cluster.encode:
            events = node.recorder.of([asked])
            images = [event.step for event in events if event.kind is EventKind.RECEIVED]
            assert images and len(set(images)) == len(images)
            for image in images:
                kinds = [event.kind for event in events if event.step == image]
                assert kinds == [*KINDS, EventKind.ENDED] and events[-1].text == "finished"
            encoded += [event.number for event in events if event.kind is EventKind.ENCODE_ENDED]
            sent = [
                event
                for event in cluster.prefill[0].recorder.of([asked])
                if (event.kind, event.text) == (EventKind.ENCODE_ASKED, node.address)
            ]
            assert len(sent) == len(images)
        assert sorted(encoded) == sorted(tokens)
        kinds = [event.kind for event in cluster.prefill[0].recorder.of([asked])]
        begun, ended = kinds.index(EventKind.IMAGES_BEGUN), kinds.index(EventKind.IMAGES_ENDED)
        assert begun < kinds.index(EventKind.ENCODE_ASKED) < ended < kinds.index(EventKind.ADMITTED)


class Held:
    """Lets an encode node's batches begin, and end once `go` is set."""

    def __init__(self, node):
        self.node, self.go, self.batches = node, threading.Event(), []
        self._compute, node.batches._compute = node.batches._compute, self.compute

    def compute(self, batch):
        self.batches.append(len(batch))
        assert self.go.wait(30)
        return self._compute(batch)


async def test_the_load_is_known_while_a_batch_is_stored(saved):
    """Images of the batch that are there already wait no more."""
    async with running(saved[0], encode=1) as cluster:
        (encoder,) = cluster.encode
        write, loads = encoder.batches._pool.write, []

        def look(*what):
            time.sleep(0.05)  # the one before has been said to be there
            load = encoder.load()
            loads.append((load.waiting, load.running, load.queued_tokens))
            write(*what)

        encoder.batches._pool.write = look
        held = Held(encoder)
        asked = asyncio.create_task(cluster.ask(cluster.decode[0], cluster.prompt(*EIGHT, seed=60), count=2))
        await until(lambda: encoder.batches.images == 8)
        held.go.set()
        await asked
        first, rest = held.batches
        assert [load[1] for load in loads] == [*range(first, 0, -1), *range(rest, 0, -1)]
        assert [load[0] for load in loads] == [8 - first] * first + [0] * rest
        assert loads[-1][2] < loads[0][2]


async def test_embeddings_that_cannot_be_stored_keep_nobody_waiting(saved):
    path, model = saved
    async with running(path, encode=1, prefill=0) as cluster:
        (encoder,) = cluster.encode
        pool = encoder.batches._pool

        def fail(*what):
            del pool.write
            raise OSError("no more memory")

        pool.write = fail
        prompt = cluster.prompt(2, (8, 8), 3, seed=61)
        asked = cluster.ask(cluster.decode[0], prompt, count=2)
        assert await asyncio.wait_for(asked, 10) == [[prompt.greedy(model, 2)]]
        assert not encoder.batches.images
        assert not encoder.load().pages.owned


async def test_a_caller_that_says_nothing_keeps_no_embeddings(saved, monkeypatch):
    monkeypatch.setattr("baton.worker.encode.server.LEND_SECONDS", 0.2)
    path, _ = saved
    async with running(path, encode=1, prefill=0) as cluster:
        (encoder,) = cluster.encode
        async with open_channel(encoder.address) as channel:
            call = encode_pb2_grpc.EncodeStub(channel).Lend()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asyncio.wait_for(call.read(), 10)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_ten_requests_of_one_image_each_share_a_batch(saved):
    path, model = saved
    async with running(path, encode=1, prefill=0) as cluster:
        (encoder,), (node,) = cluster.encode, cluster.decode
        held = Held(encoder)
        first = cluster.prompt(2, (8, 8), 2, seed=30)
        prompts = [cluster.prompt(length, (8, 16), 3, seed=30 + length) for length in range(2, 12)]
        wanted = [[prompt.greedy(model, 3)] for prompt in (first, *prompts)]
        before = asyncio.create_task(cluster.ask(node, first, count=3))
        await until(lambda: held.batches)
        rest = asyncio.create_task(cluster.ask(node, *prompts, count=3))
        await until(lambda: encoder.load().waiting == 10 and len(encoder.batches._waiting) == 10)
        load = encoder.load()
        assert (load.running, load.queued_tokens) == (1, 21)
        held.go.set()
        assert await before + await rest == wanted
        assert held.batches == [1, 10]
        load = encoder.load()
        assert (load.encoded_images, load.encoded_tokens, load.encode_batches) == (11, 21, 2)
        assert load.encode_us and not (load.waiting or load.running or load.queued_tokens or load.requests)
        sizes = [each.size for each in encoder.recorder.all() if each.kind is EventKind.ENCODE_BEGUN]
        assert sizes == [1] + [10] * 10


async def test_a_node_is_killed_in_the_middle_of_a_batch(saved):
    path, model = saved
    async with running(path, encode=2) as cluster:
        prompt = cluster.prompt(*EIGHT, seed=41)
        held = [Held(node) for node in cluster.encode]
        held[1].go.set()
        answer = asyncio.create_task(cluster.ask(cluster.decode[0], prompt, count=6))
        await until(lambda: held[0].batches)
        cluster.stops[cluster.encoders[0]].set()
        assert await answer == [[prompt.greedy(model, 6)]]
        held[0].go.set()
        assert cluster.encode[1].batches.counters.images == 8
        assert not any(node.engine.images.counters.images for node in cluster.nodes)
        ends = [each.text for each in cluster.encode[0].recorder.all() if each.kind is EventKind.ENDED]
        assert ends and set(ends) == {"cancelled"}


async def test_images_are_encoded_where_that_is_measured_to_be_sooner(saved):
    path, model = saved
    async with running(path, encode=1, prefill=0, measured=True) as cluster:
        (encoder,), (node,) = cluster.encode, cluster.decode
        for slow, fast in ((encoder, node), (node, encoder)):
            for each, seconds in ((slow, 0.5), (fast, 1e-6)):
                meter = PullMeter()
                meter.add(100, seconds * 100)
                if each is encoder:
                    encoder.batches.meter = meter
                else:
                    node._images.choice.local = meter
            before = encoder.batches.counters.images, node.engine.images.counters.images
            prompt = cluster.prompt(3, (24, 40), 5, (16, 16), 2, seed=90 + (slow is node))
            assert await cluster.ask(node, prompt, count=6) == [[prompt.greedy(model, 6)]]
            after = encoder.batches.counters.images, node.engine.images.counters.images
            encoded = [b - a for a, b in zip(before, after, strict=True)]
            assert encoded == ([2, 0] if fast is encoder else [0, 2])
        assert node.load().HasField("encode_cost") and encoder.load().HasField("encode_cost")


@pytest.mark.parametrize(("transport", "reason"), [("grpc", "LEASE_LOST"), ("shm", "STALE_PAGES")])
async def test_pages_that_are_reused_in_the_middle_of_a_pull_are_seen(saved, transport, reason, capfd):
    """The time of the lease is over when the pull begins; other embeddings take its pages."""
    path, model = saved
    async with running(path, encode=1, transports=(transport,)) as cluster:
        (encoder,) = cluster.encode
        pool, lend = encoder.pool, encoder.pool.lend
        pool._lend_seconds = -1.0
        reused = []

        def lend_and_reuse(image):
            lease = lend(image)
            if lease is not None:
                for number in range(2):  # more than the pool has room for
                    size = pool._rows.size * 5 // 8
                    other = torch.full((1, 1, size // 4), 0.5 + number)
                    stored = pool.take(bytes([number]) * 32, other)
                    pool.write(stored, other)
                    pool.keep(stored)
                reused.append(lease)
            return lease

        pool.lend = lend_and_reuse
        prompt = cluster.prompt(3, (24, 40), 5, (16, 16), 2, seed=71)
        assert await cluster.ask(cluster.decode[0], prompt, count=16) == [[prompt.greedy(model, 16)]]
        assert reused and not any(lease.stood for lease in reused)
        assert cluster.prefill[0].engine.images.counters.images == 2
        assert reason in capfd.readouterr().err and not pool.leases


async def test_a_node_is_killed_in_the_middle_of_a_pull(saved, capfd):
    path, model = saved
    async with running(path, encode=2) as cluster:
        first, second = cluster.encode
        pages, begun = first._published.pages, asyncio.Event()
        read = pages.read

        async def stop(page):
            if begun.is_set():
                await asyncio.sleep(30)
            begun.set()
            return await read(page)

        pages.read = stop
        prompt = cluster.prompt(3, (40, 40), 5, seed=81)
        asked = {"encoders": [first.address, second.address]}
        asked["encoders"].sort(key=lambda address: address != first.address)
        if sum(prompt.images[0].digest) % 2:
            asked["encoders"].reverse()
        answer = asyncio.create_task(cluster.ask(cluster.decode[0], prompt, count=16, **asked))
        await until(begun.is_set)
        cluster.stops[first.address].set()
        assert await answer == [[prompt.greedy(model, 16)]]
        assert [node.batches.counters.images for node in cluster.encode] == [1, 1]
        assert not cluster.prefill[0].engine.images.counters.images and not first.pool.leases
        assert "encode node failed" in capfd.readouterr().err


async def test_a_node_that_is_lost_is_replaced_by_another_or_by_the_worker_itself(saved):
    path, model = saved
    async with running(path, encode=2, prefill=0) as cluster:
        node, dead = cluster.decode[0], "127.0.0.1:1"
        first, second = cluster.encoders
        many = cluster.prompt(*EIGHT, seed=11)
        wanted = [[many.greedy(model, 6)]]
        assert await cluster.ask(node, many, count=6, encoders=[dead, first]) == wanted
        assert cluster.encode[0].batches.counters.images == 8 and not node.engine.images.counters.images

        def broken(pixels):
            raise RuntimeError("planted")

        cluster.encode[1].batches._compute = broken
        other = cluster.prompt(*EIGHT, seed=12)
        answer = await cluster.ask(node, other, count=6, encoders=[second])
        assert answer == [[other.greedy(model, 6)]] and node.engine.images.counters.images == 8
        cluster.encode[0]._tower = "another"
        third = cluster.prompt(*EIGHT, seed=13)
        answer = await cluster.ask(node, third, count=6, encoders=[first])
        assert answer == [[third.greedy(model, 6)]] and node.engine.images.counters.images == 16


async def test_nodes_are_not_blamed_for_a_picture_that_is_gone(saved):
    path, _ = saved
    async with running(path, prefill=0, encode=2) as cluster:
        (node,) = cluster.decode
        gone = cluster.prompt(3, (24, 40), 4, seed=60)
        cluster.pictures.kept.pop(gone.images[0].digest)
        (refused,) = await cluster.ask(node, gone, count=2)
        assert refused.reason == "PICTURE_GONE"
        await cluster.ask(node, cluster.prompt(3, (8, 8), 1, (16, 16), 4, seed=61), count=2)
        assert (
            sum(each.batches.counters.images for each in cluster.encode) == 2
            and not node.engine.images.counters.images
        )


async def test_what_cannot_be_is_refused_by_one_line(saved):
    path, _ = saved
    async with running(path, encode=1, prefill=0, decode=0) as cluster:
        (node,), right = cluster.encode, common_pb2.PromptImage(rows=1, columns=1, digest=bytes(32))
        tower, where = node._tower, cluster.pictures_address
        wrong = {
            "OTHER_MODEL": {"image": right, "pictures": where, "tower": "x"},
            "INVALID_FIELD": {"image": common_pb2.PromptImage(rows=1), "pictures": where, "tower": tower},
            "PICTURE_GONE": {"image": right, "pictures": where, "tower": tower},
            "pictures is empty": {"image": right, "tower": tower},
        }
        async with open_channel(node.address) as channel:
            for reason, fields in wrong.items():
                call = encode_pb2_grpc.EncodeStub(channel).Run(encode_pb2.EncodeImageRequest(**fields))
                with pytest.raises(Exception) as caught:
                    async for _ in call:
                        pass
                error = from_rpc_error(caught.value)
                assert reason in (error.reason, error.message[: len(reason)])
        assert not node.load().requests
