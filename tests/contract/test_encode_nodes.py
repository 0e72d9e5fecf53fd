"""Encode nodes: embeddings that prefill nodes pull, batches of all requests, and nodes that fail."""

from __future__ import annotations

import numpy as np
import pytest

from baton.rpc.channel import open_channel
from baton.rpc.errors import from_rpc_error
from baton.v1 import common_pb2, encode_pb2, encode_pb2_grpc
from image_nodes import running
from vision_models import save_qwen3_vl

EIGHT = (3, (8, 8), 1, (24, 40), 1, (40, 16), 2, (8, 32), 1, (16, 8), 1, (8, 8), 1, (32, 8), 1, (16, 16), 6)
LOCAL = {"local_prefill_tokens": 1000}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3vl")
    return path, save_qwen3_vl(path)


async def test_tokens_are_those_of_transformers_and_images_are_divided(saved):
    path, model = saved
    async with running(path, encode=2) as cluster:
        prompts = [cluster.prompt(*EIGHT, seed=1), cluster.prompt(5, (24, 40), 7, seed=2)]
        wanted = [[prompt.greedy(model, 64)] for prompt in prompts]
        assert await cluster.ask(cluster.decode[0], *prompts, count=64) == wanted
        counts = [node.batches.images for node in cluster.encode]
        assert min(counts) > 0 and sum(counts) == len(set(cluster.pictures.fetched)) == 9
        assert not any(node.engine.images.encoded for node in cluster.nodes)
        # Known to the prefill node, then to the encode nodes: nothing is encoded again.
        for node, fields in ((cluster.decode[0], {"namespace": "a"}), (cluster.decode[0], LOCAL)):
            assert await cluster.ask(node, *prompts, count=64, **fields) == wanted
        assert [node.batches.images for node in cluster.encode] == counts
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
        assert encoder.batches.images == 7 and encoder.batches.batches < 7


async def test_a_node_that_is_lost_is_replaced_by_another_or_by_the_worker_itself(saved):
    path, model = saved
    async with running(path, encode=2, prefill=0) as cluster:
        node, dead = cluster.decode[0], "127.0.0.1:1"
        first, second = cluster.encoders
        many = cluster.prompt(*EIGHT, seed=11)
        wanted = [[many.greedy(model, 6)]]
        assert await cluster.ask(node, many, count=6, encoders=[dead, first]) == wanted
        assert cluster.encode[0].batches.images == 8 and not node.engine.images.encoded

        def broken(pixels):
            raise RuntimeError("planted")

        cluster.encode[1].batches._compute = broken
        other = cluster.prompt(*EIGHT, seed=12)
        answer = await cluster.ask(node, other, count=6, encoders=[second])
        assert answer == [[other.greedy(model, 6)]] and node.engine.images.encoded == 8
        cluster.encode[0]._tower = "another"
        third = cluster.prompt(*EIGHT, seed=13)
        answer = await cluster.ask(node, third, count=6, encoders=[first])
        assert answer == [[third.greedy(model, 6)]] and node.engine.images.encoded == 16


async def test_nodes_are_not_blamed_for_a_picture_that_is_gone(saved):
    path, _ = saved
    async with running(path, prefill=0, encode=2) as cluster:
        (node,) = cluster.decode
        gone = cluster.prompt(3, (24, 40), 4, seed=60)
        cluster.pictures.kept.pop(gone.images[0].digest)
        (refused,) = await cluster.ask(node, gone, count=2)
        assert refused.reason == "PICTURE_GONE"
        await cluster.ask(node, cluster.prompt(3, (8, 8), 1, (16, 16), 4, seed=61), count=2)
        assert sum(each.batches.images for each in cluster.encode) == 2 and not node.engine.images.encoded


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
