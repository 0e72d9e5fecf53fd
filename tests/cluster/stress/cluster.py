"""Two processes of each kind and a gateway; a process that is started again returns at its own address."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from deployment import Deployment
from process import Process

GRACE_SECONDS = 1.5
"""Of a lease: stalls last longer."""
REQUEST_SECONDS = 60
"""Deadline of a request that names none, such as each over HTTP."""
GATEWAY = ("--request-seconds", str(REQUEST_SECONDS), "--silence-seconds", "3")
WORKER = ("--token-budget", "256", "--max-rows", "64", "--drain-seconds", "3")
ON_GPU = ("--device", "cuda", "--dtype", "float32")


class Cluster(Deployment):
    """Ports are reserved for the cluster's life: while a process is gone nobody else is given its port. (A
    socket that is bound and does not listen keeps a port from being handed out; with SO_REUSEADDR on both
    sides the process can still bind it.)"""

    def __init__(
        self,
        folder: Path,
        model: Path | str,
        *,
        nodes: int = 2,
        tokenizers: int = 2,
        kv_tokens: int = 32768,
        tp: int = 1,
        gpus: Sequence[str] = (),
        host_memory: str = "",
        disk: str = "",
        routing: str = "cache",
    ) -> None:
        """`tp`: ranks of each worker. `host_memory`, `disk`: sizes of the tiers of each worker; all share one
        directory. Empty: they have none. `routing`: of the gateway. `gpus`: as CUDA_VISIBLE_DEVICES names
        them; workers take them in turn, prefill and decode nodes alike."""
        super().__init__(folder, model)
        self.tokenizer.flags += ["--drain-seconds", "3"]
        for _ in range(tokenizers - 1):
            self._add("tokenizer", list(self.tokenizer.flags))
        grace = ("--lease-grace-seconds", str(GRACE_SECONDS))
        worker = (*WORKER, "--kv-tokens", str(kv_tokens), "--tp", str(tp), *(ON_GPU if gpus else ()))
        if host_memory:
            worker += ("--host-memory", host_memory)
        if disk:
            worker += ("--disk", str(folder / "disk"), "--disk-size", disk)
        prefill = [self.add_worker("prefill", *worker, *grace) for _ in range(nodes)]
        decode = [self.add_worker("decode", *worker, "--handoff-seconds", "6") for _ in range(nodes)]
        for workers in (prefill, decode):
            for process, gpu in zip(workers, itertools.cycle(gpus), strict=False):
                process.environment["CUDA_VISIBLE_DEVICES"] = gpu
        self.add_gateway(decode, prefill, *GATEWAY, "--routing", routing)
        self._reserved = [self._reserve(process) for process in self.processes]
        self.incarnations: dict[int, str] = {}
        """Of every process that ever ran here."""

    @staticmethod
    def _reserve(process: Process) -> socket.socket:
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        process.address = f"127.0.0.1:{held.getsockname()[1]}"
        return held

    def start(self) -> Cluster:
        super().start()
        self.note_incarnations()
        return self

    def note_incarnations(self) -> None:
        self.incarnations |= {process.incarnation: process.name for process in self.processes}

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            for held in self._reserved:
                held.close()
        left = [
            str(path) for each in self.incarnations for path in Path("/dev/shm").glob(f"baton-*{each:016x}")
        ]
        assert not left, f"shared memory is left: {left}"

    def siblings(self, process: Process) -> list[Process]:
        return [other for other in self.of(process.role) if other is not process]

    async def in_touch(self, process: Process, seconds: float = 30.0) -> None:
        """Waits until somebody who calls the process has reached this life of it."""
        callers = self.of("decode") if process.role == "prefill" else [self.gateway]
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(lambda: any(_knows(caller, process) for caller in callers)):
            assert time.monotonic() < deadline, f"nobody has reached {process.name} in {seconds:g} s"
            await asyncio.sleep(0.1)


def _knows(caller: Process, process: Process) -> bool:
    try:
        peers = caller.info().peers
    except (grpc.RpcError, ValueError):  # it is stalled, gone, or its channel is being closed
        return False
    return any(peer.connected and peer.incarnation == process.incarnation for peer in peers)
