"""The gateway's connections to nodes that compute embeddings."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from baton.gateway.embedding_client import EmbeddingClient, EmbeddingWorker


class Channel:
    """One that takes a while to close."""

    def __init__(self, address, *_):
        self.closed = 0

    def unary_unary(self, *_, **__): ...

    stream_stream = unary_stream = unary_unary

    async def close(self):
        await asyncio.sleep(0)
        self.closed += 1


async def test_several_calls_at_once_close_the_connections_to_nodes_that_are_gone():
    nodes = SimpleNamespace(prefill=["a", "b", "c", "d"], decode={})
    opened = []

    def dial(address):
        opened.append(Channel(address))
        return opened[-1]

    embedder = EmbeddingClient(None, nodes, None, dial)
    for address in ("a", "b", "c"):
        await embedder._stub(EmbeddingWorker("prefill", address))
    nodes.prefill = ["d"]
    await asyncio.gather(*(embedder._stub(EmbeddingWorker("prefill", "d")) for _ in range(3)))
    assert [channel.closed for channel in opened] == [1, 1, 1, 0]
    await embedder.close()
    assert [channel.closed for channel in opened] == [1, 1, 1, 1]
