"""A whole deployment on this machine, as an asynchronous context manager: its ports, GPUs and processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from baton.bench.machine import visible_gpus
from baton.cli.config_fields import ROLES, as_flags
from baton.cli.local_secret import LocalSecret
from baton.cli.progress import LogFolder, follow_logs, rotate_logs, start_progress
from baton.cli.supervisor import SERVE, Child, Supervisor
from baton.config import WorkerConfig
from baton.rpc.address import family_of, join_address, loopback
from baton.rpc.errors import failed_precondition

PORTS = range(10_000, 20_000)


def free_ports(host: str, count: int, claims: contextlib.ExitStack | None = None) -> list[int]:
    """Different ports of the address that nobody uses now. They are below the range from which the system
    takes ports for connections (ip_local_port_range), so that they are still free when a process binds them.
    claims: what keeps other deployments from choosing the same ports until it is closed. Raises OSError if
    there are not so many."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), contextlib.ExitStack() as claim:
            # A name of the same network namespace, which ends with its process (unix(7), abstract sockets).
            claim.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0baton-port-{port}")
            with socket.socket(family_of(host)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            found.append(port)
            if claims is not None:
                claims.push(claim.pop_all())
        if len(found) == count:
            return found
    raise OSError(f"{host} has no {count} free ports from {PORTS.start} to {PORTS.stop - 1}")


def assign_gpus(workers: Mapping[str, int], gpus: Sequence[str]) -> dict[str, str]:
    """Worker -> its GPUs, one for each of its ranks, separated by commas. Empty without GPUs. Workers of one
    rank take them in turn, and may share one. Raises BatonError if there are ranks of a worker of several
    that would have to share."""
    needed = sum(workers.values())
    if gpus and needed > len(gpus) and max(workers.values()) > 1:
        ranks = ", ".join(f"{name} {count}" for name, count in workers.items())
        raise failed_precondition(
            f"{needed} ranks need a GPU each ({ranks}), and {len(gpus)} can be used ({', '.join(gpus)}): "
            "lower --tp, --prefill or --decode, or use --device cpu"
        )
    turn = itertools.cycle(gpus)
    return {name: ",".join(itertools.islice(turn, count)) for name, count in workers.items() if gpus}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """What to start."""

    prefill: int = 1
    """Prefill nodes; 0: aggregated, decode nodes compute prompts themselves."""
    decode: int = 1
    encode: int = 0
    """Encode nodes, for models that see."""
    gateways: int = 1
    """Several share the ports."""
    host: str = ""
    """Address that the gateway binds; empty: the loopback, as the other processes do."""
    port: int = 0
    """0: a free one."""
    http_port: int | None = 0
    """0: a free one; None: no HTTP."""
    settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Role -> fields of its configuration."""
    program: tuple[str, ...] = SERVE
    """The command that runs a process; role and flags follow."""
    log_folder: Path | None = None
    """None: a new one (progress.LogFolder)."""
    restart: bool = True
    start_seconds: float = 600.0
    drain_seconds: float = 5.0
    verbose: bool = False
    """Print the children's logs."""


def nth_address(address: str, number: int) -> str:
    """A ZeroMQ address for worker `number`: as many ports on, or a file of its own."""
    start, colon, port = address.rpartition(":")
    if address.startswith("ipc://"):
        return f"{address}-{number}"
    return f"{start}:{int(port) + number}" if colon and port.isdecimal() and int(port) else address


class Deployment:
    """`async with Deployment(plan, console)`: all processes are ready inside, and gone afterwards.

    Unless the plan names a cluster secret one is generated, which this user's commands find (local_secret).
    """

    def __init__(self, plan: DeploymentPlan, console: Console) -> None:
        """Raises BatonError if no log folder can be made or ranks lack GPUs, OSError without free ports."""
        self.plan = plan
        self.console = console
        self._own_logs = LogFolder() if plan.log_folder is None else None
        self.log_folder = folder = self._own_logs.path if self._own_logs else plan.log_folder or Path()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failed_precondition(f"--log-dir: no folder can be made: {error}") from None
        self._loopback = loopback()
        workers = [
            (f"{role}-{number}", role)
            for role, count in (("prefill", plan.prefill), ("decode", plan.decode), ("encode", plan.encode))
            for number in range(count)
        ]
        self.gpus = self._choose_gpus(workers)
        self._secret: LocalSecret | None = None
        gateways = ["gateway"] if plan.gateways == 1 else [f"gateway-{n}" for n in range(plan.gateways)]
        names = [("tokenizer", "tokenizer"), *workers, *((name, "gateway") for name in gateways)]
        self._claims = contextlib.ExitStack()
        ports = iter(free_ports(self._loopback, 2 * len(names) + 2, self._claims))
        host, port = plan.host or self._loopback, plan.port or next(ports)
        http_port = None if plan.http_port is None else plan.http_port or next(ports)
        self.address = join_address(host, port)
        """host:port of the gateways' gRPC server."""
        self.http_address = "" if http_port is None else join_address(host, http_port)
        """host:port of the gateways' HTTP server; empty: there is none."""
        self.children: list[Child] = []
        for name, role in names:
            own_http = None if role == "gateway" and http_port is None else next(ports)
            where = {"host": self._loopback, "port": next(ports), "http_port": own_http}
            if name == "gateway":  # of several, each has ports of its own beside those that they share
                where = {"host": host, "port": port, "http_port": http_port}
            self.children.append(self._make_child(name, role, **where))
        self.supervisor = Supervisor(
            self.children,
            self._arguments,
            program=plan.program,
            restart=plan.restart,
            start_seconds=plan.start_seconds,
            drain_seconds=plan.drain_seconds,
            report=self._report,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def _make_child(self, name: str, role: str, **where: Any) -> Child:
        """where: host, port and http_port."""
        gpus = {"CUDA_VISIBLE_DEVICES": self.gpus[name]} if name in self.gpus else {}
        return Child(name, role, folder=self.log_folder, environment=gpus, **where)

    def _choose_gpus(self, workers: Sequence[tuple[str, str]]) -> dict[str, str]:
        """A GPU for each worker, of the given names and roles, that takes any; one whose device has an index
        sees all."""
        settings = {role: self.plan.settings.get(role, {}) for role in ("prefill", "decode", "encode")}
        ranks = {
            name: int(settings[role].get("tp", 1))
            for name, role in workers
            if settings[role].get("device", "auto") in ("cuda", "auto")
        }
        return assign_gpus(ranks, visible_gpus() if ranks else [])

    def _report(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _addresses(self, role: str) -> tuple[str, ...]:
        return tuple(child.address for child in self.children if child.role == role)

    def _host(self, child: Child) -> str:
        """The GPUs of a worker, or the device that it is told to use by its index; empty: neither."""
        device = str(self.plan.settings.get(child.role, {}).get("device", ""))
        return self.gpus.get(child.name, device if device.startswith("cuda:") else "")

    def _arguments(self, child: Child) -> list[str]:
        return list(as_flags(ROLES[child.role], self._settings(child)))

    def _settings(self, child: Child) -> dict[str, Any]:
        """Fields of the child's configuration, but for what it binds."""
        role = child.role
        settings = {**self.plan.settings.get(role, {}), "advertise": ""}
        settings["drain_seconds"] = self.plan.drain_seconds
        if self._secret is not None:
            settings["cluster_secret_file"] = str(self._secret.path)
        host = self._host(child)
        sharing = [self._host(each) for each in self.children].count(host)
        if host and sharing > 1 and issubclass(ROLES[role], WorkerConfig):
            settings.setdefault("memory_fraction", round(WorkerConfig().memory_fraction / sharing, 3))
        if role == "gateway":
            settings |= {each: self._addresses(each) for each in ("tokenizer", "decode", "encode")}
            if self.plan.gateways > 1:
                siblings = tuple(each for each in self._addresses("gateway") if each != child.address)
                settings |= {"shared": self.address, "shared_http": self.http_address, "siblings": siblings}
        for name in ("kv_events", "kv_events_replay"):
            if settings.get(name):
                workers = [each for each in self.children if each.role in ("prefill", "decode")]
                settings[name] = nth_address(settings[name], workers.index(child))
        if role in ("gateway", "decode"):
            settings["prefill"] = self._addresses("prefill")
        return settings

    def _make_secret(self) -> LocalSecret:
        return LocalSecret(self.address)

    async def _start(self) -> None:
        await self.supervisor.start()

    async def __aenter__(self) -> Self:
        try:
            if not self.plan.settings.get("gateway", {}).get("cluster_secret_file"):
                self._secret = self._make_secret()
            self._tasks.append(asyncio.create_task(rotate_logs(self.children)))
            if self.plan.verbose:
                self._tasks.append(asyncio.create_task(follow_logs(self.children, self.console)))
                await self._start()
            else:
                async with start_progress(self.children, self.console):
                    await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        try:
            await self.supervisor.stop()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._claims.close()
            if self._secret is not None:
                self._secret.close()
            if self._own_logs is not None:
                self._own_logs.close()
            from baton.transport.shm import reap_orphans  # here: numpy would delay the start

            reap_orphans()  # of workers that had to be killed
