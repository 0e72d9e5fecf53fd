"""Ends chat templates that loop or grow without limit: a checkpoint's code, which runs in a thread here."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psutil
from jinja2 import Environment, TemplateError

RENDER_SECONDS = 5.0
"""Limit of a thread's processor time."""
RENDER_BYTES = 2 * 2**30
"""By which this process may grow meanwhile."""
CHECK_SECONDS = 0.02

T = TypeVar("T")


class RenderLimitExceeded(Exception):
    """The template takes too much time or memory."""


class _Over(BaseException):
    """Raised in the rendering thread, by another one; no template and no library catches it."""


@dataclass(slots=True)
class _Run:
    thread: int
    clock: int
    until: float
    """By that clock."""
    resident: int = 0
    """Bytes of the process when it was first looked at."""
    reason: str = ""
    """Why it is being ended."""


class RenderLimits:
    """Thread-safe. An operation of Python's own, such as joining two texts, is not interrupted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Released also where _Over is raised: its methods are no Python code, as a Condition's are."""
        self._some = threading.Event()
        self._running: dict[int, _Run] = {}
        self._process = psutil.Process()
        self._watching = False

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Raises RenderLimitExceeded."""
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        run = _Run(thread, clock, time.clock_gettime(clock) + RENDER_SECONDS)
        try:
            self._begin(run)
            try:
                result = work()
            except _Over:
                raise
            except BaseException:
                self._end(run)
                raise
            self._end(run)
            return result
        except _Over:
            raise RenderLimitExceeded(run.reason) from None

    def _begin(self, run: _Run) -> None:
        with self._lock:
            self._running[run.thread] = run
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="render limits", daemon=True).start()
            self._some.set()

    def _end(self, run: _Run) -> None:
        """From here on nothing is raised in the thread; what is under way comes now."""
        with self._lock:
            ending = self._running.pop(run.thread, None) is None
        deadline = time.monotonic() + 1.0
        while ending and time.monotonic() < deadline:
            time.sleep(0)

    def _watch(self) -> None:
        while True:
            self._some.wait()
            with self._lock:
                self._check()
                if not self._running:
                    self._some.clear()
            time.sleep(CHECK_SECONDS)

    def _check(self) -> None:
        resident = self._process.memory_info().rss
        for run in list(self._running.values()):
            run.resident = run.resident or resident
            if time.clock_gettime(run.clock) > run.until:
                run.reason = f"it takes more than {RENDER_SECONDS:g} s"
            elif resident - run.resident > RENDER_BYTES:
                run.reason = f"it takes more than {RENDER_BYTES >> 20} MiB of memory"
            else:
                continue
            del self._running[run.thread]
            thread, over = ctypes.c_ulong(run.thread), ctypes.py_object(_Over)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, over)


def takes_powers(template: str) -> bool:
    """Whether the template raises numbers to powers: a single one may take hours, and is not interrupted."""
    before = ""
    try:
        for _, kind, text in Environment().lex(template):
            if kind == "operator" and text == "**" and before not in ("(", ","):
                return True
            before = before if kind == "whitespace" else text
    except TemplateError:
        return False  # it is refused when it is used
    return False
