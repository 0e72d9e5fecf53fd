"""Chats whose turns land on any node: what one has cached, the others pull rather than compute."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import grpc
import pytest
from deployment import Deployment
from polling import until

from baton.client import Client
from baton.v1 import cache_pb2_grpc, common_pb2, prefill_pb2

PAGE = 16
TURNS = 8
OUTPUT = 12


ANY_NODE = ("--routing", "round-robin", "--split", "always")


@pytest.fixture(scope="module")
def split(tmp_path_factory, deployments) -> Iterator[Deployment]:
    """Any prefill and any decode node gets a turn, whatever it holds."""
    folder = tmp_path_factory.mktemp("sources")
    with Deployment.split(folder, "demo", prefill=2, decode=2, gateway_flags=ANY_NODE) as deployment:
        deployments.append(deployment)
        yield deployment


class Chat:
    """Each turn's prompt is all that was said before, and 100 to 400 new tokens. Not every seed's eight turns
    fit into the model's context."""

    def __init__(self, client: Client, seed: int) -> None:
        self._draw = random.Random(seed)
        self._client = client
        self.said: list[int] = []
        self.new = self.computed = 0
        """New tokens of all prompts; those computed, but for the incomplete last page of the turn before."""

    def turn(self) -> None:
        count, held = self._draw.randrange(100, 401), max(0, len(self.said) - 1)
        self.said += [self._draw.randrange(5, 4000) for _ in range(count)]
        self.new += len(self.said) - held
        answer = self._client.generate(
            token_ids=self.said, temperature=0.0, max_tokens=OUTPUT, ignore_eos=True
        )
        assert answer.usage.prompt_tokens == len(self.said)
        self.computed += len(self.said) - answer.usage.cached_tokens - held % PAGE
        self.said += answer.choices[0].token_ids

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()
            time.sleep(0.15)  # reports of caches leave every 50 ms


@pytest.mark.alone  # pages are pulled where that is expected to take less time than computing
def test_turns_compute_their_new_tokens_alone_wherever_they_land(split: Deployment):
    chat = Chat(split.client(), 9)
    chat.turns(TURNS)
    assert chat.computed <= 1.05 * chat.new, f"{chat.computed} of {chat.new} new tokens"
    nodes = [*split.of("prefill"), *split.of("decode")]
    assert sum(node.load().borrowed_pages for node in nodes) <= sum(node.load().lent_pages for node in nodes)
    assert not any(node.load().borrow_failures for node in nodes)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_stranger_asks_of_a_lender_is_refused(split: Deployment, role: str):
    node = split.of(role)[1]
    layout, Request = node.info().layout, prefill_pb2.PrefillRequest
    name = common_pb2.Attempt(gateway=5, request=1)

    def ask(hello: common_pb2.Layout, *requests: prefill_pb2.PrefillRequest) -> list[str]:
        first = Request(hello=prefill_pb2.PrefillHello(incarnation=5, layout=hello))
        with grpc.insecure_channel(node.address) as channel:
            call = cache_pb2_grpc.CacheStub(channel).Lend(iter([first, *requests]), timeout=10)
            try:
                return [event.WhichOneof("kind") for answer in call for event in answer.events]
            except grpc.RpcError as error:
                return [error.code().name]

    other = common_pb2.Layout()
    other.CopyFrom(layout)
    other.model_fingerprint = "another"
    assert ask(other) == ask(common_pb2.Layout()) == ["FAILED_PRECONDITION"]
    start = Request(start=prefill_pb2.PrefillStart(attempt=name, token_ids=[5, 6]))
    assert ask(layout, start) == ["INVALID_ARGUMENT"]
    cached = Request(cached=prefill_pb2.CachedPrompt(attempt=name, token_ids=range(5, 90)))
    assert ask(layout, cached, cached) == ["INVALID_ARGUMENT"]
    assert ask(layout) == ["welcome"]


async def test_a_restarted_node_is_warmed_by_the_others(split: Deployment):
    chat, node = Chat(split.client(), 2), split.prefill
    chat.turns(TURNS // 2)
    node.kill()
    node.start()
    node.wait_ready()
    peers = lambda: [peer for decode in split.of("decode") for peer in decode.info().peers]  # noqa: E731
    await until(lambda: all(peer.connected for peer in peers()), "decode nodes reach the restarted node")
    chat.turns(TURNS - TURNS // 2)
    assert node.load().borrowed_pages
    assert chat.computed <= 1.05 * chat.new, f"{chat.computed} of {chat.new} new tokens"


@pytest.mark.alone
def test_the_decode_node_of_the_last_turn_lends_to_the_prefill_node_of_the_next(tmp_path, deployments):
    """The only prefill node has had to forget what the only decode node still has."""
    flags = {
        "prefill_flags": ("--kv-tokens", "768"),
        "decode_flags": ("--kv-tokens", "4096"),
        "gateway_flags": ("--split", "always"),
    }
    with Deployment.split(tmp_path, "demo", **flags) as deployment:
        deployments.append(deployment)
        chat, draw = Chat(deployment.client(), 4), random.Random(5)
        for _ in range(3):
            chat.turns(1)
            for _ in range(2):  # as long as the prefill node's pool
                ids = [draw.randrange(5, 4000) for _ in range(400)]
                deployment.client().generate(token_ids=ids, max_tokens=1)
            time.sleep(0.15)
        assert chat.computed <= 1.05 * chat.new, f"{chat.computed} of {chat.new} new tokens"
        assert deployment.decode.load().lent_pages == deployment.prefill.load().borrowed_pages > 0


def test_without_shared_memory_pages_come_by_messages(split: Deployment, tmp_path, deployments):
    chat = Chat(split.client(), 3)
    chat.turns(TURNS // 2)
    options = {"worker": ("--transports", "grpc"), "gateway_flags": ANY_NODE}
    with Deployment.split(tmp_path, "demo", prefill=2, decode=2, **options) as deployment:
        deployments.append(deployment)
        same = Chat(deployment.client(), 3)
        same.turns(TURNS // 2)
        nodes = [*deployment.of("prefill"), *deployment.of("decode")]
        kinds = {e.WhichOneof("kind") for node in nodes for e in node.info().endpoints}
        assert kinds <= {"grpc"} and sum(node.load().borrowed_pages for node in nodes)
        assert not any(node.load().borrow_failures for node in nodes)
    assert same.said == chat.said
