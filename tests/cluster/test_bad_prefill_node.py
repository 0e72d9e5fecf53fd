"""A prefill node that says what cannot be: the decode node goes on, and computes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from deployment import Deployment
from worker_streams import Decode, Sampling, numbers

from baton.v1 import prefill_pb2, prefill_pb2_grpc

PROMPT = [*range(5, 302)]
PAGES = 19
Event, Chunk, First = prefill_pb2.PrefillEvent, prefill_pb2.ChunkReady, prefill_pb2.FirstTokens
Group = prefill_pb2.GroupPages
ALL = Group(page_ids=range(PAGES), generations=[0] * PAGES)
OWN = {"first": First(tokens=[prefill_pb2.SampledToken(token_id=5)])}


def first(*tokens: int, **fields: Any) -> dict:
    sampled = [prefill_pb2.SampledToken(token_id=token) for token in tokens]
    return {"first": First(tokens=sampled, **fields)}


def chunk(pages: Any, generations: Any, last: bool = True) -> dict:
    return {"chunk": Chunk(groups=[Group(page_ids=pages, generations=generations)], last=last)}


SAID = {
    "a token outside the vocabulary": [first(2**32 - 1)],
    "no token": [first()],
    "two tokens": [first(5, 6)],
    "first tokens twice": [OWN, OWN],
    "cached tokens": [first(5, cached_tokens=2**64 - 1), {"failed": {"code": 10}}],
    "pages that are none": [OWN, chunk([2**32 - 1] * PAGES, [0] * PAGES)],
    "pages before the token": [chunk([10**9] * PAGES, [0] * PAGES), OWN],
    "too many pages": [OWN, chunk(range(3000), [0] * 3000)],
    "too few pages": [OWN, chunk([0], [0])],
    "too few generations": [OWN, chunk(range(PAGES), [0] * 3)],
    "pages of two groups": [OWN, {"chunk": Chunk(groups=[ALL, ALL], last=True)}],
    "wrong generations": [OWN, chunk(range(PAGES), [2**60] * PAGES)],
    "the end too early": [{"finished": {"stood": True}}],
    "a failure without words": [{"failed": {}}],
    "a code that is none": [{"failed": {"code": 999}}],
}


class Liar(prefill_pb2_grpc.PrefillServicer):
    """Says welcome in another node's name, and to every start what it was told to say."""

    def __init__(self, welcome: prefill_pb2.PrefillWelcome, said: list[dict]) -> None:
        self._welcome, self._said = welcome, said

    def Run(self, requests: Iterator[Any], context: Any) -> Iterator[prefill_pb2.PrefillResponse]:
        next(requests)
        yield prefill_pb2.PrefillResponse(events=[Event(welcome=self._welcome)])
        for request in requests:
            if request.WhichOneof("kind") == "start":
                events = [Event(attempt=request.start.attempt, **fields) for fields in self._said]
                yield prefill_pb2.PrefillResponse(events=events)


@pytest.fixture
def lie(demo: Deployment) -> Callable[[list[dict]], Any]:
    info = demo.prefill.info()
    welcome = prefill_pb2.PrefillWelcome(
        incarnation=3, layout=info.layout, endpoints=info.endpoints, lease_grace_ms=1000
    )

    @contextmanager
    def serve(said: list[dict]) -> Iterator[str]:
        server = grpc.server(ThreadPoolExecutor(2))
        prefill_pb2_grpc.add_PrefillServicer_to_server(Liar(welcome, said), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait(5)

    return serve


@pytest.mark.parametrize("case", SAID)
def test_the_decode_node_goes_on(demo: Deployment, lie, case: str):
    sampling = Sampling(temperature=0, max_tokens=4, ignore_eos=True)
    with lie(SAID[case]) as address, grpc.insecure_channel(demo.decode.address) as channel:
        stream, other = Decode(channel), Decode(channel, incarnation=8)
        other.start(1, sampling=Sampling(max_tokens=200, ignore_eos=True))
        where = f"{case} {next(numbers)}"
        stream.start(1, token_ids=PROMPT, sampling=sampling, prefill=[address], namespace=where)
        assert stream.ends(1) == {1: 4}
        assert other.ends(1) == {1: 200}, "somebody else's request has suffered"
        stream.leave()
        other.leave()
    load = demo.decode.load()
    assert load.cached_tokens < 2**32
    demo.assert_idle()


def test_a_prefill_node_that_says_nothing(demo: Deployment, lie):
    for said in ([], [{"welcome": {}}], [{}]):
        with lie(said) as address, grpc.insecure_channel(demo.decode.address) as channel:
            stream = Decode(channel)
            stream.start(1, token_ids=PROMPT, prefill=[address], namespace=f"{next(numbers)}", timeout_ms=500)
            error = stream.ends(1)[1]
            assert error.reason == "DEADLINE_EXCEEDED"
            stream.leave()
