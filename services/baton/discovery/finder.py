"""The nodes of one role, from all sources that are configured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from baton.discovery import dns, etcd
from baton.discovery.etcd import Etcd
from baton.discovery.members import Change, Members
from baton.rpc.logs import get_logger
from baton.rpc.tasks import Tasks

LOOK_SECONDS = 3.0
"""How often it is looked whether a node that etcd leaves out has been held long enough."""

_log = get_logger()


class Finder:
    """`addresses`: "host:port" are nodes, "dns:host:port" are names of several. Nodes of the role that are
    registered in `etcd` are added. `changed` is called on the event loop, first by `start` for the list."""

    def __init__(
        self,
        role: str,
        addresses: Sequence[str],
        etcd: Etcd | None,
        changed: Callable[[Change], None],
    ) -> None:
        """Raises BatonError that names the field of an address that is wrong."""
        self._role = role
        self._nodes = [address for address in addresses if not address.startswith(dns.PREFIX)]
        names = [address for address in addresses if address.startswith(dns.PREFIX)]
        self._names = [dns.parse_name(name, role) for name in names]
        self._etcd = etcd
        self._changed = changed
        self._members = Members()
        self._in_etcd: list[str] = []
        self._tasks = Tasks()

    @property
    def addresses(self) -> list[str]:
        """host:port of the nodes that are known now, sorted."""
        return self._members.addresses

    @property
    def searches(self) -> list[str]:
        """Where nodes may still come from; for people."""
        endpoints = self._etcd.endpoints if self._etcd is not None else ()
        return [*map(str, self._names), *(f"etcd {endpoint}" for endpoint in endpoints)]

    def start(self) -> None:
        self._heard("list", self._nodes)
        for name in self._names:
            source = str(name)

            def heard(nodes: list[str], source: str = source) -> None:
                self._heard(source, nodes, dns.HOLD_SECONDS)

            self._tasks.spawn(dns.watch(name, heard), source)
        if self._etcd is not None:
            watching = etcd.watch(self._etcd, self._role, self._heard_etcd)
            self._tasks.spawn(watching, f"etcd {self._role}")
            self._tasks.spawn(self._look_again(), f"etcd {self._role}, again")

    def _heard_etcd(self, nodes: list[str], leaving: Collection[str]) -> None:
        self._in_etcd = nodes
        self._heard("etcd", nodes, etcd.HOLD_SECONDS, leaving)

    async def _look_again(self) -> None:
        """etcd speaks only when something changes."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._heard("etcd", self._in_etcd, etcd.HOLD_SECONDS)

    def _heard(self, source: str, nodes: list[str], hold: float = 0.0, leaving: Collection[str] = ()) -> None:
        change = self._members.heard(source, nodes, asyncio.get_running_loop().time(), hold, leaving)
        if change:
            if source != "list":
                _log.info(
                    "nodes changed", role=self._role, source=source, joined=change.joined, left=change.left
                )
            self._changed(change)

    async def close(self) -> None:
        await self._tasks.close()
