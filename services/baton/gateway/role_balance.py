"""Decides when a worker should change its role, by how long requests wait. Pure; the clock is passed in.

Both queues are measured in seconds: prompt tokens that wait anywhere, by what the prefill nodes compute in a
second; and the expected wait for a row at a decode node, as far as its rows make tokens (others wait for
prompts). Where one of them is long and the other one short, a node changes sides, within `RoleBounds`.

Several gateways may decide at the same time without knowing of each other: they choose the same node, which
takes one change at a time, and each begins to measure anew when it sees a change. After a change that failed
for one of them alone they may choose different ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baton.gateway.routing import DEFAULT_PROMPT_RATE

LOOK_GAP = 3.0
"""What was not looked at for this time is not known to have lasted."""
MOST_PAUSES = 16
"""The longest pause between changes that undo each other, in usual ones."""
FULL = 0.8
"""Part of decode nodes' pools that may be in use once there is one less of them."""
FORGOTTEN = 3
"""So many pauses after a change the next one undoes nothing."""
OTHER = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True, slots=True)
class RoleBounds:
    """Within which roles change. Times in seconds."""

    least_prefill: int = 1
    least_decode: int = 1
    lasting: float = 10.0
    """How long it must have been so."""
    pause: float = 60.0
    """From any change that is seen to the next one."""
    busy: float = 1.0
    """A queue is long from this time on ..."""
    calm: float = 0.25
    """... and short up to this one."""

    def least(self, role: str) -> int:
        return self.least_prefill if role == "prefill" else self.least_decode


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """A worker that serves, as it reported lately."""

    address: str
    role: str
    queued_tokens: int = 0
    """Prompt tokens still to compute there."""
    prompt_rate: float = 0.0
    """Prompt tokens that it computes in a second; 0: not known yet."""
    wait: float = 0.0
    """Seconds that a request would wait for a row (decode)."""
    running: int = 0
    """Rows that make tokens (decode)."""
    rows: int = 0
    """Rows in use; the others wait for their prompts (decode)."""
    context_tokens: int = 0
    """Context tokens of these rows together (decode)."""
    pool_tokens: int = 0
    """Tokens that its pool has pages for."""
    able: bool = True
    """Whether it may have the other role."""


@dataclass(frozen=True, slots=True)
class RoleChange:
    address: str
    to: str
    why: str
    """For people."""


@dataclass(frozen=True, slots=True)
class RoleQueues:
    """Seconds that prompts wait, and requests for a row."""

    prompts: float = 0.0
    rows: float = 0.0


def measure(nodes: Sequence[RoleLoad]) -> RoleQueues:
    """0 where nothing waits, or there are no nodes of the role."""
    prefill = [node for node in nodes if node.role == "prefill"]
    decode = [node for node in nodes if node.role == "decode"]
    rate = sum(node.prompt_rate or DEFAULT_PROMPT_RATE for node in prefill)
    prompts = sum(node.queued_tokens for node in nodes) / rate if rate else 0.0
    waits = [node.wait * node.running / max(1, node.rows) for node in decode]
    return RoleQueues(prompts, sum(waits) / len(waits) if waits else 0.0)


class RoleBalance:
    def __init__(self, bounds: RoleBounds) -> None:
        self.queues = RoleQueues()
        """What was measured last."""
        self._bounds = bounds
        self._roles: dict[str, str] = {}
        """By address, when they were last seen."""
        self._lacking_role = ""
        """The role that lacks nodes; empty: neither does."""
        self._since = 0.0
        self._looked = 0.0
        self._rests_until = 0.0
        self._pauses = 1
        self._changed = -math.inf
        """When a node was last seen to get another role."""
        self._last = ""
        """The role that it got then."""
        self._failures: dict[str, tuple[int, float]] = {}
        """By node: changes of its role that failed, since it changed; and until when it is left alone."""

    def look(self, now: float, nodes: Sequence[RoleLoad]) -> RoleChange | None:
        """The change to make now, if any. To be called about once a second, with each node once. Whether the
        change succeeds is seen in later looks; of one that failed `failed` is to be told."""
        self._notice(now, nodes)
        self.queues = measure(nodes)
        lacking, why = self._lacking(nodes)
        if lacking != self._lacking_role or now - self._looked > LOOK_GAP:
            self._lacking_role, self._since = lacking, now
        self._looked = now
        if not lacking or now - self._since < self._bounds.lasting:
            return None
        missing = self._count(nodes, lacking) < self._bounds.least(lacking)
        if now < self._rests_until and not missing:
            return None
        others = [node for node in nodes if node.role != lacking]
        resting = {address for address, (_, until) in self._failures.items() if now < until}
        address = _choose(others, resting) or (_choose(others) if missing else "")
        if not address:
            return None
        self._rests_until = now + self._pauses * self._bounds.pause
        self._since = now
        return RoleChange(address, lacking, f"{why}, for {self._bounds.lasting:g} s")

    def failed(self, now: float, address: str) -> None:
        """A change was refused or given up, perhaps after the node had handed its requests back. It is left
        alone for a time that doubles each time, unless a role has fewer nodes than it must have."""
        failures = self._failures.get(address, (0, 0.0))[0] + 1
        pauses = self._pauses * min(2**failures, MOST_PAUSES)
        self._failures[address] = failures, now + pauses * self._bounds.pause

    def _notice(self, now: float, nodes: Sequence[RoleLoad]) -> None:
        """Sees changes of role, whoever made them. One that undoes the last doubles the pause."""
        changed = [n for n in nodes if self._roles.get(n.address, n.role) != n.role]
        self._roles |= {node.address: node.role for node in nodes}
        if not changed:
            return
        for node in changed:
            self._failures.pop(node.address, None)
        role = changed[0].role
        if now - self._changed > FORGOTTEN * self._pauses * self._bounds.pause:
            self._pauses = 1
        elif role != self._last:
            self._pauses = min(2 * self._pauses, MOST_PAUSES)
        self._changed, self._last, self._lacking_role = now, role, ""
        self._rests_until = now + self._pauses * self._bounds.pause

    def _lacking(self, nodes: Sequence[RoleLoad]) -> tuple[str, str]:
        """The role that lacks nodes and may get one, and why."""
        bounds, prompts, rows = self._bounds, self.queues.prompts, self.queues.rows
        for role, other in OTHER.items():
            if not self._spare(nodes, other):
                continue
            if self._count(nodes, role) < bounds.least(role):
                return role, f"fewer than {bounds.least(role)} {role} nodes serve"
            queue, others = (prompts, rows) if role == "prefill" else (rows, prompts)
            if queue >= bounds.busy and others <= bounds.calm:
                return role, f"prompts wait {prompts:.1f} s and requests for a row {rows:.1f} s"
        return "", ""

    def _spare(self, nodes: Sequence[RoleLoad], role: str) -> bool:
        """Whether one node less of the role is enough."""
        return self._count(nodes, role) > self._bounds.least(role)

    def _count(self, nodes: Sequence[RoleLoad], role: str) -> int:
        return sum(node.role == role for node in nodes)


def _choose(nodes: Sequence[RoleLoad], resting: Collection[str] = ()) -> str:
    """The last able one by its address, of nodes of one role, so that all who decide choose the same; none
    (empty) if what all decode nodes hold would fill those that are left. resting: are not chosen."""
    able = [node for node in nodes if node.able and node.address not in resting]
    if not able:
        return ""
    chosen = max(able, key=lambda node: node.address)
    held = sum(node.context_tokens for node in nodes)
    room = FULL * sum(node.pool_tokens for node in nodes if node is not chosen)
    return "" if chosen.role == "decode" and held > room else chosen.address
