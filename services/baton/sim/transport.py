"""Simulated pulls: real bytes, half a page at a time, with anything in between.

Shared: a thread of the receiver waits for the owner's step and copies out of the owner's memory, which
outlives the owner, one pull at a time, then the owner's generations are read. Asked: the process that
answers at the address now reads each piece and sends it. Either way the end is reported when no copy
is running any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from baton.kvcache.page_allocator import PageState
from baton.sim.model import SimPool
from baton.sim.tasks import Future
from baton.sim.world import Violation
from baton.transport.base import TransportError, ignore_time

if TYPE_CHECKING:
    from baton.sim.worker import Worker

PAUSE_SECONDS = 2.0
"""A pull by asking fails after so long without a byte."""
_PIECES = 2
_LATE = 8
"""Some pulls begin so many times later than others."""
_LONGEST_DELAY = 2.0
SLOWEST_PACE = 0.2
"""Seconds for half a page that a scenario draws at most."""
LATEST_FIRST_LOOK_SECONDS = _LATE * _LONGEST_DELAY * SLOWEST_PACE
"""Until a pull looks for the first time whether it may begin, or has been stopped."""


class SimReceiver:
    """An opened pool: transport.base.Receiver."""

    kind = "sim"

    def __init__(self, node: Worker[Any], address: str, pool: SimPool | None) -> None:
        """`pool`: shared; None: pages are asked for."""
        self._node = node
        self._address = address
        self._pool = pool
        self.sees_steps = pool is not None and node.machine.sees_steps
        self.lane: list[SimPull] = []
        """Pulls that have not ended."""

    async def pull(
        self, pairs: Sequence[tuple[int, int]], step: int = 0, copied: Callable[[float], None] = ignore_time
    ) -> None:
        node = self._node
        host: Any = node.network.host(self._address)
        server = host if hasattr(host, "pool") and self._pool is None else None
        if self._pool is None and server is None:
            raise TransportError(f"nobody answers at {self._address}")
        pull = SimPull(node, pairs, step, self.lane, self._pool, server, copied)
        try:
            await pull.ended
        except asyncio.CancelledError:
            pull.close("the pull was interrupted")
            await pull.ended
            raise
        if pull.error is not None:
            raise TransportError(pull.error)

    def generations(self, pages: Sequence[int]) -> list[int] | None:
        return [int(self._pool.generations[page]) for page in pages] if self._pool is not None else None

    async def close(self) -> None:
        for pull in self.lane:
            pull.close("the receiver is closed")


class SimPull:
    """A running pull."""

    def __init__(
        self,
        node: Worker[Any],
        pairs: Sequence[tuple[int, int]],
        step: int,
        lane: list[SimPull],
        pool: SimPool | None,
        server: Worker[Any] | None,
        copied: Callable[[float], None],
    ) -> None:
        """Exactly one of `pool` (shared) and `server` (asked). `step`: of the owner's, to wait for. `lane`:
        the pulls of the same receiver that have not ended."""
        self._node = node
        self._world = node.world
        self._pairs = pairs
        self._after = step
        self._lane = lane
        lane.append(self)
        node.pulls.append(self)
        self._pool = pool
        self._server = server
        self._copied = copied
        self._fail_after, node.pull_fails_after = node.pull_fails_after, None
        self.ended = Future()
        """Done when no copy is running any more."""
        self.error: str | None = None
        self._pieces = [(s, t, part) for s, t in pairs for part in range(_PIECES)]
        self._next = 0
        self._begun = False
        self._since = self._world.now
        self._interrupted = ""
        self._waiting = False
        self._rng = self._world.rng(f"pull {node.name}")
        self._pace = node.machine.pull_pace
        self.targets = {target for _, target in pairs}
        late = _LATE if self._rng.random() < 0.3 else 1
        self._world.at(late * self._delay(), node.copy_thread, self._begin)

    @property
    def waits(self) -> bool:
        """Whether it still waits for its step."""
        return not self._begun

    def close(self, reason: str) -> None:
        """The peer is lost, or nobody wants the pages. A copy out of shared memory goes on; what is asked for
        or waits ends early."""
        if self._pool is None or not self._begun:
            self._interrupted = reason

    def _delay(self) -> float:
        return self._pace * self._rng.uniform(0.1, _LONGEST_DELAY)

    def _begin(self) -> None:
        if self._pool is not None and not self._interrupted and not self._ready(self._pool):
            self._world.at(self._delay(), self._node.copy_thread, self._begin)
            return
        self._begun, self._since = True, self._world.now
        pages = self._pool.num_pages if self._pool is not None else 0
        if self._server is not None:
            pages = self._server.pool.num_pages
        wrong = [source for source, _ in self._pairs if not 0 <= source < pages]
        if wrong:
            self._end(f"page {wrong[0]} is not one of the peer's {pages}")
        else:
            self._step()

    def _ready(self, pool: SimPool) -> bool:
        """Follows transport.pull_thread: the earliest step's pull comes first."""
        if any(pull._begun for pull in self._lane):
            return False
        return pool.retired >= self._after and self is min(self._lane, key=lambda pull: pull._after)

    def _step(self) -> None:
        if self._interrupted:
            self._end(self._interrupted)
        elif self._fail_after is not None and self._next >= self._fail_after:
            self._end("the transport failed")
        elif self._next == len(self._pieces):
            self._end(None)
        elif self._pool is not None:
            self._copy(self._read(self._pool))
        else:
            self._ask()

    def _ask(self) -> None:
        """One piece from the server, as it is at the moment when the server reads it."""
        server, node = self._server, self._node
        assert server is not None
        network = node.network
        if not server.alive:
            self._end("the page stream broke")
            return
        if network.is_cut(node.name, server.name):
            self._world.at(PAUSE_SECONDS, node.loop, lambda: self._end(f"no byte for {PAUSE_SECONDS:g} s"))
            return
        to, back = network.latency(node.name, server.name), network.latency(server.name, node.name)

        def arrive(data: bytes) -> None:
            if self._interrupted:
                self._end(self._interrupted)
            else:
                self._copy(data)

        def read() -> None:
            data = self._read(server.pool)
            self._world.at(back, node.loop, lambda: arrive(data))
            self._waiting = False

        self._waiting = True
        mark = self._next

        def give_up() -> None:
            if self._next == mark and self._waiting:
                self._waiting = False
                self._end(f"no byte for {PAUSE_SECONDS:g} s")

        self._world.at(to, server.loop, lambda: read() if self._waiting else None)
        self._world.at(PAUSE_SECONDS, node.loop, give_up)

    def _read(self, pool: SimPool) -> bytes:
        source, _, part = self._pieces[self._next]
        size = pool.page_bytes // _PIECES
        return pool.read(source, part * size, size)

    def _copy(self, data: bytes) -> None:
        node = self._node
        _, target, part = self._pieces[self._next]
        state = node.allocator.state(target)
        if state not in (PageState.OWNED, PageState.QUARANTINED):
            raise Violation(f"writer: a pull of {node.who} writes page {target}, which is {state.name}")
        node.pool.write(target, part * len(data), data)
        self._next += 1
        self._world.at(self._delay(), node.copy_thread, self._step)

    def _end(self, error: str | None) -> None:
        self._lane.remove(self)
        self._node.pulls.remove(self)
        self.error = error
        if error is None:
            self._copied(self._world.now - self._since)
        if self._world.traced:
            self._world.note(self._node.who, f"pulled {self._pairs} {error or 'well'}")
        self.ended.done()
