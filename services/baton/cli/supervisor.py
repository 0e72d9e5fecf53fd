"""Child processes: started, restarted when they die, stopped together."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from baton import cgroups
from baton.cli.config_fields import variables
from baton.rpc.address import join_address

LAST_LINES = 8
"""Log lines shown when a child dies."""


class ChildState(enum.StrEnum):
    """What a child process is doing."""

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
    """A `baton serve` process. It keeps its ports when it is restarted, so that peers find it."""

    def __init__(
        self,
        name: str,
        role: str,
        *,
        folder: Path,
        host: str,
        port: int,
        http_port: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """http_port: None: no HTTP. environment: variables of its own."""
        self.name = name
        self.role = role
        self.host = host
        self.port = port
        self.http_port = http_port
        self.environment = dict(environment)
        self.log = folder / f"{name}.log"
        self.state = ChildState.WAITING
        self.since = time.monotonic()
        self.starts = 0
        self._oom_kills = 0
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
    def address(self) -> str:
        """host:port of its gRPC server."""
        return join_address(self.host, self.port)

    @property
    def http_address(self) -> str:
        """host:port of its HTTP server; empty: it has none."""
        return "" if self.http_port is None else join_address(self.host, self.http_port)

    def _enter(self, state: ChildState) -> None:
        self.state = state
        self.since = time.monotonic()

    async def start(self, command: Sequence[str], seconds: float) -> None:
        """Starts `command` with the ports appended; returns once the process says that it is ready.

        Raises ChildError when the process cannot be made, ends first, or `seconds` have passed; it may then
        still be running.
        """
        self._enter(ChildState.STARTING)
        self.starts += 1
        self._oom_kills = cgroups.oom_kills()
        http_port = "none" if self.http_port is None else str(self.http_port)
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
            with self.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    *("--host", self.host, "--port", str(self.port), "--http-port", http_port, "--lifeline"),
                    stdin=asyncio.subprocess.PIPE,  # the lifeline, which ends with this process
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env={**_inherited(), **self.environment},
                    process_group=0,  # a terminal's Ctrl-C reaches the supervisor alone
                )
        except OSError as error:
            self._enter(ChildState.DIED)
            raise ChildError(f"{self.name} cannot be started: {error}") from None
        try:
            async with asyncio.timeout(seconds):
                await self._read_ready_line(self._process)
        except TimeoutError:
            raise self._error(f"{self.name} was not ready after {seconds:.0f} s") from None
        self._enter(ChildState.HEALTHY)

    async def _read_ready_line(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if line.startswith(b"ready "):
                self._stdout = asyncio.create_task(self._drain_stdout(process.stdout))
                return
        code = await process.wait()
        self._enter(ChildState.DIED)
        raise self._error(f"{self.name} {self._describe_end(code)} before it was ready")

    async def _drain_stdout(self, stdout: asyncio.StreamReader) -> None:
        """A child must never block on a full pipe."""
        while await stdout.read(65536):
            pass

    async def ended(self) -> int:
        """Waits for the process's end; returns its exit code (negative: the signal's number)."""
        assert self._process is not None
        code = await self._process.wait()
        if self.state is not ChildState.STOPPING:
            self._enter(ChildState.DIED)
        return code

    async def stop(self, seconds: float) -> None:
        """Sends SIGTERM, and SIGKILL if the process still runs after `seconds`. Idempotent."""
        if self._process is None:
            return
        self._enter(ChildState.STOPPING)
        self._send(signal.SIGTERM)
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        finally:
            if not self.running:
                self._enter(ChildState.STOPPED)
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
        """The end of the log; none if it cannot be read."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - 8192))
                return log.read().decode(errors="replace").splitlines()[-count:]
        except OSError:
            return []

    def _describe_end(self, code: int) -> str:
        """Says how a process ended, and whether one was killed because memory ran out since the start."""
        text = describe_exit(code)
        if code != -signal.SIGKILL or cgroups.oom_kills() <= self._oom_kills:
            return text
        limits = cgroups.memory()
        limit = f"all processes here may take {limits[1] / 2**30:.2f} GiB; " if limits else ""
        return f"{text}: memory ran out ({limit}lower --kv-tokens, or take a smaller --dtype or model)"

    def _error(self, what: str) -> ChildError:
        return self._with_log(what, self.last_lines())

    def _with_log(self, what: str, lines: Sequence[str]) -> ChildError:
        return ChildError("\n".join([f"{what}; its log ({self.log}) ends:" if lines else what, *lines]))

    def died(self, code: int) -> ChildError:
        """The error that says how a healthy child ended."""
        return self._error(f"{self.name} (pid {self.pid}) {self._describe_end(code)}")


def describe_exit(code: int) -> str:
    """ "exited with code 2", "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


START_ORDER = (("tokenizer", "prefill", "decode", "encode"), ("gateway",))
"""Roles of each stage, which start at the same time. All addresses are known before any process answers."""
STOP_ORDER = ("gateway", "decode", "prefill", "encode", "tokenizer")
RESTARTS_PER_MINUTE = 5
FIRST_BACKOFF_SECONDS = 0.2
STOP_MARGIN_SECONDS = 3.0
"""A child is killed this long after its own limit for draining."""
SERVE = (sys.executable, "-P", "-m", "baton.cli.main", "serve")


class Backoff:
    """Delays of restarts: each twice the one before, and at most RESTARTS_PER_MINUTE in any minute."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def next(self, now: float) -> float:
        """Seconds from `now` (monotonic) to the next restart, which is counted."""
        while self._times and self._times[0] <= now - 60:
            self._times.popleft()
        delay = FIRST_BACKOFF_SECONDS * 2.0 ** len(self._times)
        if len(self._times) >= RESTARTS_PER_MINUTE:
            delay = max(delay, self._times[-RESTARTS_PER_MINUTE] + 60 - now)
        self._times.append(now + delay)
        return delay


class Supervisor:
    """Owns the children: the list, too. `arguments` returns a child's flags at each start."""

    def __init__(
        self,
        children: list[Child],
        arguments: Callable[[Child], Sequence[str]],
        *,
        program: Sequence[str] = SERVE,
        restart: bool = True,
        start_seconds: float = 600.0,
        drain_seconds: float = 5.0,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.children = children
        self._arguments = arguments
        self._program = tuple(program)
        self._restart = restart
        self._start_seconds = start_seconds
        self._drain_seconds = drain_seconds
        self._report = report
        self._monitors: dict[str, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[ChildError] | None = None

    async def start(self) -> None:
        """Returns once all are ready. Raises the first ChildError; `stop` must still be called then."""
        self._failure = asyncio.get_running_loop().create_future()
        for roles in START_ORDER:
            stage = [child for child in self.children if child.role in roles]
            starts = [asyncio.create_task(self._start(child)) for child in stage]
            try:
                await asyncio.gather(*starts)
            finally:
                for task in starts:
                    task.cancel()
                await asyncio.gather(*starts, return_exceptions=True)

    async def _start(self, child: Child) -> None:
        await self._launch(child)
        self._monitors[child.name] = asyncio.create_task(self._monitor(child), name=f"monitor {child.name}")

    async def _launch(self, child: Child) -> None:
        command = [*self._program, child.role, *self._arguments(child)]
        await child.start(command, self._start_seconds)

    async def add(self, child: Child) -> None:
        """Starts one more child; returns once it is ready. Raises ChildError, and then owns nothing more."""
        self.children.append(child)
        try:
            await self._start(child)
        except BaseException:
            await self.remove(child)
            raise

    async def remove(self, child: Child) -> None:
        """Drains and stops one child."""
        monitor = self._monitors.pop(child.name, None)
        if monitor is not None:
            monitor.cancel()
            await asyncio.gather(monitor, return_exceptions=True)
        await child.stop(self._drain_seconds + STOP_MARGIN_SECONDS)
        self.children.remove(child)

    async def failed(self) -> ChildError:
        """Waits until a child has died that is not restarted."""
        assert self._failure is not None, "start() comes first"
        return await asyncio.shield(self._failure)

    async def _monitor(self, child: Child) -> None:
        backoff = Backoff()
        error = child.died(await child.ended())
        while True:
            if not self._restart:
                if self._failure is not None and not self._failure.done():
                    self._failure.set_result(error)
                return
            delay = backoff.next(time.monotonic())
            port = f" on port {child.port}" if child.port else ""
            self._report(f"{error}\nstarting {child.name} again in {delay:.1f} s{port}")
            await asyncio.sleep(delay)
            try:
                await self._launch(child)
            except ChildError as failed:
                child.kill()  # one that hangs; the others are dead already
                await child.ended()
                error = failed
            else:
                self._report(f"{child.name} is healthy again: pid {child.pid}, {child.address}")
                error = child.died(await child.ended())

    async def stop(self) -> None:
        """Stops all children, role by role. When cancelled it kills the rest at once. No child is running
        when this has returned or raised."""
        for task in self._monitors.values():
            task.cancel()
        await asyncio.gather(*self._monitors.values(), return_exceptions=True)
        self._monitors.clear()
        try:
            for role in STOP_ORDER:
                stage = [child for child in self.children if child.role == role]
                await asyncio.gather(
                    *(child.stop(self._drain_seconds + STOP_MARGIN_SECONDS) for child in stage)
                )
        finally:
            left = [child for child in self.children if child.running]
            for child in left:
                child.kill()
            for child in left:
                with contextlib.suppress(asyncio.CancelledError):
                    await child.ended()
                child.state = ChildState.STOPPED


def _inherited() -> dict[str, str]:
    """The environment without Baton's own variables: children get their settings as flags, and a variable may
    be meant for a client, as with `baton verify --against`.

    Each worker has a thread per core. A waiting thread must not spin on another's core. A short spin still
    pays within a step. `baton bench` on two cores, output tokens/s of two runs: 815, 848; without spin 763,
    593; with OpenMP's default 506, 763."""
    ours = {*variables(), "BATON_CONFIG"}
    others = {name: value for name, value in os.environ.items() if name not in ours}
    return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", **others}
