"""decode.peers: addresses that callers name make room for others once they are forgotten."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baton.config import DecodeConfig
from baton.decode import peers as module
from baton.decode.peers import FORGET_SECONDS, PrefillPeers
from baton.rpc.channel import open_channel
from baton.rpc.errors import BatonError
from baton.rpc.tasks import Tasks


async def test_forgotten_addresses_make_room(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(module, "MAX_PEERS", 4)
    node = SimpleNamespace(
        cluster=SimpleNamespace(dial=open_channel),
        tasks=Tasks(),
        steps=SimpleNamespace(call=lambda function: None),
    )
    peers = PrefillPeers(node, DecodeConfig(prefill=("127.0.0.1:1",), request_seconds=30.0))
    peers.connect("127.0.0.1:1")
    for number in range(3):
        peers.connect(f"127.0.0.2:{number + 1}")
    with pytest.raises(BatonError, match="at most 4 prefill nodes"):
        peers.check_room(["127.0.0.3:1"])
    now += 30.0 + FORGET_SECONDS + 1.0
    peers.check_room(["127.0.0.3:1"])
    peers.connect("127.0.0.3:1")
    assert {peer.address for peer in peers.describe()} == {"127.0.0.1:1", "127.0.0.3:1"}
    await peers.close()
    await node.tasks.close()
