"""Shows children on their way to health: a live table on a terminal, a line a change elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from baton.cli.supervisor import Child, State

_COLOURS = {State.HEALTHY: "green", State.DIED: "red", State.LOADING: "yellow", State.STARTING: "yellow"}
_PREAMBLE = re.compile(r"^((timestamp|level|role)=\S+\s+)+")
"""What each log line begins with and the table shows anyway."""


def shown_state(child: Child) -> State:
    """STARTING becomes LOADING with the first line of the log."""
    if child.state is State.STARTING and child.last_lines(1):
        return State.LOADING
    return child.state


def detail(child: Child) -> str:
    """The address of a healthy child; what one that loads said last."""
    if child.state is State.HEALTHY:
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
        moving = state in (State.STARTING, State.LOADING)
        seconds = (time.monotonic() if moving else child.since) - started
        colour = _COLOURS.get(state, "dim")
        table.add_row(
            spinner if moving else "✓" if state is State.HEALTHY else " ",
            f"{child.name} [{colour}]{state}[/]",
            "" if state is State.WAITING else f"{seconds:.1f} s",
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
    shown = {child.name: State.WAITING for child in children}

    def print_changes() -> None:
        for child in children:
            state = shown_state(child)
            if state is not shown[child.name]:
                shown[child.name] = state
                address = f" {child.address}" if state is State.HEALTHY else ""
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
    """Shows the children's states for as long as the block runs."""
    show = _show_live if console.is_terminal else _show_lines
    task = asyncio.create_task(show(children, console))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
