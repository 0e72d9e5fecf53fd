"""Three hosts with a cable between each two, and a deployment on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from deployment import Deployment
from process import Process

from hosts.cables import Cable, Wire
from hosts.door import Door
from hosts.host import Host, reap


class Lan:
    """`front`: gateways and clients. `left`, `right`: a prefill and a decode node each."""

    def __init__(self) -> None:
        """Raises CannotMakeHosts. To be closed even so."""
        self._hosts: list[Host] = []
        reap()
        self.switch = self._host("switch", "10.77.0.9")
        self.front = self._host("front", "10.77.0.1")
        self.left = self._host("left", "10.77.0.2")
        self.right = self._host("right", "10.77.0.3")
        self.front_left = self._wire(self.front, self.left)
        self.front_right = self._wire(self.front, self.right)
        self.left_right = self._wire(self.left, self.right)

    def _host(self, name: str, address: str) -> Host:
        host = Host(name, address)
        self._hosts.append(host)
        return host

    def _wire(self, one: Host, other: Host) -> Wire:
        wire = Wire(one, other, self.switch)
        wire.plug()
        return wire

    @property
    def wires(self) -> list[Wire]:
        return [self.front_left, self.front_right, self.left_right]

    @contextlib.contextmanager
    def replaced(self, wire: Wire, cable: Cable) -> Iterator[None]:
        """`cable`, between the same hosts, stands in for the wire in the block."""
        wire.unplug()
        try:
            cable.plug()
            try:
                yield
            finally:
                cable.unplug()
        finally:
            wire.plug()

    def close(self) -> None:
        """Namespaces take their devices with them."""
        while self._hosts:
            self._hosts.pop().remove()


class HostProcess(Process):
    """Tests reach it through a door, at `outside`; others at its own address, by cable."""

    def __init__(self, host: Host, role: str, name: str, flags: list[str], folder: Path) -> None:
        super().__init__(role, name, ["--host", host.address, "--insecure", *flags], folder)
        self.host = host
        self.prelude = f"from hosts.host import enter; enter({host.namespace!r})"
        self._doors: dict[str, Door] = {}

    @property
    def outside(self) -> str:
        if self.address not in self._doors:
            self._doors[self.address] = Door(self.host, self.address)
        return self._doors[self.address].address

    def accepts(self, address: str) -> bool:
        try:
            self.host.connect(address).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        for door in self._doors.values():
            door.close()


class LanDeployment(Deployment):
    """Its tokenizer is at the front. `at` says where the next processes run."""

    def __init__(self, folder: Path, model: Path | str, lan: Lan) -> None:
        self.lan = lan
        self._at = lan.front
        super().__init__(folder, model)

    def at(self, host: Host) -> LanDeployment:
        self._at = host
        return self

    def _add(self, role: str, flags: Sequence[str]) -> Process:
        number = sum(1 for process in self.processes if process.role == role)
        process = HostProcess(self._at, role, f"{role}-{number}", list(flags), self.folder)
        self.processes.append(process)
        return process

    def _abandon(self) -> None:
        super()._abandon()
        for process in self.processes:
            assert isinstance(process, HostProcess)
            process.close()
