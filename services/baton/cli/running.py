"""Runs a command's coroutine: signals, and errors as one line."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from baton.cli.answer import explain
from baton.cli.child import ChildError
from baton.cli.options import fail
from baton.client import BatonError


def run_until_signal(main: Callable[[], Coroutine[Any, Any, int]], interrupted: int = 130) -> int:
    """Runs `main` in an event loop; returns its result, or `interrupted` after a signal.

    SIGINT, SIGTERM and SIGHUP cancel it; a second one cancels once more, which makes a deployment kill its
    processes instead of waiting for them.
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
    """Runs `main` and exits with what it returns; a ChildError or BatonError is a line on stderr and 1."""
    try:
        raise SystemExit(run_until_signal(main, interrupted))
    except ChildError as error:
        fail(str(error))
    except BatonError as error:
        fail(explain(error, server))
    except ExceptionGroup as group:  # of tasks that ran at the same time: the first tells enough
        first = group.exceptions[0]
        if not isinstance(first, BatonError):
            raise
        fail(explain(first, server))
