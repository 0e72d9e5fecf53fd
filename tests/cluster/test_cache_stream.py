"""What workers tell of their caches, over real processes: the stream, how it resumes, and what a gateway
makes of it."""

from __future__ import annotations

import random
import time
import urllib.request
from collections.abc import Callable, Iterator

import grpc
import pytest
from deployment import Deployment
from process import Process
from worker_streams import Decode

from baton.client import Client
from baton.gateway.cache_view import CacheView, PromptPages
from baton.rpc.errors import from_rpc_error
from baton.v1 import cache_pb2, cache_pb2_grpc

PAGE = 16
SECONDS = 30.0


class Watch:
    """A watcher of one node, and what it has made of the updates."""

    def __init__(self, node: Process, view: CacheView | None = None) -> None:
        self.view = CacheView() if view is None else view
        self.updates: list[cache_pb2.CacheUpdate] = []
        self._channel = grpc.insecure_channel(node.address, options=[("grpc.use_local_subchannel_pool", 1)])
        request = cache_pb2.WatchRequest(incarnation=self.view.incarnation, sequence=self.view.sequence)
        self._call = cache_pb2_grpc.CacheStub(self._channel).Watch(request, timeout=120)

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.updates or not true():
            assert time.monotonic() < deadline, "waited in vain"
            update = next(self._call)
            self.updates.append(update)
            self.view.apply(update, 0.0)

    def holds(self, tokens: list[int], namespace: str = "") -> int:
        """Of a prompt that goes on with one more token."""
        return self.view.cached(PromptPages([*tokens, 1], namespace))[0]

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._call.cancel()
        self._channel.close()


def prompt(seed: int, length: int = 10 * PAGE) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 4000) for _ in range(length)]


def ask(client: Client, tokens: list[int], count: int = 4, **options):
    return client.generate(token_ids=tokens, max_tokens=count, temperature=0, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def small(tmp_path_factory, deployments) -> Iterator[Deployment]:
    """Two of each, with pools of 64 pages."""
    folder = tmp_path_factory.mktemp("caches")
    worker = ("--kv-tokens", str(64 * PAGE), "--context-length", "512")
    with Deployment.split(folder, "demo", prefill=2, decode=2, worker=worker) as deployment:
        deployments.append(deployment)
        yield deployment
        for process in deployment.processes:
            assert "Traceback" not in process.log.read_text(), process.log


@pytest.fixture
def node(small: Deployment) -> Process:
    return small.decode


@pytest.fixture
def direct(node: Process) -> Iterator[Callable[..., None]]:
    """Has the decode node itself compute a prompt."""
    with grpc.insecure_channel(node.address) as channel:
        decode = Decode(channel)
        numbers = iter(range(1, 1000))

        def compute(tokens: list[int], namespace: str = "") -> None:
            number = next(numbers)
            decode.start(number, token_ids=tokens, namespace=namespace)
            assert decode.ends(number) == {number: 4}

        yield compute


def test_a_watcher_follows_what_a_tree_holds(node, direct):
    first, second = prompt(1), prompt(2)
    direct(first)
    with Watch(node) as watch:
        watch.until(lambda: watch.holds(first) == len(first))
        assert watch.updates[0].snapshot and watch.updates[0].incarnation == node.incarnation
        assert watch.updates[0].page_size == PAGE
        direct(second, "tenant")
        watch.until(lambda: watch.holds(second, "tenant") == len(second))
        assert watch.holds(second) == 0 and watch.holds(first) == len(first)
        assert sum(update.snapshot for update in watch.updates) == 1
        load = watch.updates[-1].load
        assert load.pages.total == 64 and load.available_pages <= 64 and load.prompt_tokens


def test_pages_that_are_evicted_are_told(node, direct):
    first = prompt(3)
    direct(first)
    with Watch(node) as watch:
        watch.until(lambda: watch.holds(first) == len(first))
        for seed in range(100, 108):
            direct(prompt(seed))
        watch.until(lambda: watch.holds(first) == 0 and watch.holds(prompt(107)) == 10 * PAGE)
        assert any(update.removed for update in watch.updates)
        assert len(watch.view) <= 64


def test_one_that_comes_back_is_told_only_what_it_has_missed(node, direct):
    view = CacheView()
    with Watch(node, view) as watch:
        watch.until(lambda: view.page_size == PAGE)
    missed = prompt(4)
    direct(missed)
    with Watch(node, view) as watch:
        watch.until(lambda: watch.holds(missed) == len(missed))
        assert not any(update.snapshot for update in watch.updates)
        known = set(view._held)
    with Watch(node) as fresh:
        fresh.until(lambda: fresh.view.sequence == view.sequence)
        assert fresh.view._held == known


@pytest.mark.parametrize("behind", ["too far", "another life", "the future"])
def test_one_that_cannot_resume_gets_a_snapshot(node, direct, behind):
    direct(prompt(5))
    view = CacheView()
    with Watch(node, view) as watch:
        watch.until(lambda: watch.holds(prompt(5)) > 0)
    known = set(view._held)
    if behind == "another life":
        view.incarnation += 1
    else:
        view.sequence = 10**12 if behind == "the future" else 0
    view._held = {1, 2, 3}
    with Watch(node, view) as watch:
        watch.until(lambda: True)
        assert watch.updates[0].snapshot and view._held == known


def test_an_idle_node_tells_its_load_all_the_same(node):
    with Watch(node) as watch:
        watch.until(lambda: len(watch.updates) >= 4)
        assert all(update.HasField("load") for update in watch.updates)


def test_what_is_no_request_is_refused(node):
    with grpc.insecure_channel(node.address) as channel:
        answers = channel.unary_stream("/baton.v1.Cache/Watch")(b"\xff\xff", timeout=10)
        with pytest.raises(grpc.RpcError) as refused:
            next(answers)
    assert from_rpc_error(refused.value).reason == "MALFORMED_MESSAGE"


def metric(deployment: Deployment, name: str) -> float:
    with urllib.request.urlopen(f"http://{deployment.gateway.http}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def settle() -> None:
    """Workers tell of a change within 50 ms; a busy machine takes longer."""
    time.sleep(1.0)


def test_a_second_turn_goes_where_the_first_was_and_after_a_restart_anywhere(small):
    client = small.client()
    found = metric(small, 'baton_routing_cached_tokens_total{kind="found",')
    expected = metric(small, 'baton_routing_cached_tokens_total{kind="expected",')
    for seed in range(20, 26):
        said = prompt(seed)
        nodes, last = set(), 0
        for turn in range(3):
            answer = ask(client, said)
            nodes.add((answer.stats.decode_address, answer.stats.prefill_address))
            # All full pages of the last prompt were found, at the node that had computed it.
            assert answer.usage.cached_tokens >= last // PAGE * PAGE
            last = len(said)
            said = [*said, *answer.token_ids, *prompt(1000 * seed + turn, 3 * PAGE)]
            settle()
        assert len(nodes) == 1
    found = metric(small, 'baton_routing_cached_tokens_total{kind="found",') - found
    expected = metric(small, 'baton_routing_cached_tokens_total{kind="expected",') - expected
    assert found > 0 and expected == found

    # The node that has the last conversation dies. Whatever the gateway believes, it is answered.
    address = next(iter(nodes))[1]
    holder = next(process for process in small.of("prefill") if process.address == address)
    holder.kill()
    holder.start()
    holder.wait_ready()
    settle()
    assert ask(client, said).usage.output_tokens == 4
