"""Common parts of simulated processes: threads, a clock, a pool and a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.rpc.errors import BatonError
from baton.sim.model import ONE, Windows
from baton.sim.network import Endpoint, Network, SimLink
from baton.sim.world import Actor, World


class SimProcess:
    """One incarnation of a process. `name` is its address, the same in every incarnation."""

    role: str

    def __init__(self, network: Network, name: str, life: int) -> None:
        self.name = name
        self.network = network
        self.world: World = network.world
        rng = self.world.rng(f"life {name}")
        self.incarnation = rng.getrandbits(63) | 1
        self._offset = rng.uniform(0.0, 1e5)
        who = f"{name}#{life}"
        self.who = who
        self.loop, self.step_thread, self.copy_thread, self.device_thread = (
            Actor(f"{who}.{thread}") for thread in ("loop", "steps", "copies", "device")
        )
        self.draining = False
        self.links: dict[str, SimLink] = {}
        network.register(self)

    @property
    def alive(self) -> bool:
        return self.loop.alive

    def clock(self) -> float:
        """Monotonic, and unlike any other process's."""
        return self.world.now + self._offset

    def accept(self, endpoint: Endpoint) -> None:
        raise AssertionError(f"{self.name} serves nothing")

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self.draining = True

    def crash(self, silently: bool) -> None:
        for actor in (self.loop, self.step_thread, self.copy_thread, self.device_thread):
            actor.alive = False
        self.network.died(self, silently)

    def stall(self, seconds: float, which: int) -> None:
        """Stalls: 0 all threads, 1 the step thread, 2 the copying thread. The device continues."""
        until = self.world.now + seconds
        if which != 2:
            self.step_thread.stall(until)
        if which != 1:
            self.copy_thread.stall(until)
        if which == 0:
            self.loop.stall(until)
            self.network.stalled(self, until)

    def link(
        self,
        address: str,
        hello: Callable[[], Any],
        on_message: Callable[[Any], None],
        on_up: Callable[[Any], None],
        on_down: Callable[[BatonError], None],
        method: str = "",
    ) -> SimLink:
        link = SimLink(self.network, self, address, hello, on_message, on_up, on_down, method)
        self.links[f"{method} {address}".strip()] = link
        return link


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """What a simulated worker that sees does about images."""

    room: int
    """Bytes of pixels and embeddings that requests hold at a time."""
    cached: int
    """Bytes of embeddings that are kept."""
    here: float
    """The share of images that are encoded where they are needed, though there are encode nodes."""
    pull_pace: float
    """Seconds, the usual time to copy half a page of embeddings."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a simulated worker runs on."""

    step_seconds: float
    """A step's usual time on the device."""
    pull_pace: float = 0.0
    """Seconds, the usual time to copy half a page."""
    sees_steps: bool = True
    """Whether pulls out of shared memory can wait for steps."""
    windows: Windows = ONE
    """Windows of the KV groups of the model that it computes."""
    heads: int = 1
    """KV heads of that model; 1 also stands for latents."""
    ranks: int = 1
    collective_seconds: float = 1.0
    """Time limit of a collective."""
    tier_rows: int = 0
    """Page indexes that the host tier has room for; 0: there is none."""
    tier_pace: float = 0.0
    """Seconds, the usual time to copy half a page from or to it."""
    images: ImageSettings | None = None
    """None: it sees none."""
    disk: str = ""
    """Name of the disk tier's disk, which workers may share; empty: there is none."""
