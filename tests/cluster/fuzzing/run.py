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
from fuzzing.send import Sender, Wrong

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
            "seconds": round(self.seconds, 1),
            "anonymous_mib": {name: [round(v, 1) for v in each] for name, each in self.mib.items()},
            "wrong": self.wrong,
        }


class Run:
    """Cases against one deployment, which must come out of it as it went in: the same processes, that hold
    nothing, log no traceback, and answer a good request with the same tokens as before."""

    def __init__(self, deployment: Deployment) -> None:
        self.report = Report()
        self._deployment = deployment
        self._runner = asyncio.Runner()  # gRPC's poller belongs to one event loop
        self._good = self._answer()
        self._lives = self._incarnations()
        for process in deployment.processes:
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        self._weigh()

    @staticmethod
    def deployment(folder: Path, model: Path | str) -> Deployment:
        return Deployment.split(folder, model, worker=FLAGS, gateway_flags=GATEWAY)

    def send(
        self, cases: Iterable[Case], rng: Random, sent: Callable[[int], None] = lambda messages: None
    ) -> None:
        """Sends them all; then checks. What is wrong is in the report."""
        started = time.monotonic()
        self._runner.run(self._send(iter(cases), rng, sent))
        self.report.seconds += time.monotonic() - started
        self.check()
        self._weigh()

    async def _send(self, cases: Iterator[Case], rng: Random, sent: Callable[[int], None]) -> None:
        nodes = self._deployment.processes
        sender = Sender(
            {node.role: node.address for node in nodes},
            self._deployment.gateway.http,
            self._deployment.prefill.info().layout,
        )

        async def follow() -> None:
            for case in cases:
                played = case.played()
                if played.messages:
                    sent(await self._one(sender, played, rng.random() < 0.2))

        try:
            await asyncio.gather(*(follow() for _ in range(AT_A_TIME)))
        finally:
            await sender.close()

    async def _one(self, sender: Sender, case: Case, leave: bool) -> int:
        try:
            count = await sender.send(case, leave=leave)
        except (Wrong, OSError) as error:
            self._found(f"{case.target}: {error}", case)
            count = len(case.messages)
        self.report.calls += 1
        self.report.messages += count
        self.report.by_target[case.target] += count
        return count

    def check(self) -> None:
        """What must hold when nothing is sent any more."""
        try:
            if self._incarnations() != self._lives:
                self._found("a process was started again")
            self._deployment.assert_idle(IDLE_SECONDS)
            if self._answer() != self._good:
                self._found("a good request gives other tokens than before")
        except Exception as error:
            self._found(f"{type(error).__name__}: {error}")
        for process in self._deployment.processes:
            if not process.alive:
                self._found(f"{process.name} is gone: {process.tail()}")
            elif "Traceback" in process.log.read_text(errors="replace"):
                self._found(f"{process.name} logged a traceback: {process.log}")

    def _found(self, what: str, case: Case | None = None) -> None:
        if len(self.report.wrong) < KEPT and what not in self.report.wrong:
            self.report.wrong.append(what)
            if case is not None:
                self.report.failing.append(case)

    def _answer(self) -> list[int]:
        client = self._deployment.client()
        return client.generate(token_ids=PROMPT, max_tokens=8, temperature=0, ignore_eos=True).token_ids

    def _incarnations(self) -> dict[str, int]:
        return {process.name: process.info().incarnation for process in self._deployment.processes}

    def _weigh(self) -> None:
        for process in self._deployment.processes:
            if process.alive:
                memory = psutil.Process(process.pid).memory_info()
                self.report.mib.setdefault(process.name, []).append((memory.rss - memory.shared) / 2**20)
