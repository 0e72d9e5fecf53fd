"""Progress of a starting deployment, and its log files: their folders and rotation."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from baton.cli.supervisor import Child, ChildState
from baton.cli.surroundings import temporary_folder
from baton.rpc.errors import failed_precondition

_COLOURS = {
    ChildState.HEALTHY: "green",
    ChildState.DIED: "red",
    ChildState.LOADING: "yellow",
    ChildState.STARTING: "yellow",
}
_PREAMBLE = re.compile(r"^((timestamp|level|role)=\S+\s+)+")
"""Beginning of each log line that the table does not repeat."""


def shown_state(child: Child) -> ChildState:
    """The child's state; STARTING is LOADING once it has logged a line."""
    if child.state is ChildState.STARTING and child.last_lines(1):
        return ChildState.LOADING
    return child.state


def detail(child: Child) -> str:
    """The address of a healthy child; the last log line of one that loads."""
    if child.state is ChildState.HEALTHY:
        return child.address
    lines = child.last_lines(1) if child.running else []
    return _PREAMBLE.sub("", lines[0]).strip() if lines else ""


def _table(children: Sequence[Child], started: float, spinner: Spinner) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(width=1)
    table.add_column(width=max(len(child.name) for child in children) + len(" starting"), no_wrap=True)
    table.add_column(width=7, no_wrap=True, justify="right")
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for child in children:
        state = shown_state(child)
        moving = state in (ChildState.STARTING, ChildState.LOADING)
        seconds = (time.monotonic() if moving else child.since) - started
        colour = _COLOURS.get(state, "dim")
        table.add_row(
            spinner if moving else "✓" if state is ChildState.HEALTHY else " ",
            f"{child.name} [{colour}]{state}[/]",
            "" if state is ChildState.WAITING else f"{seconds:.1f} s",
            f"[dim]{escape(detail(child))}[/]",
        )
    return table


async def _show_live(children: Sequence[Child], console: Console) -> None:
    started, spinner = time.monotonic(), Spinner("dots")
    with Live(console=console, auto_refresh=False, transient=False) as live:
        try:
            while True:
                live.update(_table(children, started, spinner), refresh=True)
                await asyncio.sleep(0.1)
        finally:
            live.update(_table(children, started, spinner), refresh=True)


async def _show_lines(children: Sequence[Child], console: Console) -> None:
    started = time.monotonic()
    shown = {child.name: ChildState.WAITING for child in children}

    def print_changes() -> None:
        for child in children:
            state = shown_state(child)
            if state is not shown[child.name]:
                shown[child.name] = state
                address = f" {child.address}" if state is ChildState.HEALTHY else ""
                console.print(
                    f"{time.monotonic() - started:5.1f} s  {child.name} {state}{address}", highlight=False
                )

    try:
        while True:
            print_changes()
            await asyncio.sleep(0.1)
    finally:
        print_changes()


@contextlib.asynccontextmanager
async def start_progress(children: Sequence[Child], console: Console) -> AsyncIterator[None]:
    """Shows the children's states during the block."""
    show = _show_live if console.is_terminal else _show_lines
    task = asyncio.create_task(show(children, console))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


KEPT_FOLDERS = 8
"""How many log folders of ended deployments are kept. Older ones are removed when the next deployment
starts."""
MAX_LOG_BYTES = 16 * 2**20
"""A longer log is moved to NAME.log.1, which is replaced."""
ROTATE_SECONDS = 1.0


class LogFolder:
    """A new folder for the logs of one deployment. It stays after the deployment's end. Its lock is held
    until `close` and marks it as in use."""

    def __init__(self) -> None:
        """Removes the oldest folders of earlier deployments. Raises BatonError."""
        began = datetime.now().strftime("%Y%m%d-%H%M%S-%f")  # in order, also within a second
        try:
            parent = _parent()
            self.path = Path(tempfile.mkdtemp(prefix=f"{began}-", dir=parent))
        except OSError as error:
            text = f"no folder for logs can be made: {error}"
            raise failed_precondition(
                f"{text}; give one (baton up --log-dir), or set XDG_STATE_HOME"
            ) from None
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        ended = [folder for folder in sorted(parent.iterdir()) if not _in_use(folder)]
        for folder in ended[:-KEPT_FOLDERS]:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        os.close(self._descriptor)


def _parent() -> Path:
    """~/.local/state/baton/logs; a folder of this user in /tmp if that cannot be written."""
    state = os.environ.get("XDG_STATE_HOME", "")
    parent = Path(state or Path.home() / ".local" / "state") / "baton" / "logs"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        parent = temporary_folder("logs-")
    return parent


def _in_use(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def rotate(log: Path) -> None:
    """Copies a log longer than MAX_LOG_BYTES and truncates it. Its process appends, and so writes on at the
    start. Lines written between the copy and the truncation are lost."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


async def rotate_logs(children: Sequence[Child]) -> None:
    """Rotates the children's logs until cancelled."""
    while True:
        await asyncio.sleep(ROTATE_SECONDS)
        for child in children:
            with contextlib.suppress(OSError):  # a full disk must not end a deployment
                rotate(child.log)


async def follow_logs(children: Sequence[Child], console: Console) -> None:
    """Prints the children's logs, each line with its process's name, until cancelled."""
    offsets: defaultdict[str, int] = defaultdict(int)
    while True:
        width = max(len(child.name) for child in children)
        for child in children:
            if not child.log.exists():
                continue
            with child.log.open("rb") as log:
                if os.fstat(log.fileno()).st_size < offsets[child.name]:
                    offsets[child.name] = 0  # it was rotated
                log.seek(offsets[child.name])
                text = log.read()
            end = text.rfind(b"\n") + 1  # a line still being written waits for its end
            offsets[child.name] += end
            for line in text[:end].decode(errors="replace").splitlines():
                console.print(f"{child.name:{width}}  {line}", highlight=False, markup=False, soft_wrap=True)
        await asyncio.sleep(0.2)
