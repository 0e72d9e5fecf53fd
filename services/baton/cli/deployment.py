"""A whole deployment on this machine, as an asynchronous context manager: its ports, GPUs and processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from baton.bench.machine import visible_gpus
from baton.cli.local_secret import LocalSecret
from baton.cli.nodes import CLUSTER_FIELDS
from baton.cli.options import read_config
from baton.cli.progress import LogFolder, follow_logs, rotate_logs, start_progress
from baton.cli.supervisor import SERVE, Child, Supervisor
from baton.config import NodeConfig, WorkerConfig
from baton.rpc.address import family_of, join_address, loopback, split_address
from baton.rpc.authentication import Cluster
from baton.rpc.channel import Dial, open_channel

PORTS = range(10_000, 20_000)


class SharedPort:
    """A port that several processes of this user are to listen on (SO_REUSEPORT). Held without listening, so
    that nobody else gets it, until `close`."""

    def __init__(self, host: str, port: int) -> None:
        """port: 0: a free one. Raises OSError."""
        self._socket = socket.socket(family_of(host))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind((host.strip("[]"), port))
        except OSError:
            self._socket.close()
            raise
        self.address = join_address(host, self._socket.getsockname()[1])
        """host:port as bound."""

    def close(self) -> None:
        self._socket.close()


def free_ports(host: str, count: int) -> list[int]:
    """Different ports of the address that nobody uses now. They are below the range from which the system
    takes ports for connections (ip_local_port_range), so that they are still free when a process binds them.
    Raises OSError when there are not so many."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            return found
        with contextlib.suppress(OSError), socket.socket(family_of(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            found.append(port)
    raise OSError(f"{host} has no {count} free ports from {PORTS.start} to {PORTS.stop - 1}")


@dataclass(frozen=True, slots=True)
class GpuShare:
    """A GPU, and what the worker's process is started with so that it sees that one alone."""

    gpu: str
    """As CUDA_VISIBLE_DEVICES names it."""
    sharing: int
    """Workers on it."""

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": self.gpu}

    def flags(self, given: bool) -> tuple[str, ...]:
        """Workers that share a GPU share its memory; `given`: somebody has said how much each may take."""
        if given or self.sharing == 1:
            return ()
        return ("--memory-fraction", f"{WorkerConfig().memory_fraction / self.sharing:.3f}")


def assign_gpus(workers: Sequence[str], gpus: Sequence[str]) -> dict[str, GpuShare]:
    """Worker -> its share: in turn over the GPUs, so that neighbours lie apart. Empty without GPUs."""
    if not gpus:
        return {}
    turn = [gpus[number % len(gpus)] for number in range(len(workers))]
    return {name: GpuShare(gpu, turn.count(gpu)) for name, gpu in zip(workers, turn, strict=True)}


def wants_gpu(flags: Sequence[str], role: str) -> bool:
    """Whether workers with these flags take any GPU that they see; one that names its own keeps it."""
    return value_of(flags, role, "device") in ("cuda", "auto", None)


def value_of(flags: Sequence[str], role: str, name: str) -> str | None:
    """What a worker's flags, or the file that they name, say about an option; None: nothing."""
    flag = "--" + name.replace("_", "-")
    if flag in flags:
        return flags[len(flags) - flags[::-1].index(flag)]
    if "--config" in flags:
        values = read_config(Path(flags[flags.index("--config") + 1]), role)
        return str(values[name]) if name in values else None
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """What to start."""

    prefill: int = 1
    """Prefill nodes; 0: aggregated, decode nodes compute prompts themselves."""
    decode: int = 1
    gateways: int = 1
    """Several share the ports."""
    host: str = ""
    """Address that the gateway binds; empty: the loopback, as the other processes do."""
    port: int = 0
    http_port: int | None = 0
    flags: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Role -> more flags of `baton serve ROLE`."""
    program: tuple[str, ...] = SERVE
    """What runs a process, given its role and flags."""
    log_folder: Path | None = None
    """None: a new one (log_files.LogFolder)."""
    restart: bool = True
    start_seconds: float = 600.0
    drain_seconds: float = 5.0
    verbose: bool = False
    """Print the children's logs."""


class Deployment:
    """`async with Deployment(plan, console)`: all processes are healthy inside, and gone afterwards.

    Unless the plan names a cluster secret one is drawn, which this user's commands find (local_secret).
    """

    def __init__(self, plan: DeploymentPlan, console: Console) -> None:
        """Raises BatonError when the files of the cluster's certificates cannot be used."""
        self.plan = plan
        self.console = console
        self._own_logs = LogFolder() if plan.log_folder is None else None
        self.log_folder = folder = self._own_logs.path if self._own_logs else plan.log_folder or Path()
        folder.mkdir(parents=True, exist_ok=True)
        self._loopback = loopback()
        self.gpu_shares = _gpu_shares(plan)
        self._secret: LocalSecret | None = None
        self._shared: list[SharedPort] = []
        """Of the gateways, if there are several: gRPC, and HTTP if there is any."""
        dial = _cluster(plan).dial
        names = [("tokenizer", "tokenizer"), *_workers(plan)]
        ports = free_ports(self._loopback, len(names))
        self.children = [
            *(self._backend(*name, port, dial) for name, port in zip(names, ports, strict=True)),
            *self._gateways(),
        ]
        self.supervisor = Supervisor(
            self.children,
            self._arguments,
            program=plan.program,
            restart=plan.restart,
            start_seconds=plan.start_seconds,
            drain_seconds=plan.drain_seconds,
            report=lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True),
        )
        self._tasks: list[asyncio.Task[None]] = []

    def _backend(self, name: str, role: str, port: int, dial: Dial) -> Child:
        """A tokenizer, prefill or decode node."""
        share = self.gpu_shares.get(name)
        return Child(
            name,
            role,
            folder=self.log_folder,
            host=self._loopback,
            port=port,
            environment=share.environment if share is not None else {},
            dial=dial,
        )

    def _gateways(self) -> list[Child]:
        """One; or several, each with ports of its own on the loopback beside those that they share."""
        plan = self.plan
        # Whether the CA of its certificate is known here is the user's business.
        dial = None if _given(plan, "gateway", "tls_cert") else open_channel
        host = plan.host or self._loopback

        def gateway(name: str, host: str, port: int, http_port: int | None) -> Child:
            return Child(
                name, "gateway", folder=self.log_folder, host=host, port=port, http_port=http_port, dial=dial
            )

        if plan.gateways == 1:
            return [gateway("gateway", host, plan.port, plan.http_port)]
        shared = [plan.port] if plan.http_port is None else [plan.port, plan.http_port]
        self._shared = [SharedPort(host, port) for port in shared]
        http_port = None if plan.http_port is None else 0
        return [
            gateway(f"gateway-{number}", self._loopback, port, http_port)
            for number, port in enumerate(free_ports(self._loopback, plan.gateways))
        ]

    @property
    def gateways(self) -> list[Child]:
        return [child for child in self.children if child.role == "gateway"]

    @property
    def address(self) -> str:
        """host:port of the gateways' gRPC server."""
        return self._shared[0].address if self._shared else self.gateways[0].address

    @property
    def http_address(self) -> str:
        """host:port of the gateways' HTTP server; empty: there is none."""
        return self._shared[-1].address if len(self._shared) > 1 else self.gateways[0].http_address

    def _addresses(self, role: str) -> str:
        return ",".join(child.fixed_address for child in self.children if child.role == role)

    def _arguments(self, child: Child) -> list[str]:
        flags = ["--drain-seconds", str(self.plan.drain_seconds), "--advertise", ""]
        given = self.plan.flags.get(child.role, ())
        flags += given
        if self._secret is not None:
            flags += ["--cluster-secret-file", str(self._secret.path)]
        share = self.gpu_shares.get(child.name)
        if share is not None:
            flags += share.flags(value_of(given, child.role, "memory_fraction") is not None)
        if child.role == "gateway":
            flags += self._sharing(child)
            flags += ["--tokenizer", self._addresses("tokenizer"), "--decode", self._addresses("decode")]
        if child.role in ("gateway", "decode"):
            flags += ["--prefill", self._addresses("prefill")]
        return flags

    def _sharing(self, child: Child) -> list[str]:
        siblings = [each.fixed_address for each in self.gateways if each is not child]
        names = ("--shared", "--shared-http")
        flags = [
            word for name, port in zip(names, self._shared, strict=False) for word in (name, port.address)
        ]
        return [*flags, "--siblings", ",".join(siblings)] if flags else []

    async def __aenter__(self) -> Self:
        try:
            if not _given(self.plan, "gateway", "cluster_secret_file"):
                self._secret = LocalSecret()
            self._tasks.append(asyncio.create_task(rotate_logs(self.children)))
            if self.plan.verbose:
                self._tasks.append(asyncio.create_task(follow_logs(self.children, self.console)))
                await self.supervisor.start()
            else:
                async with start_progress(self.children, self.console):
                    await self.supervisor.start()
            if self._secret is not None:
                self._secret.name(split_address(self.address)[1])
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
            if self._secret is not None:
                self._secret.close()
            if self._own_logs is not None:
                self._own_logs.close()
            for port in self._shared:
                port.close()


def _workers(plan: DeploymentPlan) -> list[tuple[str, str]]:
    """Name and role of each worker."""
    counts = (("prefill", plan.prefill), ("decode", plan.decode))
    return [(f"{role}-{number}", role) for role, count in counts for number in range(count)]


def _given(plan: DeploymentPlan, role: str, name: str) -> str:
    """What the plan's flags say about an option; empty: nothing."""
    return value_of(plan.flags.get(role, ()), role, name) or ""


def _cluster(plan: DeploymentPlan) -> Cluster:
    """What the plan's flags say about it."""
    given: dict[str, Any] = {name: _given(plan, "tokenizer", name) for name in CLUSTER_FIELDS}
    return Cluster.load(NodeConfig(**given))


def _gpu_shares(plan: DeploymentPlan) -> dict[str, GpuShare]:
    """Of the workers that take any GPU."""
    workers = [name for name, role in _workers(plan) if wants_gpu(plan.flags.get(role, ()), role)]
    return assign_gpus(workers, visible_gpus() if workers else [])
