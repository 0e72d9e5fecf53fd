"""The nodes of one role, from all sources that are configured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from baton.discovery import dns, etcd
from baton.discovery.etcd import Etcd
from baton.rpc.logs import get_logger
from baton.rpc.tasks import Tasks


@dataclass(frozen=True, slots=True)
class Change:
    """host:port of nodes, sorted."""

    joined: tuple[str, ...]
    left: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.joined or self.left)


@dataclass(slots=True)
class _Source:
    left_out: dict[str, float | None] = field(default_factory=dict)
    """Address -> since when the source's answers leave it out, in seconds of the caller's clock; None: the
    last one named it."""


class Members:
    """What several sources say together: a node is there while any of them names it.

    A source that leaves a node out has it for `hold` seconds more, unless the node itself said that it leaves
    (DNS answers may be incomplete for a moment, an entry in etcd may expire while its node works; and a node
    that is really gone takes no requests anyway).
    """

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}
        self._known: frozenset[str] = frozenset()

    @property
    def addresses(self) -> list[str]:
        return sorted(self._known)

    def heard(
        self,
        source: str,
        addresses: Iterable[str],
        now: float,
        hold: float = 0.0,
        leaving: Collection[str] = (),
    ) -> Change:
        """A source has named all nodes that it knows of, and those that said that they leave. A source that
        could not answer is not heard: what it said last stays, and the time of its silence is no part of a
        node's `hold`."""
        found = self._sources.setdefault(source, _Source())
        named = dict.fromkeys(addresses)
        since = {address: now if when is None else when for address, when in found.left_out.items()}
        held = {a: when for a, when in since.items() if now - when < hold and a not in leaving}
        found.left_out = held | named
        known = frozenset(address for each in self._sources.values() for address in each.left_out)
        before, self._known = self._known, known
        return Change(tuple(sorted(known - before)), tuple(sorted(before - known)))


LOOK_SECONDS = 3.0
"""How often it is looked whether a node that etcd leaves out has been held long enough."""

_log = get_logger()


class Finder:
    """`addresses`: "host:port" are nodes, "dns:host:port" are names of several. Nodes of the role that are
    registered in `etcd` are added. `changed` is called on the event loop, first by `start` for the list."""

    def __init__(
        self, role: str, addresses: Sequence[str], etcd: Etcd | None, changed: Callable[[Change], None]
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
