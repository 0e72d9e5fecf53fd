"""Node.Watch: each process's state as it changes, and the map of its pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import grpc
import pytest
from deployment import Deployment
from process import Process
from worker_streams import Prefill, attempt

from baton.rpc.errors import from_rpc_error
from baton.v1 import node_pb2, node_pb2_grpc, prefill_pb2

USES = ("free", "cached", "owned", "leased", "pulling", "quarantined")


def watch(process: Process, seconds: float = 60.0, **request: int) -> Iterator[node_pb2.NodeState]:
    with grpc.insecure_channel(process.address) as channel:
        yield from node_pb2_grpc.NodeStub(channel).Watch(
            node_pb2.WatchNodeRequest(**request), timeout=seconds
        )


def counts(pages: node_pb2.PageMap) -> Counter[str]:
    """Pages by use; they cover the pool."""
    found: Counter[str] = Counter()
    for run in pages.runs:
        found.update({use: run.cells * getattr(run, use) for use in USES})
    assert found.total() == pages.total
    return +found


def test_the_first_message_says_who_it_is(demo):
    for process in demo.processes:
        state = next(watch(process, max_cells=100))
        assert state.info.role == process.role and state.info.incarnation == process.incarnation
        assert state.HasField("pages") == (process.role in ("prefill", "decode"))


def test_a_map_agrees_with_the_counts_and_is_sent_when_it_changes(demo):
    for process in (demo.prefill, demo.decode):
        states = watch(process, interval_ms=100, max_cells=64)
        pages = next(states).pages
        assert sum(run.cells for run in pages.runs) <= 64 < pages.total
        assert not next(states).HasField("pages"), "nothing has changed"
        demo.client().generate(token_ids=range(40, 340), max_tokens=4, namespace=process.role)
        demo.assert_idle()
        load = process.load()
        expected = +Counter(free=load.pages.free, cached=load.pages.cached)
        # The map of a moment before may come first.
        next(state for state in states if state.HasField("pages") and counts(state.pages) == expected)


def test_pages_on_lease_are_seen(demo):
    """A prompt that nobody pulls, and nobody releases."""
    states = watch(demo.prefill, interval_ms=100, max_cells=4096)
    with grpc.insecure_channel(demo.prefill.address) as channel:
        hello = prefill_pb2.PrefillHello(incarnation=99, layout=demo.prefill.info().layout)
        stream = Prefill(channel, hello)
        stream.start(attempt(), token_ids=[*range(7, 7 + 100)], keep_pages=True)
        stream.until("first")
        assert next(leased for leased in leases(states) if leased) == -(-100 // 16)
        stream.leave()
    assert next(leased for leased in leases(states) if not leased) == 0


def leases(states: Iterator[node_pb2.NodeState]) -> Iterator[int]:
    return (counts(state.pages)["leased"] for state in states if state.HasField("pages"))


def test_what_cannot_be_asked_for_is_named(demo):
    for field, value in (("interval_ms", 99), ("interval_ms", 10_001), ("max_cells", 65_537)):
        with pytest.raises(grpc.RpcError) as refused:
            next(watch(demo.decode, **{field: value}))
        assert from_rpc_error(refused.value).field == field


def test_a_stop_ends_the_call(tmp_path, deployments):
    with Deployment.split(tmp_path, "demo", prefill=0) as deployment:
        deployments.append(deployment)
        states = watch(deployment.decode)
        next(states)
        assert deployment.decode.stop() == 0
        with pytest.raises(grpc.RpcError) as ended:
            list(states)
        assert from_rpc_error(ended.value).reason == "STOPPING"
