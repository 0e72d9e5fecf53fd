"""The simulated network: streams that delay, break, and stop while two processes are partitioned.

Messages of one stream keep their order; those of different streams do not. A stream ends in order (messages
under way are delivered first) or abruptly (they are lost). Each end learns of it separately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from baton.rpc.errors import BatonError, unavailable
from baton.sim.page_disk import SimDisk
from baton.sim.world import Actor, World

KEEPALIVE_SECONDS = (1.5, 5.0)
"""After how long a silent peer's stream is given up; drawn for each end. Shorter than gRPC's real 15 s, as
all times here are, so that a run needs fewer turns."""
CONNECT_SECONDS = 4.0
LONGEST_LATENCY = 2.0
FIRST_BACKOFF, LAST_BACKOFF = 0.05, 2.0


class Host(Protocol):
    """A process, as the network knows it."""

    name: str
    role: str
    loop: Actor

    def accept(self, endpoint: Endpoint) -> None:
        """A peer has connected; its first message will follow."""


@dataclass(frozen=True, slots=True)
class _End:
    reason: str


class Endpoint:
    """One end of a stream."""

    def __init__(self, network: Network, owner: Host, peer_name: str) -> None:
        self.owner = owner
        self.peer_name = peer_name
        self.open = True
        self.method = ""
        """Which of the server's methods is called; empty: the role's own."""
        self.on_message: Callable[[Any], object] = lambda message: None
        self.on_end: Callable[[str], object] = lambda reason: None
        self.peer: Endpoint | None = None
        self._network = network
        self._last_due = 0.0
        self._incoming: deque[Any] = deque()
        """On the way here. An arrival takes the first, whichever arrival it is: so the order is kept."""
        self._held = 0

    def send(self, message: Any) -> bool:
        """Returns False if the stream has ended here. True does not promise arrival."""
        if not self.open:
            return False
        self._put(message)
        return True

    def close(self, reason: str) -> None:
        """Ends the stream; the peer reads what was sent before. No callback is called here any more."""
        if self.open:
            self._put(_End(reason))
            self._leave()

    def abort(self, reason: str) -> None:
        """Breaks the stream at this end: its owner learns of it now, the peer later."""
        if self.open:
            self._put(_End(reason))
            self._leave()
            self.on_end(reason)

    def vanish(self, reason: str, silently: bool) -> None:
        """The owner has died. silently: the peer gets no notice."""
        if self.open:
            if not silently:
                self._put(_End(reason))
            self._leave()

    def release(self) -> None:
        """The two processes can reach each other again: delivers held messages."""
        for _ in range(self._held):
            self._network.world.at(0.0, self.owner.loop, self._arrive)
        self._held = 0

    def _leave(self) -> None:
        self.open = False
        self._incoming.clear()
        self._network.forget(self)

    def _put(self, message: Any) -> None:
        world, peer = self._network.world, self.peer
        assert peer is not None
        if not peer.open:
            return
        latency = self._network.latency(self.owner.name, peer.owner.name)
        self._last_due = max(self._last_due, world.now + latency)
        peer._incoming.append(message)
        world.at(self._last_due - world.now, peer.owner.loop, peer._arrive)

    def _arrive(self) -> None:
        if not self.open:
            return
        if self._network.is_cut(self.owner.name, self.peer_name):
            self._held += 1
            return
        message = self._incoming.popleft()
        if isinstance(message, _End):
            self._leave()
            self.on_end(message.reason)
        else:
            self.on_message(message)


class Network:
    def __init__(self, world: World, latency: float) -> None:
        """`latency`: seconds, the usual time of a message."""
        self.world = world
        self._latency = latency
        self._hosts: dict[str, Host] = {}
        self._endpoints: list[Endpoint] = []
        self._cut: dict[frozenset[str], int] = {}
        self._cuts = 0
        self._slow: dict[frozenset[str], float] = {}
        self.segments: dict[str, Any] = {}
        """Shared memory by its path. It outlives its owner."""
        self.disks: dict[str, SimDisk] = {}
        """By name. They outlive all processes."""

    def register(self, host: Host) -> None:
        """The host answers at its name until `unregister`."""
        self._hosts[host.name] = host

    def unregister(self, name: str) -> None:
        self._hosts.pop(name, None)

    def host(self, name: str) -> Host | None:
        return self._hosts.get(name)

    def latency(self, a: str, b: str) -> float:
        rng = self.world.rng(f"latency {a} {b}")
        usual = self._latency * rng.uniform(0.2, 2.0)
        if rng.random() < 0.02:
            usual += rng.uniform(0.0, 0.3)
        return min(usual * self._slow.get(frozenset((a, b)), 1.0), LONGEST_LATENCY)

    def is_cut(self, a: str, b: str) -> bool:
        return frozenset((a, b)) in self._cut

    def is_slow(self, a: str, b: str) -> bool:
        return frozenset((a, b)) in self._slow

    def connect(self, client: Host, address: str, method: str = "") -> Endpoint | None:
        """The client's end of a new stream, or None when nobody answers there now."""
        server = self._hosts.get(address)
        if server is None or self.is_cut(client.name, address):
            return None
        near, far = Endpoint(self, client, address), Endpoint(self, server, client.name)
        near.peer, far.peer, far.method = far, near, method
        self._endpoints += (near, far)
        server.accept(far)
        return near

    def forget(self, endpoint: Endpoint) -> None:
        if endpoint in self._endpoints:
            self._endpoints.remove(endpoint)

    def died(self, host: Host, silently: bool) -> None:
        """All streams of the host end. Its peers learn of it at once, or by keepalive."""
        if self._hosts.get(host.name) is host:
            self.unregister(host.name)
        for endpoint in [e for e in self._endpoints if e.owner is host]:
            endpoint.vanish(f"{host.name} died", silently)
            peer = endpoint.peer
            if silently and peer is not None:
                self._keepalive(peer, lambda: True)

    def stalled(self, host: Host, until: float) -> None:
        """The host answers no pings until then."""
        for endpoint in [e for e in self._endpoints if e.owner is host and e.peer is not None]:
            assert endpoint.peer is not None
            self._keepalive(endpoint.peer, lambda: self.world.now < until)

    def drop(self, a: str, b: str) -> None:
        """Every connection between the two breaks; each end notices in its own time."""
        rng = self.world.rng("drop")
        for endpoint in [e for e in self._endpoints if {e.owner.name, e.peer_name} == {a, b}]:
            self.world.at(rng.uniform(0.0, 0.1), endpoint.owner.loop, _abort(endpoint, "connection reset"))

    def cut(self, a: str, b: str, seconds: float) -> None:
        """Nothing passes between the two for a while."""
        pair = frozenset((a, b))
        self._cuts += 1
        mark = self._cut[pair] = self._cuts
        for endpoint in [e for e in self._endpoints if {e.owner.name, e.peer_name} == pair]:
            self._keepalive(endpoint, lambda: self._cut.get(pair) == mark)
        self.world.at(seconds, Actor("network"), lambda: self._heal(pair, mark))

    def slow(self, a: str, b: str, factor: float, seconds: float) -> None:
        pair = frozenset((a, b))
        self._slow[pair] = factor

        def recover() -> None:
            self._slow.pop(pair, None)

        self.world.at(seconds, Actor("network"), recover)

    def _heal(self, pair: frozenset[str], mark: int) -> None:
        if self._cut.get(pair) == mark:
            del self._cut[pair]
            for endpoint in [e for e in self._endpoints if {e.owner.name, e.peer_name} == pair]:
                endpoint.release()

    def _keepalive(self, endpoint: Endpoint, still: Callable[[], bool]) -> None:
        def give_up() -> None:
            if still():
                endpoint.abort("no answer to pings")

        seconds = self.world.rng("keepalive").uniform(*KEEPALIVE_SECONDS)
        self.world.at(seconds, endpoint.owner.loop, give_up)


def _abort(endpoint: Endpoint, reason: str) -> Callable[[], None]:
    return lambda: endpoint.abort(reason)


class SimLink:
    """Keeps one stream open to an address, like rpc.link.Link: hello, first answer, messages, loss, again."""

    def __init__(
        self,
        network: Network,
        owner: Host,
        address: str,
        hello: Callable[[], Any],
        on_message: Callable[[Any], None],
        on_up: Callable[[Any], None],
        on_down: Callable[[BatonError], None],
        method: str = "",
    ) -> None:
        self.address = address
        self._method = method
        self._closed = False
        self.connected = False
        self.last_error: BatonError | None = None
        self._network = network
        self._owner = owner
        self._hello = hello
        self._on_up = on_up
        self._on_message = on_message
        self._on_down = on_down
        self._endpoint: Endpoint | None = None
        self._failure: BatonError | None = None
        self._backoff = FIRST_BACKOFF
        self._rng = network.world.rng(f"link {owner.name} {address}")

    def start(self) -> None:
        self._network.world.at(self._rng.uniform(0.0, 0.01), self._owner.loop, self._connect)

    @property
    def partner(self) -> Host | None:
        """The host at the other end; None while down, and when that end has gone, noticed or not."""
        peer = self._endpoint.peer if self.connected and self._endpoint is not None else None
        return peer.owner if peer is not None and peer.open else None

    def send(self, message: Any) -> bool:
        return self.connected and self._endpoint is not None and self._endpoint.send(message)

    def reset(self, error: BatonError) -> None:
        """Ends the session with `error`; a new one is opened after the backoff."""
        endpoint, self._failure = self._endpoint, error
        self.connected = False
        if endpoint is not None:
            self._network.world.at(0.0, self._owner.loop, lambda: endpoint.abort(error.message))

    async def close(self) -> None:
        self._closed, self.connected = True, False
        if self._endpoint is not None:
            self._endpoint.close("closed")

    def _connect(self) -> None:
        if self._closed:
            return
        endpoint = self._endpoint = self._network.connect(self._owner, self.address, self._method)
        if endpoint is None:
            self._lost("nobody answers")
            return
        endpoint.on_message = self._first
        endpoint.on_end = self._lost
        endpoint.send(self._hello())

        def too_late() -> None:
            if self._endpoint is endpoint and not self.connected:
                endpoint.abort("no welcome in time")

        self._network.world.at(CONNECT_SECONDS, self._owner.loop, too_late)

    def _first(self, message: Any) -> None:
        assert self._endpoint is not None
        self._endpoint.on_message = self._on_message
        self.connected = True
        self._backoff = FIRST_BACKOFF
        self._on_up(message)

    def _lost(self, reason: str) -> None:
        self.connected = False
        self._endpoint = None
        self.last_error, self._failure = self._failure or unavailable(reason, "LINK_DOWN"), None
        self._on_down(self.last_error)
        self._network.world.at(self._backoff * self._rng.uniform(0.5, 1.0), self._owner.loop, self._connect)
        self._backoff = min(2 * self._backoff, LAST_BACKOFF)
