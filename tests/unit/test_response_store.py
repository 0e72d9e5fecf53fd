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
