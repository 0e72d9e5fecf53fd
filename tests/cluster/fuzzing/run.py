"""Sends many cases at a time, and looks at what became of the deployment."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil
from deployment import Deployment

from fuzzing.cases import Case
from fuzzing.credentials import Keys
from fuzzing.send import Ports, Sender, Wrong
from fuzzing.strangers import Stranger

FLAGS = ("--context-length", "64", "--request-seconds", "5", "--max-rows", "16")
"""Of workers: whatever parses as a request ends soon."""
GATEWAY = ("--request-seconds", "5", "--served-name", "model")
AT_A_TIME = 8
IDLE_SECONDS = 15.0
MOST_BYTES = 2 * 2**30
"""Of private memory, for each process: a message that makes it grow shall not take the machine."""
PROMPT = list(range(40, 90))
KEPT = 20


@dataclass
class Report:
    messages: int = 0
    calls: int = 0
    by_target: Counter[str] = field(default_factory=Counter)
    by_way: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failing: list[Case] = field(default_factory=list)
    seconds: float = 0.0
    mib: dict[str, list[float]] = field(default_factory=dict)
    """Process -> memory of its own (anonymous) before, and after each part, in MiB."""

    def summary(self) -> dict[str, Any]:
        return {
            "messages": self.messages,
            "calls": self.calls,
            "messages_by_target": dict(sorted(self.by_target.items())),
            "messages_by_credentials": dict(sorted(self.by_way.items())),
            "seconds": round(self.seconds, 1),
            "anonymous_mib": {name: [round(v, 1) for v in each] for name, each in self.mib.items()},
            "wrong": self.wrong,
        }


class Run:
    """Cases against one deployment, which must come out of it as it went in: the same processes, that hold
    nothing, log no traceback, and answer a good request with the same tokens as before. Strangers leave no
    trace at all: what the processes have counted stays as it was."""

    def __init__(self, deployment: Deployment, keys: Keys | None = None) -> None:
        """keys: cases are sent by strangers, who have not got them; they open the deployment."""
        self.report = Report()
        self.deployment = deployment
        self.keys = keys
        self._runner = asyncio.Runner()  # gRPC's poller belongs to one event loop
        self._good = self._answer()
        self._layout = deployment.prefill.info().layout
        self._lives = self._incarnations()
        for process in deployment.processes:
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        self._weigh()

    @classmethod
    def open(cls, folder: Path, model: Path | str) -> Deployment:
        return Deployment.split(folder, model, worker=FLAGS, gateway_flags=GATEWAY)

    @classmethod
    def closed(cls, folder: Path, model: Path | str, keys: Keys) -> Deployment:
        return cls.open(folder, model).close_to_strangers(keys.secret, keys.api_key)

    def send(
        self,
        cases: Iterable[Case],
        rng: Random,
        sent: Callable[[int], None] = lambda messages: None,
        *,
        leaving: float = 0.2,
    ) -> None:
        """Sends them all; then checks. What is wrong is in the report. leaving: the part of the clients that
        do not wait for answers."""
        started = time.monotonic()
        counted = self._counted()
        self._runner.run(self._send(iter(cases), lambda: rng.random() < leaving, sent))
        self.report.seconds += time.monotonic() - started
        self.check(counted)
        self._weigh()

    async def _send(
        self, cases: Iterator[Case], leaves: Callable[[], bool], sent: Callable[[int], None]
    ) -> None:
        ports = Ports(
            grpc={process.role: process.address for process in self.deployment.processes},
            http=self.deployment.gateway.http,
            incarnations={process.role: process.incarnation for process in self.deployment.processes},
            layout=self._layout,
        )
        sender = Stranger(ports, self.keys) if self.keys is not None else Sender(ports)

        async def follow() -> None:
            for case in cases:
                played = case.played()
                if played.messages:
                    sent(await self._one(sender, played, leaves()))

        try:
            await asyncio.gather(*(follow() for _ in range(AT_A_TIME)))
        finally:
            await sender.close()

    async def _one(self, sender: Sender | Stranger, case: Case, leave: bool) -> int:
        try:
            await sender.send(case, leave=leave)
        except (Wrong, OSError) as error:
            self._found(f"{case.target}: {error}", case)
        count = len(case.messages)
        self.report.calls += 1
        self.report.messages += count
        self.report.by_target[case.place] += count
        if case.way:
            self.report.by_way[case.way] += count
        return count

    def check(self, counted: dict[str, dict[str, Any]]) -> None:
        """What must hold when nothing is sent any more. counted: by the processes, before."""
        try:
            if self._incarnations() != self._lives:
                self._found("a process was started again")
            self.deployment.assert_idle(IDLE_SECONDS)
            if self.keys is not None and (now := self._counted()) != counted:
                self._found(f"strangers have had an effect: {_differences(counted, now)}")
            if self._answer() != self._good:
                self._found("a good request gives other tokens than before")
        except Exception as error:
            self._found(f"{type(error).__name__}: {error}")
        for process in self.deployment.processes:
            log = process.log.read_text(errors="replace")
            if not process.alive:
                self._found(f"{process.name} is gone: {process.tail()}")
            elif "Traceback" in log:
                self._found(f"{process.name} logged a traceback: {process.log}")
            if self.keys is not None and any(part in log for part in self.keys.parts):
                self._found(f"{process.name} logged what opens a door, or part of it: {process.log}")

    def _found(self, what: str, case: Case | None = None) -> None:
        if len(self.report.wrong) < KEPT and what not in self.report.wrong:
            self.report.wrong.append(what)
            if case is not None:
                self.report.failing.append(case)

    def _answer(self) -> list[int]:
        client = self.deployment.client()
        return client.generate(token_ids=PROMPT, max_tokens=8, temperature=0, ignore_eos=True).token_ids

    def _incarnations(self) -> dict[str, int]:
        return {process.name: process.info().incarnation for process in self.deployment.processes}

    def _counted(self) -> dict[str, dict[str, Any]]:
        """By process: its load, but for the time since its last step, and what its steps cost: idle nodes
        measure it anew."""
        found = {}
        for process in self.deployment.processes:
            load = process.load()
            load.ClearField("step_age_ms")
            load.ClearField("step_cost")
            found[process.name] = {field.name: str(value) for field, value in load.ListFields()}
        return found

    def _weigh(self) -> None:
        for process in self.deployment.processes:
            if process.alive:
                memory = psutil.Process(process.pid).memory_info()
                self.report.mib.setdefault(process.name, []).append((memory.rss - memory.shared) / 2**20)


def _differences(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> str:
    return "; ".join(
        f"{name}'s {what} was {before[name].get(what, 0)}, is {now[name].get(what, 0)}"
        for name in now
        for what in sorted(before[name].keys() | now[name].keys())
        if before[name].get(what) != now[name].get(what)
    )
