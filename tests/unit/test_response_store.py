"""The store of /v1/responses holds no more than it counts."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from baton.api.response_store import ResponseStore
from baton.v1 import tokenizer_pb2

MIB = 2**20


def memory() -> int:
    """Bytes. (`ru_maxrss` of a new process begins with its parent's.)"""
    (line,) = (
        each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmRSS")
    )
    return int(line.split()[1]) * 1024


def grown() -> tuple[int, int]:
    """Bytes that this process grew by while a store of 16 MiB was filled with conversations of many calls,
    which as objects take ten times as much; and the calls of the last one."""
    calls = [tokenizer_pb2.ToolCall(id=str(number), name="f") for number in range(5000)]
    store = ResponseStore(16 * MIB, 1000.0)
    before = memory()
    for number in range(500):
        assert store.put(str(number), b"{}", [tokenizer_pb2.ChatMessage(tool_calls=calls)], b"alice")
    after = memory()
    found = store.get("499", b"alice")
    assert found is not None and found.conversation is not None
    return after - before, len(found.conversation[0].tool_calls)


def test_it_holds_no_more_than_it_counts():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        size, calls = alone.submit(grown).result(60)
    assert calls == 5000 and size < 32 * MIB


def test_a_response_of_the_same_id_takes_the_place_of_the_first():
    """A request that another gateway, or this one, goes on with has the id that it had."""
    now = 0.0
    store = ResponseStore(20_000, 1000.0, lambda: now)
    assert store.put("other", b"{}", None, b"alice")
    for now in map(float, range(200)):
        assert store.put("same", str(now).encode(), None, b"alice")
    found = store.get("same", b"alice")
    assert found is not None and found.response == b"199.0"
    assert store.get("other", b"alice") is not None, "dropped, though there is room"
    now = 1100.0
    assert store.put("third", b"{}", None, b"alice")  # drops what has expired
    assert store.get("same", b"alice") is not None and store.get("other", b"alice") is None
