"""A client that leaves with many requests: what is said because of that, and how often."""

from __future__ import annotations

from gateway_rig import Stream, gateway, until
from scripted_decode import ScriptedDecode, endless

REQUESTS = 60


async def test_the_cancels_of_a_client_that_leaves_share_messages():
    async with ScriptedDecode(endless) as node, gateway(node) as rig:
        stream, other = Stream(rig), Stream(rig)
        for number in range(REQUESTS):
            await stream.start(str(number), tokens={"token_ids": [5, 6]}, sampling={"max_tokens": 200})
        await other.start("stays", tokens={"token_ids": [5, 6]}, sampling={"max_tokens": 199})
        await until(lambda: len(node.starts) == REQUESTS + 1, 30)
        stays = next(start.request for start in node.starts if start.sampling.max_tokens == 199)
        stream.call.cancel()
        await until(lambda: len(node.cancels) == REQUESTS, 30)
        assert node.cancelling_messages <= REQUESTS / 10 and stays not in node.cancels
        assert rig.node.gateway.load().requests == 1
        await other.cancel("stays")
        await other.until_end("stays")
        await rig.idle()
