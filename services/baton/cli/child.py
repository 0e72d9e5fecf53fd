"""One child process under supervision: start it, wait until it is healthy, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.address import join_address
from baton.rpc.channel import Dial, open_channel

LAST_LINES = 8
"""Log lines shown when a child dies."""


class State(enum.StrEnum):
    """Where a child is in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    LOADING = "loading"
    HEALTHY = "healthy"
    DIED = "died"
    STOPPING = "stopping"
    STOPPED = "stopped"


class ChildError(Exception):
    """A child did not start or died. The first line says which and how; its last log lines follow."""


class Child:
    """A `baton serve` process. It keeps its ports when it is started again, so that peers find it."""

    def __init__(
        self,
        name: str,
        role: str,
        *,
        folder: Path,
        host: str,
        port: int = 0,
        http_port: int | None = 0,
        environment: Mapping[str, str] = MappingProxyType({}),
        dial: Dial | None = open_channel,
    ) -> None:
        """`environment`: variables of its own. `dial`: opens the connection on which its health is asked;
        None: it cannot be asked, and is believed when it says that it is ready."""
        self.name = name
        self.role = role
        self.host = host
        self.port = port
        self.http_port = http_port
        self.environment = dict(environment)
        self.dial = dial
        self.log = folder / f"{name}.log"
        self.state = State.WAITING
        self.since = time.monotonic()
        self.address = ""
        self.http_address = ""
        self.starts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._stdout: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """0 before the first start."""
        return self._process.pid if self._process is not None else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def fixed_address(self) -> str:
        """host:port of a child that was given its port; known before it starts."""
        return join_address(self.host, self.port)

    def _enter(self, state: State) -> None:
        self.state = state
        self.since = time.monotonic()

    async def start(self, command: Sequence[str], environment: dict[str, str], seconds: float) -> None:
        """Starts `command` with the ports appended; returns once gRPC health says SERVING.

        Raises ChildError when the process ends first or `seconds` have passed; it may then still be running.
        """
        self._enter(State.STARTING)
        self.starts += 1
        http_port = "none" if self.http_port is None else str(self.http_port)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *("--host", self.host, "--port", str(self.port), "--http-port", http_port, "--lifeline"),
                stdin=asyncio.subprocess.PIPE,  # the lifeline: closed by the kernel when this process ends
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                process_group=0,  # a terminal's Ctrl-C reaches the supervisor alone
            )
        try:
            async with asyncio.timeout(seconds):
                await self._read_ready_line(self._process)
                await self._until_serving()
        except TimeoutError:
            raise self._error(f"{self.name} was not healthy after {seconds:.0f} s") from None
        self._enter(State.HEALTHY)

    async def _read_ready_line(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := (await process.stdout.readline()).decode(errors="replace").strip():
            words = line.split()
            if words[0] == "ready":
                found = dict(word.split("=", 1) for word in words[1:] if "=" in word)
                self.address, http = found["address"], found.get("http", "none")
                self.http_address = "" if http == "none" else http
                self.port = int(self.address.rpartition(":")[2])
                if self.http_port is not None and self.http_address:
                    self.http_port = int(self.http_address.rpartition(":")[2])
                self._stdout = asyncio.create_task(self._drain_stdout(process.stdout))
                return
        code = await process.wait()
        self._enter(State.DIED)
        raise self._error(f"{self.name} {describe_exit(code)} before it was ready")

    async def _drain_stdout(self, stdout: asyncio.StreamReader) -> None:
        """A child must never block on a full pipe."""
        while await stdout.read(65536):
            pass

    async def _until_serving(self) -> None:
        if self.dial is None:
            return
        target = self.address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
        async with self.dial(target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while self.running:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await stub.Check(
                        health_pb2.HealthCheckRequest(), timeout=2.0, wait_for_ready=True
                    )
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(0.05)
        assert self._process is not None and self._process.returncode is not None
        self._enter(State.DIED)
        raise self._error(f"{self.name} {describe_exit(self._process.returncode)} before it was healthy")

    async def ended(self) -> int:
        """Waits for the process's end; returns its exit code (negative: the signal's number)."""
        assert self._process is not None
        code = await self._process.wait()
        if self.state is not State.STOPPING:
            self._enter(State.DIED)
        return code

    async def stop(self, seconds: float) -> None:
        """SIGTERM, and SIGKILL when the process is still there after `seconds`. Idempotent."""
        if self._process is None:
            return
        self._enter(State.STOPPING)
        self._send(signal.SIGTERM)
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        finally:
            if not self.running:
                self._enter(State.STOPPED)
        if self._stdout is not None:
            self._stdout.cancel()

    def kill(self) -> None:
        """SIGKILL, if it is running."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.running and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """The end of the log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - 8192))
                return log.read().decode(errors="replace").splitlines()[-count:]
        except FileNotFoundError:
            return []

    def _error(self, what: str) -> ChildError:
        lines = self.last_lines()
        return ChildError("\n".join([f"{what}; its log ({self.log}) ends:" if lines else what, *lines]))

    def died(self, code: int) -> ChildError:
        """The error that says how a healthy child ended."""
        return self._error(f"{self.name} (pid {self.pid}) {describe_exit(code)}")


def describe_exit(code: int) -> str:
    """ "exited with code 2", "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
