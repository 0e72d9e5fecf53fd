"""Repeats of tests marked `times`, where the host of a virtual machine takes its processors away.

What such a test measures then is the host. If it fails while more than `SHARE` of the processors' time is
stolen, it runs again, twice at most, and then it fails. With BATON_TEST_UNMEASURED=skip in the environment it
is skipped instead. No other test is repeated: a busy machine is where races show.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

REPEATS = 2
REST_SECONDS = 10.0
SHARE = 0.1
"""Stolen, of the time for which there was work for processors."""


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
    """The plugin. pytest-rerunfailures does the repeating."""

    def __init__(self, read: Callable[[], Clock] = read_clock) -> None:
        self._read = read
        self._began = self._attempt = read()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        repeat = pytest.mark.flaky(reruns=REPEATS, reruns_delay=REST_SECONDS, condition=self._is_unmeasured)
        for item in items:
            if item.get_closest_marker("times"):
                item.add_marker(repeat)

    def _is_unmeasured(self) -> bool:
        """Whether the current attempt's failure says nothing."""
        return self._read().share(since=self._attempt) > SHARE

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._attempt = self._read()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        if (
            report.failed
            and report.when == "call"
            and item.get_closest_marker("times")
            and getattr(item, "execution_count", 1) > REPEATS
            and self._is_unmeasured()
            and os.environ.get("BATON_TEST_UNMEASURED") == "skip"
        ):
            report.outcome = "skipped"
            file, line, _ = item.location
            report.longrepr = (file, line or 0, f"not measured, processors were stolen: {report.longrepr}")
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        share = self._read().share(since=self._began)
        terminalreporter.write_line(f"stolen from this machine's processors meanwhile: {share:.0%}")
