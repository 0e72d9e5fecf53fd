"""Actors of Ray's that run `baton serve`, one process each. Ray's dashboard lists them by role and name."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import ray

from baton.cli.deployment import free_ports
from baton.cli.progress import MAX_LOG_BYTES
from baton.cli.supervisor import SERVE, Child, ChildError

SILENCE_SECONDS = 1.0
"""A call for the log returns nothing after this time without a line."""
READ_BYTES = 2**20


class HostedChild(Child):
    """The process beside an actor. Its log is known to the supervisor by another name."""

    def _with_log(self, what: str, lines: Sequence[str]) -> ChildError:
        return ChildError("\n".join([what, *lines]))


@dataclasses.dataclass(frozen=True, slots=True)
class HostedProcess:
    """Where an actor has started its process."""

    pid: int
    host: str
    port: int
    http_port: int | None
    gpus: str
    """Separated by commas; empty: none."""


class ServeActor:
    """Starts a process on the host where Ray has placed this, watches it and hands its log on. The process
    ends with the actor, by its lifeline. Methods block; Ray calls each in a thread of its own.

    Nothing is left on the host's disk, however this ends: the log and the secret are files without a name,
    which the process opens by /proc."""

    def __init__(
        self, name: str, role: str, folder: str, secret: str, host: str, port: int, http_port: int | None
    ) -> None:
        """folder: the current directory, where it is there. secret: the cluster's; empty: the flags name it.
        host: to bind; empty: the host's address in the cluster, and free ports of it."""
        with contextlib.suppress(OSError):
            os.chdir(folder)
        asyncio.set_event_loop_policy(None)  # uvloop's, where Ray has set it, starts no processes in threads
        self._loop = asyncio.SelectorEventLoop()
        threading.Thread(target=self._loop.run_forever, name="supervise", daemon=True).start()
        self._log, self._read = tempfile.TemporaryFile(), 0  # noqa: SIM115
        self._flags: list[str] = []
        if secret:
            self._secret = tempfile.TemporaryFile()  # noqa: SIM115
            self._secret.write(secret.encode())
            self._secret.flush()
            self._flags += ["--cluster-secret-file", f"/proc/{os.getpid()}/fd/{self._secret.fileno()}"]
        self._claims = contextlib.ExitStack()
        if not host:
            host = ray.util.get_node_ip_address()
            port, http_port = free_ports(host, 2, self._claims)
        # gpus: of those that this actor has reserved; where it has none, no process shall find any.
        self._gpus = ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
        self._child = HostedChild(
            name,
            role,
            folder=Path(f"/proc/{os.getpid()}/fd"),
            host=host,
            port=port,
            http_port=http_port,
            environment={"CUDA_VISIBLE_DEVICES": self._gpus},
        )
        self._child.log = self._child.log.with_name(str(self._log.fileno()))

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def host(self) -> str:
        """The address that the process binds."""
        return self._child.host

    def start(self, command: Sequence[str], seconds: float) -> HostedProcess:
        """command: what follows `baton serve`. Raises ChildError as Child.start does; the process may then
        still be running."""
        self._wait(self._child.start([*SERVE, *command, *self._flags], seconds))
        child = self._child
        return HostedProcess(child.pid, child.host, child.port, child.http_port, self._gpus)

    def ended(self) -> tuple[int, str]:
        """Waits for the process's end; returns its exit code, and how it ended as text."""
        code: int = self._wait(self._child.ended())
        return code, str(self._child.died(code))

    def stop(self, seconds: float) -> None:
        """SIGTERM, and SIGKILL after that time; what a killed process has left in /dev/shm is removed."""
        self._wait(self._child.stop(seconds))
        from baton.transport.shm import reap_orphans  # here: numpy would delay the start

        reap_orphans()

    def kill(self) -> None:
        """SIGKILL."""
        self._child.kill()

    def read_log(self) -> bytes:
        """What has been written since the last call, at most READ_BYTES, as soon as there is something; b"":
        nothing for SILENCE_SECONDS. A long log begins anew; lines written in that moment are lost."""
        descriptor, deadline = self._log.fileno(), time.monotonic() + SILENCE_SECONDS
        while not (text := os.pread(descriptor, READ_BYTES, self._read)) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._read += len(text)
        if self._read > MAX_LOG_BYTES:
            os.truncate(descriptor, 0)
            self._read = 0
        return text


class GatewayActor(ServeActor):
    """A gateway."""


class TokenizerActor(ServeActor):
    """A tokenizer."""


class PrefillActor(ServeActor):
    """A prefill node, all ranks of it."""


class DecodeActor(ServeActor):
    """A decode node, all ranks of it."""


class EncodeActor(ServeActor):
    """An encode node."""


ACTORS: dict[str, type[ServeActor]] = {
    "gateway": GatewayActor,
    "tokenizer": TokenizerActor,
    "prefill": PrefillActor,
    "decode": DecodeActor,
    "encode": EncodeActor,
}
"""By role."""
