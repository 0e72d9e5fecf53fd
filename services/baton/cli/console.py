"""Output and exit of commands: answers, tables, errors as one line, signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from baton.authentication.client_credentials import CA_VARIABLE, KEY_VARIABLE
from baton.cli.config_fields import fields_of
from baton.cli.options import fail
from baton.cli.supervisor import ChildError
from baton.client import AsyncStream, BatonError, Completion, Delta, Stats, Stream, Usage
from baton.config import NodeConfig
from baton.slo import tpot

UNLIMITED = 1000
"""Columns of a line that nobody wraps, as in a pipe."""
SECRET_VARIABLE = fields_of(NodeConfig)["cluster_secret_file"].variable


class StreamedAnswer:
    """A running or ended request. Times are seconds of the client's monotonic clock."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.arrivals: list[tuple[float, int]] = []
        """Time and number of new tokens, for each message."""
        self.completion = Completion()

    def take(self, delta: Delta) -> None:
        """Records the arrival of new tokens."""
        if delta.token_ids:
            self.arrivals.append((time.monotonic(), len(delta.token_ids)))

    @property
    def usage(self) -> Usage:
        return self.completion.usage or Usage(0, 0, 0)

    @property
    def stats(self) -> Stats:
        return self.completion.stats or Stats(0.0, 0.0, "", "", "", 0, 0, 0, 0, 0)

    @property
    def ttft(self) -> float:
        """Seconds from the request to its first token."""
        return self.arrivals[0][0] - self.started if self.arrivals else float("nan")

    @property
    def tpot(self) -> float:
        """Mean seconds per output token, the first excluded; nan for fewer than two."""
        found = tpot(self.arrivals)
        return float("nan") if found is None else found


def write(text: str) -> None:
    """To stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def collect(stream: Stream, show: bool = False) -> StreamedAnswer:
    """Reads to the end; `show` streams the text to stdout. Raises BatonError."""
    answer = StreamedAnswer()
    for delta in stream:
        answer.take(delta)
        if show:
            write(delta.text)
    answer.completion = stream.so_far
    return answer


async def collect_async(stream: AsyncStream, show: bool = False) -> StreamedAnswer:
    """`collect` for asyncio."""
    answer = StreamedAnswer()
    async with stream:
        async for delta in stream:
            answer.take(delta)
            if show:
                write(delta.text)
    answer.completion = stream.so_far
    return answer


def explain(error: BatonError, server: str) -> str:
    """One line that says what to do."""
    if error.reason == "UNAVAILABLE" and "connect" in error.message:
        return no_gateway(server, error.message.rpartition(": ")[2])
    if error.reason in ("MISSING_API_KEY", "INVALID_API_KEY"):
        return f"{server} takes an API key that it knows, from {KEY_VARIABLE} ({error.reason})"
    return f"{error.message} ({error.reason})"


def no_gateway(server: str, why: str) -> str:
    """The error of a failed connection."""
    if why == "Socket closed":
        return f"{server} closed the connection; if it speaks TLS, name its certificate's CA in {CA_VARIABLE}"
    if "http1.x" in why or "HTTP/2" in why:
        return f"{server} does not speak gRPC ({why}): give the gateway's gRPC port, by default 50050"
    if "certificate" in why:
        return f"{server} is not trusted ({why}): name a host of its certificate, and its CA in {CA_VARIABLE}"
    if "cluster secret" in why:
        return f"{server} takes its deployment's secret, from the file that {SECRET_VARIABLE} names ({why})"
    return f"no gateway at {server} ({why}); start one with 'baton up', or name it with --server"


def milliseconds(seconds: float) -> str:
    """ "12.3 ms"; "-" for nan."""
    return f"{seconds * 1000:.1f} ms" if seconds == seconds else "-"


def size(count: int) -> str:
    """Bytes in a readable unit: "2.5 MiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def run_until_signal(main: Callable[[], Coroutine[Any, Any, int]], interrupted: int = 130) -> int:
    """Runs `main` in an event loop; returns its result, or `interrupted` after a signal.

    SIGINT, SIGTERM and SIGHUP cancel it. A second one cancels it again: a deployment then kills its processes
    and does not wait for them.
    """

    async def run() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(main())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            return await task
        return interrupted

    return asyncio.run(run())


def run_command(
    main: Callable[[], Coroutine[Any, Any, int]], *, server: str = "", interrupted: int = 130
) -> NoReturn:
    """Runs `main` and exits with its result; after a ChildError or BatonError with 1 and a line on stderr."""
    try:
        raise SystemExit(run_until_signal(main, interrupted))
    except ChildError as error:
        fail(str(error))
    except BatonError as error:
        fail(explain(error, server))
    except ExceptionGroup as group:  # of concurrent tasks; the first is reported
        first = group.exceptions[0]
        if not isinstance(first, BatonError):
            raise
        fail(explain(first, server))


def table(*columns: str) -> Table:
    """A table whose columns are right-aligned, except the first."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        found.add_column(column, justify="right" if index else "left", no_wrap=True)
    return found


def shown(value: float | None, digits: int = 1) -> str:
    """A number; "-" for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def progress_bar(console: Console, *more: ProgressColumn, **settings: Any) -> Progress:
    """Description, bar, count and time; then `more`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, *more, console=console, **settings)
