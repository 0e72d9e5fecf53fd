"""One `baton serve` process: started, watched and ended by its pid."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
from forking import Forked, forks

from baton.rpc.channel import Metadata
from baton.v1 import node_pb2, node_pb2_grpc
from ports import free_port

READY_SECONDS = 240.0
EXIT_SECONDS = 60.0
ASK_SECONDS = 20.0
"""For an answer to a test's own question."""
SHM = Path("/dev/shm")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Workers that wait for one another must not spin on the cores that another one computes on.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
}


class Process:
    """`start` launches, `wait_ready` returns once it has said that it is ready. It keeps its ports when it
    is started again."""

    forked = False
    """Whether it is forked rather than executed: sooner there, and less like what users start."""

    def __init__(self, role: str, name: str, flags: list[str], folder: Path) -> None:
        self.role, self.name, self.flags = role, name, flags
        self.log = folder / f"{name}.log"
        self.address = self.http = ""
        self.incarnation = 0
        self.starts = 0
        self.environment: dict[str, str] = {}
        self.program: tuple[str, ...] = (sys.executable, "-m", "baton.cli.main")
        """What runs `serve`; of a process that is not forked."""
        self.prelude = ""
        """Python that it runs before anything else; of a process that is forked."""
        self.metadata: Metadata = ()
        """Of what a test asks it by itself."""
        self._popen: subprocess.Popen[bytes] | Forked | None = None
        self._channel: grpc.Channel | None = None

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def outside(self) -> str:
        """Where a test reaches it."""
        return self.address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def start(self) -> None:
        assert not self.alive
        # Given by the system, they might be another's when it is started again.
        port = self.port if self.address else free_port()
        http = self.http.rpartition(":")[2] or (str(free_port()) if self.role == "gateway" else "none")
        # --lifeline: it ends when this process does, however that happens.
        arguments = ["serve", self.role, "--lifeline", "--port", str(port), "--http-port", http, *self.flags]
        environment = {**os.environ, **ENVIRONMENT, **self.environment}
        self.starts += 1
        with self.log.open("ab") as log:
            if self.forked:
                self._popen = forks(**ENVIRONMENT).start(
                    arguments, stderr=log, environment=environment, prelude=self.prelude
                )
            else:
                assert not self.prelude
                self._popen = subprocess.Popen(
                    [*self.program, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        words = self._read_line(deadline).split()
        assert words and words[0] == "ready", f"{self.name} said {words}: {self.tail()}"
        said = dict(word.split("=", 1) for word in words[1:])
        assert said["role"] == self.role and int(said["pid"]) == self.pid
        self.address, self.http = said["address"], said["http"] if said["http"] != "none" else ""
        if self._channel is not None:
            self._channel.close()
        self._channel = grpc.insecure_channel(self.outside, options=[("grpc.use_local_subchannel_pool", 1)])
        self.incarnation = self.info().incarnation

    def _read_line(self, deadline: float) -> str:
        assert self._popen is not None and self._popen.stdout is not None
        descriptor, line = self._popen.stdout.fileno(), b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            assert left > 0, f"{self.name} was not ready after {READY_SECONDS:g} s: {self.tail()}"
            if select.select([descriptor], [], [], left)[0]:
                data = os.read(descriptor, 1)
                assert data, f"{self.name} exited with code {self._popen.wait()}: {self.tail()}"
                line += data
        return line.decode()

    def load(self) -> node_pb2.Load:
        return self._stub().GetLoad(node_pb2.GetLoadRequest(), timeout=ASK_SECONDS, metadata=self.metadata)

    def info(self) -> node_pb2.NodeInfo:
        return self._stub().GetInfo(node_pb2.GetInfoRequest(), timeout=ASK_SECONDS, metadata=self.metadata)

    def _stub(self) -> node_pb2_grpc.NodeStub:
        return node_pb2_grpc.NodeStub(self._channel)

    def signal(self, number: signal.Signals) -> None:
        assert self._popen is not None
        self._popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self.signal(signal.SIGKILL)
        assert self._popen is not None
        self._popen.wait(EXIT_SECONDS)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self._popen is not None
        return self._popen.wait(EXIT_SECONDS)

    def stop(self) -> int:
        """SIGTERM; returns the exit code. One that is still there after EXIT_SECONDS is killed, and fails."""
        if self._channel is not None:
            self._channel.close()
        assert self._popen is not None
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGTERM)
        try:
            code = self._popen.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"{self.name} did not end {EXIT_SECONDS:g} s after SIGTERM: {self.tail()}"
            ) from None
        finally:
            assert self._popen.stdout is not None
            self._popen.stdout.close()
        return code

    def segments(self) -> list[Path]:
        """Shared memory of this incarnation."""
        return list(SHM.glob(f"baton-*{self.incarnation:016x}")) if self.incarnation else []

    def listening(self) -> bool:
        addresses = [address for address in (self.address, self.http) if address]
        return any(self.accepts(address) for address in addresses)

    def accepts(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex((host, int(port))) == 0

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])
