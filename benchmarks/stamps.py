"""Runs `baton serve` with time stamps at the events of a hand-off, for benchmarks/handoff.py.

    python benchmarks/stamps.py serve prefill ...

Appends a line `WHAT SECONDS` (monotonic clock, which the processes of a machine share) to the file PID in the
folder that HANDOFF_STAMPS names. Stamps do not name their request, so send one request at a time.

Random weights differ with the number of ranks, which nodes refuse to mix; here they do mix: what is measured
does not depend on them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from baton.cli.main import main
from baton.engine.step_builder import Step
from baton.engine.step_loop import StepPipeline
from baton.handoff.messages import FirstSampled
from baton.worker import engine, peers
from baton.worker.peers import PullTask
from baton.worker.prefill import shell
from baton.worker.prefill.core import PrefillCore

EVENTS = ("read", "sent", "received", "pull", "pulled", "launching", "launched")
"""read, sent: a prefill node has read the results of a prompt's last chunk; its first token is in a message.
received, pull, pulled, launching, launched: a decode node has received that message; its last pull begins to
copy, has ended; the first decode step with the request is planned, is launched."""
DRAFTS = "drafts"
"""Beside `launching`, where the step's rows carry drafts."""

_commit = PrefillCore.commit
_events_of = shell.events_of
_events_from = peers.events_from
_copied = PullTask._copied
_launch = StepPipeline._launch
_layout = engine.layout_message


def stamped(file: int) -> None:
    """Puts the stamps in."""

    def stamp(what: str, now: float | None = None) -> None:
        os.write(file, f"{what} {time.monotonic() if now is None else now!r}\n".encode())

    def commit(self: PrefillCore, step: Step, result: Any, now: float) -> None:
        _commit(self, step, result, now)
        if any(isinstance(output, FirstSampled) for _, output in self.leases.outputs):
            stamp("read", now)

    def events_of(output: Any) -> Iterator[Any]:
        made = _events_of(output)
        if isinstance(output, FirstSampled):
            stamp("sent")
        return made

    def events_from(*arguments: Any) -> Iterator[Any]:
        for message in _events_from(*arguments):
            if isinstance(message, FirstSampled):
                stamp("received")
            yield message

    def copied(self: PullTask, receiver: Any, seconds: float) -> None:
        now = time.monotonic()  # before the step thread is notified
        stamp("pull", now - seconds)
        stamp("pulled", now)
        _copied(self, receiver, seconds)

    def launch(self: StepPipeline[Any], step: Step) -> Any:
        decoded = [row for row in step.plan.rows if row.tokens is None]
        decodes = bool(decoded)
        if decodes:
            now = time.monotonic()
            stamp("launching", now)
            if any(row.drafts for row in decoded):
                stamp(DRAFTS, now)
        launched = _launch(self, step)
        if decodes:
            stamp("launched")
        return launched

    PrefillCore.commit = commit  # type: ignore[method-assign]
    shell.events_of = events_of
    peers.events_from = events_from  # type: ignore[attr-defined]
    PullTask._copied = copied  # type: ignore[method-assign]
    StepPipeline._launch = launch  # type: ignore[method-assign]
    engine.layout_message = lambda layout, fingerprint, *more: _layout(layout, "", *more)


if __name__ == "__main__":
    folder = os.environ["HANDOFF_STAMPS"]
    stamped(os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    main()
