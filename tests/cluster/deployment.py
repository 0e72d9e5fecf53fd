"""A deployment of real processes on this machine, for tests.

    with Deployment(folder, model) as deployment:          # tokenizer, one prefill, one decode, one gateway
        deployment.client().generate("hello")
        deployment.assert_idle()

`Deployment.add_*` makes others: several gateways may lead to different workers.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil
from process import Process

from baton.authentication.cluster import HEADER
from baton.client import Client
from baton.v1 import node_pb2

STEP_COST = Path(tempfile.gettempdir()) / f"baton-tests-{os.getpid()}.step-cost"
"""What one worker of a session has measured others use: most of the time that a forked one takes to start."""
atexit.register(STEP_COST.unlink, missing_ok=True)  # by the process that collects; lanes end without this
IDLE_SECONDS = 5.0
"""Half of what a lease outlives its holder by default: what only its end frees is found."""


class Deployment:
    """Processes that belong together. Workers start in parallel, gateways after them."""

    def __init__(self, folder: Path, model: Path | str) -> None:
        self.folder = folder
        self.model = str(model)
        self.processes: list[Process] = []
        self._clients: list[Client] = []
        self._api_key = ""
        self.tokenizer = self._add("tokenizer", ["--model", self.model, "--threads", "1"])
        self._late: list[tuple[Process, Sequence[Process], Sequence[Process]]] = []

    def _add(self, role: str, flags: Sequence[str]) -> Process:
        number = sum(1 for process in self.processes if process.role == role)
        process = Process(role, f"{role}-{number}", list(flags), self.folder)
        self.processes.append(process)
        return process

    def add_worker(self, role: str, *flags: str) -> Process:
        # Which prompts are handed off is fixed: small as they are here, the gateway would hand off few.
        own = ["--local-prefill-tokens", "32"] if role == "decode" else []
        if "--step-profile" not in flags:
            own += ["--step-cost", str(STEP_COST)]
        return self._add(role, ["--model", self.model, "--threads", "1", *own, *flags])

    def add_encode(self) -> Process:
        """All gateways use it."""
        return self._add("encode", ["--model", self.model, "--threads", "1", "--embeddings-mib", "16"])

    def add_gateway(self, decode: Sequence[Process], prefill: Sequence[Process] = (), *flags: str) -> Process:
        """prefill: empty means aggregated, as decode nodes here have no prefill nodes of their own."""
        gateway = self._add("gateway", list(flags))
        self._late.append((gateway, decode, prefill))
        return gateway

    @classmethod
    def split(
        cls,
        folder: Path,
        model: Path | str,
        *,
        prefill: int = 1,
        decode: int = 1,
        worker: Sequence[str] = (),
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        gateway_flags: Sequence[str] = (),
    ) -> Deployment:
        """The usual one. `prefill=0`: aggregated."""
        self = cls(folder, model)
        prefills = [self.add_worker("prefill", *worker, *prefill_flags) for _ in range(prefill)]
        decodes = [self.add_worker("decode", *worker, *decode_flags) for _ in range(decode)]
        self.add_gateway(decodes, prefills, *gateway_flags)
        return self

    def close_to_strangers(self, secret: str, api_key: str) -> Deployment:
        """Before the start: a secret between the processes, a key for the gateway's clients."""
        for name, content in (("secret", secret), ("keys", api_key)):
            path = self.folder / name
            path.touch(0o600)
            path.write_text(content + "\n")
        self._api_key = api_key
        for process in self.processes:
            process.flags += ["--cluster-secret-file", str(self.folder / "secret")]
            process.metadata = ((HEADER, secret),)
        for gateway, _, _ in self._late:
            gateway.flags += ["--api-keys", str(self.folder / "keys")]
        return self

    # --- life -------------------------------------------------------------------------------------------

    def start(self) -> Deployment:
        try:
            gateways = {gateway for gateway, _, _ in self._late}
            first = [process for process in self.processes if process not in gateways]
            self.start_all(first)
            for gateway, decode, prefill in self._late:
                gateway.flags += ["--tokenizer", ",".join(each.address for each in self.of("tokenizer"))]
                gateway.flags += ["--decode", ",".join(process.address for process in decode)]
                if prefill:
                    gateway.flags += ["--prefill", ",".join(process.address for process in prefill)]
                if encode := self.of("encode"):
                    gateway.flags += ["--encode", ",".join(process.address for process in encode)]
            self.start_all(sorted(gateways, key=lambda process: process.name))
        except BaseException:
            self._abandon()
            raise
        return self

    @staticmethod
    def start_all(processes: Sequence[Process]) -> None:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_ready()

    def _abandon(self) -> None:
        for process in self.processes:
            if process.alive:
                process.kill()

    def stop(self) -> None:
        """Ends all processes; fails unless they end well and leave nothing behind."""
        for client in self._clients:
            client.close()
        running = [process for process in self.processes if process.alive]
        order = ("gateway", "decode", "prefill", "encode", "tokenizer")
        codes, listening = {}, []
        try:
            for process in sorted(running, key=lambda process: order.index(process.role)):
                children = psutil.Process(process.pid).children(recursive=True)
                codes[process.name] = process.stop()
                # Who listens may be another: the system soon gives free ports to processes of other lanes.
                if process.listening() and psutil.wait_procs(children, timeout=5)[1]:
                    listening.append(process.name)
        finally:
            self._abandon()
        assert not any(codes.values()), codes
        left = [str(path) for process in running for path in process.segments()]
        assert not left, f"shared memory is left: {left}"
        assert not listening, f"ports still listening: {listening}"

    def __enter__(self) -> Deployment:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        else:
            self._abandon()

    # --- use --------------------------------------------------------------------------------------------

    def of(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role]

    @property
    def gateway(self) -> Process:
        return self.of("gateway")[0]

    @property
    def decode(self) -> Process:
        return self.of("decode")[0]

    @property
    def prefill(self) -> Process:
        return self.of("prefill")[0]

    def client(self, gateway: Process | None = None) -> Client:
        """Closed when the deployment stops."""
        client = Client((gateway or self.gateway).outside, api_key=self._api_key)
        self._clients.append(client)
        return client

    @property
    def alive(self) -> bool:
        return any(process.alive for process in self.processes)

    def assert_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Nothing is held in any running process after at most `seconds`; every page is free or cached."""
        deadline = time.monotonic() + seconds
        waiting = [process for process in self.processes if process.alive]
        while True:
            held = {process.name: what for process in waiting if (what := held_by(process.load()))}
            if not held:
                return
            assert time.monotonic() < deadline, f"still held after {seconds:g} s: {held}"
            waiting = [process for process in waiting if process.name in held]


def held_by(load: node_pb2.Load) -> dict[str, int]:
    """What a process holds that it must not hold at idle; empty: it is idle."""
    names = ("requests", "waiting", "prefilling", "handing_off", "running", "leases", "pulls", "rows")
    held = {name: getattr(load, name) for name in names}
    held |= {name: getattr(load.pages, name) for name in ("owned", "quarantined", "reserved")}
    held["pages unaccounted for"] = load.pages.total - load.pages.free - load.pages.cached
    return {name: count for name, count in held.items() if count}
