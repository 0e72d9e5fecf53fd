"""Processes that take part in a measurement."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class BenchError(Exception):
    """A process of the measurement failed; one line."""


class BenchProcess:
    """A Python process that runs `main(connection, *arguments)`; messages are pickled both ways.

    It ignores SIGINT. Its end of the connection raises EOFError or OSError once this process is gone.
    """

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(main, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended; `receive` says why
            self._connection.send(message)

    async def receive(self) -> Any:
        """The next message. Raises BenchError if the process has ended, or says that it failed."""
        try:
            message = await asyncio.to_thread(self._connection.recv)
        except (EOFError, OSError):
            await asyncio.to_thread(self._process.join)
            raise BenchError(f"a process ended with code {self._process.exitcode}") from None
        if isinstance(message, BenchError):
            raise message
        return message

    async def stop(self, seconds: float = 0.0) -> None:
        """Closes the connection, and kills the process if it still runs after `seconds`."""
        if seconds:
            self._connection.close()
            await asyncio.to_thread(self._process.join, seconds)
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        self._connection.close()


def _run(main: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        main(connection, *arguments)
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except Exception as error:
        connection.send(BenchError(f"{type(error).__name__}: {error}"))
