"""Keeps the gateway's nodes as its configuration, DNS and etcd tell of them."""

from __future__ import annotations

import asyncio
from functools import partial

from baton.config import GatewayConfig
from baton.discovery.etcd import Etcd
from baton.discovery.finder import Finder
from baton.discovery.members import Change
from baton.gateway.nodes import ROLES, Nodes


class Search:
    """Used on one event loop."""

    def __init__(self, config: GatewayConfig, nodes: Nodes) -> None:
        """Raises BatonError for an address that is none, and for files for etcd that cannot be used."""
        self._nodes = nodes
        etcd = Etcd.load(config)
        self._finders = [
            Finder(role, _addresses(config, role), etcd, partial(self._changed, role)) for role in ROLES
        ]

    def start(self) -> None:
        for finder in self._finders:
            finder.start()

    @property
    def places(self) -> list[str]:
        """Where nodes may still come from, each once; for people."""
        return list(dict.fromkeys(place for finder in self._finders for place in finder.searches))

    def _changed(self, role: str, change: Change) -> None:
        for address in change.left:
            self._nodes.remove(role, address)
        for address in change.joined:
            self._nodes.add(role, address)

    async def close(self) -> None:
        await asyncio.gather(*(finder.close() for finder in self._finders))


def _addresses(config: GatewayConfig, role: str) -> tuple[str, ...]:
    """As configured; the defaults are for one machine without etcd."""
    given: tuple[str, ...] = getattr(config, role)
    return () if config.etcd and given == getattr(GatewayConfig(), role) else given
