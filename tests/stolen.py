"""Time that the host of a virtual machine takes away, and what becomes of a test that fails meanwhile.

On a crowded host a machine's processors stand still for milliseconds or seconds, and what is measured then
is the host. So a test that fails while time is stolen runs again, once the host is calmer. One that holds
Baton to fractions of a second (`times`) and fails so in every attempt has shown nothing: it is skipped. The
summary names both, and what failed. A failure on a calm host is a failure, at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ATTEMPTS = 4
SHARE = 0.1
"""Of the time for which there was work for processors: a failure says nothing if more was stolen."""
WAIT_SECONDS = 20.0
"""For calm, before another attempt."""
EXTRA_SECONDS = 900.0
"""For attempts that do not count and waits, in one run: it ends, however crowded the host."""


class Clock(NamedTuple):
    """Seconds since the machine was started, of all processors together."""

    busy: float
    stolen: float

    def share(self, since: Clock) -> float:
        """Stolen, of what was asked for; 0 where that is too little to say."""
        busy, stolen = self.busy - since.busy, self.stolen - since.stolen
        return stolen / (stolen + busy) if stolen >= 0.05 else 0.0


def read_clock() -> Clock:
    """Where there is no /proc/stat nothing is stolen. Source: proc_stat(5)."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    except OSError:
        return Clock(0.0, 0.0)
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) / tick for field in fields)
    return Clock(user + nice + system + irq + softirq, steal)


class StolenTime:
    """The plugin, for one run (of pytest-xdist: for one worker). pytest-rerunfailures does the repeating."""

    def __init__(self, read: Callable[[], Clock] = read_clock) -> None:
        self._read = read
        self._began = self._attempt = read()
        self._started = 0.0
        self._extra_seconds = EXTRA_SECONDS
        self._share = 0.0
        """Stolen from the last attempt."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        again = pytest.mark.flaky(reruns=ATTEMPTS - 1, condition=self.is_to_be_repeated)
        for item in items:
            item.add_marker(again)

    def is_to_be_repeated(self) -> bool:
        """The last attempt, if it failed."""
        return self._share > SHARE and self._extra_seconds > 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if _attempt(item) > 1:
            self._wait_for_calm()
            self._extra_seconds -= time.monotonic() - self._started
        self._attempt, self._started, self._share = self._read(), time.monotonic(), 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Around that of pytest-rerunfailures, which is to see failures as such."""
        report = yield
        self._share = self._read().share(since=self._attempt)
        last = _attempt(item) == ATTEMPTS or self._extra_seconds <= 0
        times = item.get_closest_marker("times") and report.when != "teardown"
        if report.failed and self._share > SHARE and last and times:
            report.outcome = "skipped"
            file, line, _ = item.location
            why = f"says nothing: {self._share:.0%} of its time was stolen: {_message(report)}"
            report.longrepr = (file, line or 0, why)
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for report in terminalreporter.getreports("rerun"):
            terminalreporter.write_line(f"RERUN {report.nodeid} - {_message(report)}")
        share = self._read().share(since=self._began)
        terminalreporter.write_line(f"stolen from this machine's processors meanwhile: {share:.0%}")

    def _wait_for_calm(self) -> None:
        """Awake often enough for a host without time to show."""
        started, calm = time.monotonic(), False
        while not calm and time.monotonic() - started < min(WAIT_SECONDS, self._extra_seconds):
            before = self._read()
            for _ in range(200):
                time.sleep(0.005)
            calm = self._read().share(since=before) <= SHARE


def _attempt(item: pytest.Item) -> int:
    """From 1 on."""
    return getattr(item, "execution_count", 1)


def _message(report: pytest.TestReport) -> str:
    """The first line of what failed."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return next(iter((crash.message if crash else report.longreprtext).splitlines()), "")
