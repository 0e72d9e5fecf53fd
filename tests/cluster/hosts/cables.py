"""Cables between two hosts. Both hosts keep their addresses and connections while one is changed for another.

A cut cable says nothing to either end: no carrier is lost, no connection is reset, packets vanish. So it is
with a failed switch or a firewall in between, and it is harder to notice than a plug that is pulled.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import struct
import threading
import time

from hosts.host import CannotMakeHosts, Host

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_BYTES = 65536
MAX_QUEUED = 10_000
"""Packets under way at a time; more are dropped, as by a full queue."""


class Cable:
    """One device at each end, with routes. `plug` and `unplug` are the kinds' own."""

    def __init__(self, one: Host, other: Host) -> None:
        self.ends = ((one, f"to-{other.name}", other), (other, f"to-{one.name}", one))

    def _addresses(self) -> None:
        for host, device, peer in self.ends:
            # The host's address is on each device too: UCX looks for devices with addresses.
            host.ip("address", "add", f"{host.address}/32", "dev", device)
            host.ip("link", "set", device, "up")
            host.ip("route", "replace", f"{peer.address}/32", "dev", device, "src", host.address)

    @property
    def carried(self) -> int:
        """Bytes that have arrived, in both directions."""
        return sum(host.received(device) for host, device, _ in self.ends)


class Wire(Cable):
    """Two veth pairs that meet at a bridge in a namespace between them. cut() takes them off the bridge."""

    def __init__(self, one: Host, other: Host, switch: Host) -> None:
        super().__init__(one, other)
        self._switch = switch
        pair = f"{one.name}-{other.name}"
        self._bridge = f"br-{pair}"[:15]
        self._ports = [f"{host.name[:6]}-{device[3:9]}" for host, device, _ in self.ends]

    def plug(self) -> None:
        switch = self._switch
        switch.ip("link", "add", self._bridge, "type", "bridge")
        switch.ip("link", "set", self._bridge, "up")
        for (host, device, _), port in zip(self.ends, self._ports, strict=True):
            veth = ("type", "veth", "peer", "name", device, "netns", host.namespace)
            switch.ip("link", "add", port, *veth)
            switch.ip("link", "set", port, "up")
        self.heal()
        self._addresses()

    def unplug(self) -> None:
        for port in self._ports:
            self._switch.ip("link", "delete", port)
        self._switch.ip("link", "delete", self._bridge)

    def cut(self) -> None:
        for port in self._ports:
            self._switch.ip("link", "set", port, "nomaster")

    def heal(self) -> None:
        for port in self._ports:
            self._switch.ip("link", "set", port, "master", self._bridge)

    def throttle(self, kbit: int) -> None:
        """From now on it carries so many kilobits a second in each direction; 0: as many as it can."""
        for port in self._ports:
            if kbit:
                rate = ("rate", f"{kbit}kbit", "burst", "16kb", "limit", "256kb")
                self._switch.tc("qdisc", "replace", "dev", port, "root", "tbf", *rate)
            else:
                self._switch.tc("qdisc", "delete", "dev", port, "root")


class LongWire(Cable):
    """Two TUN devices, and a thread of the test that carries each packet over after `delay` seconds, or drops
    it with the probability `loss`. It does what `tc netem` does, which not every kernel has."""

    def __init__(self, one: Host, other: Host, delay: float, loss: float, seed: int = 0) -> None:
        super().__init__(one, other)
        self.dropped = 0
        self._delay, self._loss = delay, loss
        self._random = random.Random(seed)
        self._cut = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="long wire")
        self._files: list[int] = []

    def plug(self) -> None:
        """Raises CannotMakeHosts."""
        try:
            for host, device, _ in self.ends:
                self._files.append(host.inside(lambda name=device: _tun(name)))
        except OSError as error:
            self._close()
            raise CannotMakeHosts(f"/dev/net/tun: {error.strerror}") from None
        self._addresses()
        self._thread.start()

    def unplug(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self._close()

    def _close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def cut(self) -> None:
        self._cut = True

    def heal(self) -> None:
        self._cut = False

    def _carry(self) -> None:
        one, other = self._files
        across = {one: other, other: one}
        under_way: list[tuple[float, int, int, bytes]] = []
        number = 0
        with selectors.DefaultSelector() as selector:
            for file in self._files:
                selector.register(file, selectors.EVENT_READ)
            while not self._stop.is_set():
                wait = under_way[0][0] - time.monotonic() if under_way else 0.1
                for key, _ in selector.select(max(0.0, min(wait, 0.1))):
                    packet, number = os.read(key.fd, PACKET_BYTES), number + 1
                    full = len(under_way) >= MAX_QUEUED
                    if self._cut or full or self._random.random() < self._loss:
                        self.dropped += 1
                        continue
                    due = time.monotonic() + self._delay
                    heapq.heappush(under_way, (due, number, across[key.fd], packet))
                while under_way and under_way[0][0] <= time.monotonic():
                    *_, file, packet = heapq.heappop(under_way)
                    os.write(file, packet)


def _tun(name: str) -> int:
    """A TUN device in the calling thread's namespace; it is gone when the file is closed."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except BaseException:
        os.close(file)
        raise
    return file
