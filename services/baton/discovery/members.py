"""The nodes of one role as their sources tell of them: sets and their differences. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field


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


def apply_events(nodes: Mapping[str, str], events: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """The nodes (key -> address) after events, in order: a key with its address; None when it is gone, or ""
    when its node leaves."""
    after = dict(nodes)
    for key, address in events:
        if not address:
            after.pop(key, None)
        else:
            after[key] = address
    return after
