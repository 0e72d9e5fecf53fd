"""The prefill nodes that a decode node hands prompts off to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from baton.config import DecodeConfig
from baton.rpc.logs import get_logger
from baton.v1 import node_pb2
from baton.worker.peers import FORGET_SECONDS, PagePeers

if TYPE_CHECKING:
    from baton.worker.decode.shell import DecodeShell

_log = get_logger()


class PrefillPeers(PagePeers):
    """Lives on the event loop. Those of the configuration are never forgotten."""

    def __init__(self, node: DecodeShell, config: DecodeConfig) -> None:
        super().__init__(
            node,
            node.make_link,
            lambda core: core,
            configured=config.prefill,
            request_seconds=config.request_seconds,
            silence=config.handoff_seconds,
        )

    def lost(self) -> list[str]:
        """Nodes that cannot be used, with the reason: configured ones, and those named within the last
        minute, but for those that are decode nodes now."""
        recent = self._node.clock() - FORGET_SECONDS
        return [
            f"{address} ({peer.trouble})"
            for address, peer in self._peers.items()
            if not peer.usable.is_set()
            and (address in self._configured or peer.named >= recent)
            and not peer.other_role
        ]

    def describe(self) -> list[node_pb2.Peer]:
        """For NodeInfo."""
        return [
            node_pb2.Peer(
                role="prefill",
                address=peer.address,
                connected=peer.usable.is_set(),
                incarnation=peer.incarnation if peer.usable.is_set() else 0,
            )
            for peer in self._peers.values()
        ]

    async def wait_connected(self, seconds: float) -> None:
        """Returns when every peer has been reached or the time is over; a missing peer is no error."""
        waits = [peer.usable.wait() for peer in self._peers.values()]
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*waits)
        except TimeoutError:
            missing = [address for address, peer in self._peers.items() if not peer.usable.is_set()]
            _log.warning("prefill nodes not reached; their prompts go elsewhere", missing=missing)
