"""The nodes of one role, from all sources that are configured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.discovery import address_file, dns, etcd
from baton.discovery.etcd import Etcd
from baton.rpc.logs import get_logger
from baton.rpc.tasks import Tasks


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """host:port of nodes, sorted."""

    joined: tuple[str, ...]
    left: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.joined or self.left)


@dataclass(slots=True)
class _Source:
    missing_since: dict[str, float | None] = field(default_factory=dict)
    """Address -> the time from which the source's answers leave it out; None: the last answer named it."""


class Members:
    """The nodes that any of several sources names.

    A node that a source leaves out is kept for `hold` seconds, unless it has announced that it leaves: DNS
    answers may be incomplete for a moment, and a key in etcd may expire while its node works. A node that is
    really gone gets no requests anyway.
    """

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}
        self._known: frozenset[str] = frozenset()

    @property
    def addresses(self) -> list[str]:
        return sorted(self._known)

    def update(
        self,
        source: str,
        addresses: Iterable[str],
        now: float,
        hold: float = 0.0,
        leaving: Collection[str] = (),
    ) -> MembershipChange:
        """Takes a source's answer: all its nodes, and those that leave. now: seconds. If a source cannot
        answer, its last answer stays."""
        found = self._sources.setdefault(source, _Source())
        named = dict.fromkeys(addresses)
        since = {address: now if when is None else when for address, when in found.missing_since.items()}
        held = {a: when for a, when in since.items() if now - when < hold and a not in leaving}
        found.missing_since = held | named
        known = frozenset(address for each in self._sources.values() for address in each.missing_since)
        before, self._known = self._known, known
        return MembershipChange(tuple(sorted(known - before)), tuple(sorted(before - known)))


EXPIRE_SECONDS = 3.0
"""Interval at which nodes that etcd leaves out are checked against their hold time."""

_log = get_logger()


class Finder:
    """addresses: "host:port" is a node, "dns:host:port" a name of several, "file:/path" a file of them. Nodes
    of the role in `etcd` are added. `changed` is called on the event loop, first by `start` with the static
    list."""

    def __init__(
        self,
        role: str,
        addresses: Sequence[str],
        etcd: Etcd | None,
        changed: Callable[[MembershipChange], None],
    ) -> None:
        """Raises BatonError that names the field of an address that is wrong."""
        self._role = role
        elsewhere = (dns.PREFIX, address_file.PREFIX)
        self._nodes = [address for address in addresses if not address.startswith(elsewhere)]
        self._names = [dns.parse_name(each, role) for each in addresses if each.startswith(dns.PREFIX)]
        files = [each for each in addresses if each.startswith(address_file.PREFIX)]
        self._files = [address_file.parse_path(each, role) for each in files]
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
        """The sources of further nodes, as text."""
        endpoints = self._etcd.endpoints if self._etcd is not None else ()
        files = (f"{address_file.PREFIX}{path}" for path in self._files)
        return [*map(str, self._names), *files, *(f"etcd {endpoint}" for endpoint in endpoints)]

    def start(self) -> None:
        self._update("list", self._nodes)
        for name in self._names:
            source = str(name)

            def resolved(nodes: list[str], source: str = source) -> None:
                self._update(source, nodes, dns.HOLD_SECONDS)

            self._tasks.spawn(dns.watch(name, resolved), source)
        for path in self._files:
            source = f"{address_file.PREFIX}{path}"
            self._tasks.spawn(address_file.watch(path, partial(self._update, source)), source)
        if self._etcd is not None:
            watching = etcd.watch(self._etcd, self._role, self._update_etcd)
            self._tasks.spawn(watching, f"etcd {self._role}")
            self._tasks.spawn(self._expire(), f"etcd {self._role}, expiry")

    def _update_etcd(self, nodes: list[str], leaving: Collection[str]) -> None:
        self._in_etcd = nodes
        self._update("etcd", nodes, etcd.HOLD_SECONDS, leaving)

    async def _expire(self) -> None:
        """etcd sends nothing unless something changes."""
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            self._update("etcd", self._in_etcd, etcd.HOLD_SECONDS)

    def _update(
        self, source: str, nodes: list[str], hold: float = 0.0, leaving: Collection[str] = ()
    ) -> None:
        change = self._members.update(source, nodes, asyncio.get_running_loop().time(), hold, leaving)
        if change:
            if source != "list":
                _log.info(
                    "nodes changed",
                    node_role=self._role,
                    source=source,
                    joined=change.joined,
                    left=change.left,
                )
            self._changed(change)

    async def close(self) -> None:
        await self._tasks.close()
